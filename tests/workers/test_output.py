"""Incremental text against the same ids decoded at once, under every grouping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.trivial import EOS_ID, TrivialTokenizer
from router.wire import unpack_ids
from workers.output import OutputText

REPLACEMENT = "\ufffd".encode()
VOCABULARY = [
    *(bytes([byte]) for byte in range(256)),
    *(text.encode() for text in ["é", "€uro", "😀", "a", "b", "ab", "ba", "bab", " the", "\n"]),
    *("👩‍👩".encode()[i : i + 3] for i in range(0, 11, 3)),
    b"\x80\xf0",
    b"a\xe2\x82",
    b"\xac\xac",
    REPLACEMENT,
    b"",
]
FFFD = VOCABULARY.index(REPLACEMENT)
EMPTY = VOCABULARY.index(b"")


def decode(ids: Sequence[int]) -> str:
    """A byte-level vocabulary, as of GPT-2, Llama 3, Qwen; one id is special and has no text."""
    return b"".join(VOCABULARY[id_] for id_ in ids).decode(errors="replace")


def encode(text: str) -> list[int]:
    return list(text.encode())


def deltas(output: OutputText, groups: Sequence[Sequence[int]]) -> list[str]:
    return [output.push(group) for group in groups] + [output.finish()]


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[id_] for id_ in ids]


any_ids = st.lists(st.integers(0, len(VOCABULARY) - 1) | st.integers(256, len(VOCABULARY) - 1), max_size=60)


def cut_at(ids: list[int], places: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(place % (len(ids) + 1) for place in places)})
    return [ids[start:end] for start, end in pairwise(borders)]


def cut_before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Read one character after the other, as the rule says it."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(ids=any_ids, places=st.lists(st.integers(0, 60)))
def test_joined_deltas_are_the_text_decoded_at_once(ids: list[int], places: list[int]) -> None:
    assert "".join(deltas(OutputText(decode), cut_at(ids, places))) == decode(ids)
    assert "".join(deltas(OutputText(decode), one_by_one(ids))) == decode(ids)


@given(
    ids=st.lists(st.sampled_from([*range(256, len(VOCABULARY)), *b"ab\xe2\x82\xac"]), max_size=40),
    places=st.lists(st.integers(0, 40)),
    stops=st.lists(st.text("ab€\ufffd t\n", min_size=1, max_size=5), max_size=4),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    ids: list[int], places: list[int], stops: list[str]
) -> None:
    for groups in (cut_at(ids, places), one_by_one(ids)):
        output = OutputText(decode, stops)
        text = "".join(deltas(output, groups))
        assert (text, output.stopped_by) == cut_before_stop(decode(ids), stops)


@given(
    groups=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    bound=st.integers(0, 6),
)
def test_a_stop_string_that_was_complete_too_soon_does_not_count_and_may_be_shown(
    groups: list[str], stops: list[str], bound: int
) -> None:
    output = OutputText(decode, stops, include_stop=True)
    text = "".join(output.push(encode(group), may_stop=place >= bound) for place, group in enumerate(groups))

    whole, num_early = "".join(groups), len("".join(groups[:bound]))
    ends = [end for end in range(num_early + 1, len(whole) + 1) for stop in stops if whole[:end].endswith(stop)]
    assert text + output.finish() == whole[: ends[0] if ends else None]
    assert (output.stopped_by is not None) == bool(ends)


@given(text=st.text(), places=st.lists(st.integers(0, 60)))
def test_the_trivial_tokenizer_comes_back_as_it_went_in(text: str, places: list[int]) -> None:
    tokenizer = TrivialTokenizer()
    text = text.replace("\0", "")
    ids = list(unpack_ids(tokenizer.encode(text, add_special_tokens=False)))
    output = OutputText(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))

    assert "".join(deltas(output, cut_at([*ids, EOS_ID], places))) == text


def test_nothing_is_held_back_without_a_reason() -> None:
    output = OutputText(decode, ["\n\n"])

    assert [output.push([id_]) for id_ in encode("so it is")] == list("so it is")


def test_a_character_is_shown_when_its_last_byte_has_come() -> None:
    assert deltas(OutputText(decode), one_by_one(encode("a€b😀"))) == ["a", "", "", "€", "b", "", "", "", "😀", ""]


def test_an_unfinished_character_is_shown_as_undecodable_at_the_end() -> None:
    output = OutputText(decode)

    assert output.push(encode("a€")[:-1]) == ""  # together with the unfinished one; the next push or the end tells
    assert output.finish() == "a\ufffd"


def test_a_model_that_says_the_replacement_character_does_not_stall() -> None:
    output = OutputText(decode)
    shown = 0
    for count in range(1, 200):
        shown += len(output.push([FFFD]))
        assert count - shown <= 3


@pytest.mark.parametrize(
    "ids",
    [
        [0xF0, *[0x9F, 0x98, VOCABULARY.index(b"\x80\xf0")] * 20],  # every character but the last lies across tokens
        [*[FFFD] * 14, *[EMPTY] * 3, FFFD, 0x61],  # nothing in the last ids, where the window is cut
    ],
)
def test_text_that_always_ends_undecodable_is_still_that_of_all_ids(ids: list[int]) -> None:
    assert "".join(deltas(OutputText(decode), one_by_one(ids))) == decode(ids)


@pytest.mark.parametrize("id_", [FFFD, 0x80, EMPTY, VOCABULARY.index(b"a"), VOCABULARY.index(b"\x80\xf0")])
def test_a_token_costs_the_same_however_long_the_text_is(id_: int) -> None:
    decoded = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    output = OutputText(counting)
    for _ in range(1000):
        output.push([id_])

    assert decoded < 60 * 1000


def test_a_stop_string_across_tokens_is_found_and_never_shown_in_part() -> None:
    output = OutputText(decode, ["hello world"])

    assert deltas(output, [encode("say hel"), encode("lo wor"), encode("ld and more")]) == ["say ", "", "", ""]
    assert output.stopped_by == "hello world"


def test_what_only_began_like_a_stop_string_is_shown_as_soon_as_it_differs() -> None:
    output = OutputText(decode, ["\nObservation:"])

    assert deltas(output, [encode("a\nObs"), encode("cure\n"), encode("O")]) == ["a", "\nObscure", "", "\nO"]
    assert output.stopped_by is None


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    output = OutputText(decode, ["aab"])

    assert "".join(deltas(output, one_by_one(encode("aaab")))) == "a"


def test_of_two_stop_strings_complete_at_once_the_first_in_the_list_counts() -> None:
    outputs = [OutputText(decode, stops) for stops in (["bc", "abc"], ["abc", "bc"])]

    assert ["".join(deltas(output, one_by_one(encode("xabc")))) for output in outputs] == ["xa", "x"]
    assert [output.stopped_by for output in outputs] == ["bc", "abc"]


def test_text_after_a_stop_string_is_dropped() -> None:
    output = OutputText(decode, ["."])

    assert deltas(output, [encode("One. Two"), encode(" three")]) == ["One", "", ""]


def words_decoder(pieces: Sequence[str]) -> Callable[[Sequence[int]], str]:
    """As of Llama 2: a word carries its space in front, the first one of a text loses it, specials have no text."""

    def decode_words(ids: Sequence[int]) -> str:
        return "".join(pieces[id_] for id_ in ids).removeprefix(" ")

    return decode_words


def test_spaces_between_words_survive_a_decoder_that_strips_the_first_one() -> None:
    decode_words = words_decoder(["", " LLMs", ".", " It"])

    for ids in ([1, 2, 3, 3], [0, 1, 0, 3, 0, 0, 3]):
        assert "".join(deltas(OutputText(decode_words), one_by_one(ids))) == decode_words(ids)


def decode_byte_fallback(ids: Sequence[int]) -> str:
    """As of Llama 2: bytes that together are no UTF-8 give one U+FFFD each."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def test_neighbouring_characters_of_byte_tokens_come_out_whole() -> None:
    text = "👩‍👩‍👧€"

    assert "".join(deltas(OutputText(decode_byte_fallback), one_by_one(text.encode()))) == text
