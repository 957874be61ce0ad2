from hypothesis import given
from hypothesis import strategies as st

from router.trivial import EOS_ID, TrivialTokenizer
from router.wire import unpack_ids
from workers.choice import Choice
from workers.protocol import FinishReason, Output


def decode(ids: object) -> str:
    return TrivialTokenizer().decode(ids, skip_special_tokens=True)  # type: ignore[arg-type]


def ids_of(text: str) -> list[int]:
    return unpack_ids(TrivialTokenizer().encode(text, add_special_tokens=False)).tolist()


def output(ids: list[int], finish_reason: FinishReason | None = None, cached_tokens: int = 0) -> Output:
    return Output(rid=1, ids=ids, finish_reason=finish_reason, cached_tokens=cached_tokens)


def test_text_comes_as_the_tokens_do() -> None:
    choice = Choice(0, decode, ())

    assert choice.take(output(ids_of("The sun "))) == "The sun "
    assert choice.take(output(ids_of("sets"), "length")) == "sets"
    assert (choice.num_tokens, choice.finish_reason) == (3, "length")


def test_the_end_token_counts_but_is_no_text() -> None:
    choice = Choice(0, decode, ())

    text = choice.take(output([*ids_of("The sun "), EOS_ID], "stop"))

    assert text == "The sun "
    assert (choice.num_tokens, choice.finish_reason) == (3, "stop")


def test_a_word_that_was_named_as_the_end_is_no_text_either() -> None:
    choice = Choice(0, decode, ())

    assert choice.take(output(ids_of("The sun end."), "stop")) == "The sun "
    assert choice.num_tokens == 3


def test_a_stop_string_ends_the_choice_at_the_token_that_completes_it() -> None:
    choice = Choice(0, decode, ["n se"])

    text = choice.take(output(ids_of("The sun sets and the moon ")))

    assert text == "The su"
    assert (choice.num_tokens, choice.finish_reason) == (3, "stop")


def test_what_may_become_a_stop_string_is_shown_at_the_end() -> None:
    choice = Choice(0, decode, ["sun goes"])

    assert choice.take(output(ids_of("The sun "))) == "The "
    assert choice.take(output(ids_of("sets"), "length")) == "sun sets"
    assert choice.finish_reason == "length"


def test_bytes_of_an_unfinished_character_are_shown_at_the_end() -> None:
    choice = Choice(0, decode, ())
    first = ids_of("abc世")[0]

    assert choice.take(output([first])) == ""
    assert choice.take(output([], "length")) == "abc\ufffd"


def test_cached_tokens_are_those_of_the_first_output() -> None:
    choice = Choice(0, decode, ())

    choice.take(output(ids_of("abcd"), cached_tokens=32))
    choice.take(output(ids_of("efgh"), cached_tokens=0))

    assert choice.cached_tokens == 32


@given(
    text=st.text(alphabet="abc é世", min_size=1, max_size=60),
    stop=st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_grouping_of_tokens_changes_neither_text_nor_count(text: str, stop: list[str], sizes: list[int]) -> None:
    ids = ids_of(text)

    def run(groups: list[list[int]]) -> tuple[str, int, str | None]:
        choice = Choice(0, decode, stop)
        shown = ""
        for number, group in enumerate(groups):
            shown += choice.take(output(group, "length" if number == len(groups) - 1 else None))
            if choice.finish_reason is not None:
                break
        return shown, choice.num_tokens, choice.finish_reason

    groups: list[list[int]] = []
    rest = ids
    for number in range(len(ids)):
        size = sizes[number % len(sizes)]
        if rest:
            groups.append(rest[:size])
        rest = rest[size:]

    assert run(groups) == run([ids])
