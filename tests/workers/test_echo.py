from collections.abc import Sequence

from router.trivial import TrivialTokenizer
from router.wire import pack_ids, unpack_ids
from workers.echo import echo_of
from workers.message import Content
from workers.protocol import TokenLogprob


def decode(ids: Sequence[int]) -> str:
    return TrivialTokenizer().decode(ids, skip_special_tokens=True)


IDS = unpack_ids(TrivialTokenizer().encode("abc世d fghi", add_special_tokens=False))
"""The second token has the end of a character that the first one begins."""


def test_an_echo_is_the_text_that_the_client_wrote() -> None:
    assert echo_of(pack_ids(IDS), "as written", decode, offsets=False).text == "as written"


def test_of_ids_it_is_their_text() -> None:
    assert echo_of(pack_ids(IDS), None, decode, offsets=False).text == "abc世d fghi"


def test_a_token_stands_behind_the_characters_that_were_whole_before_it() -> None:
    assert list(echo_of(pack_ids(IDS), None, decode, offsets=True).offsets) == [0, 0, 6]


def test_the_first_token_has_no_logprob() -> None:
    told = [TokenLogprob(-1.0, [])] * 2

    delta = echo_of(pack_ids(IDS), None, decode, offsets=True).as_delta(told)

    assert list(delta.ids) == list(IDS)
    assert list(delta.logprobs) == [None, *told]
    assert delta.pieces == (Content("abc世d fghi"),)


def test_without_logprobs_no_ids_are_told() -> None:
    delta = echo_of(pack_ids(IDS), None, decode, offsets=False).as_delta([])

    assert (delta.ids, delta.logprobs, delta.end) == ((), (), None)
