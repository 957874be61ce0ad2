"""A choice against its ids decoded at once, under every grouping of them; and told against replayed."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.trivial import EOS_ID, TrivialTokenizer
from router.wire import unpack_ids
from tests.workers.scripted_engine import made_up_logprob
from workers.choice import AnswerEnd, Choice, Delta
from workers.message import CallArguments, CallStart, Content, MessageParser, Reasoning
from workers.output import OutputText
from workers.protocol import FinishReason, Output


def decode(ids: Sequence[int]) -> str:
    return TrivialTokenizer().decode(ids, skip_special_tokens=True)


def ids_of(text: str) -> list[int]:
    return unpack_ids(TrivialTokenizer().encode(text, add_special_tokens=False)).tolist()


def choice_of(
    stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0, **options: object
) -> Choice:
    return Choice(
        0,
        OutputText(decode, stop, include_stop=include_stop),
        has_stops=bool(stop),
        include_stop=include_stop,
        min_tokens=min_tokens,
        eos_ids=[EOS_ID],
        **options,  # type: ignore[arg-type]
    )


def reader(*, reasoning: bool = False) -> MessageParser:
    return MessageParser(tools=True, reasoning=reasoning, call_id=lambda index: f"call_{index}")


def text_of(delta: Delta | None) -> str:
    pieces = delta.pieces if delta is not None else ()
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def output(ids: list[int], finish_reason: FinishReason | None = None, cached_tokens: int = 0) -> Output:
    return Output(rid=1, ids=ids, finish_reason=finish_reason, cached_tokens=cached_tokens)


def test_text_comes_as_the_tokens_do() -> None:
    choice = choice_of()

    assert text_of(choice.take(output(ids_of("The sun ")))) == "The sun "
    assert text_of(choice.take(output(ids_of("sets"), "length"))) == "sets"
    assert (choice.num_tokens, choice.end) == (3, AnswerEnd("length"))


def test_the_end_token_counts_but_is_no_text() -> None:
    choice = choice_of()

    delta = choice.take(output([*ids_of("The sun "), EOS_ID], "stop"))

    assert delta is not None
    assert text_of(delta) == "The sun "
    assert delta.ids == [*ids_of("The sun "), EOS_ID]
    assert (choice.num_tokens, choice.end) == (3, AnswerEnd("stop"))


def test_a_word_that_was_named_as_the_end_is_no_text_either_and_is_the_reason() -> None:
    choice = choice_of()

    assert text_of(choice.take(output(ids_of("The sun end."), "stop"))) == "The sun "
    assert choice.num_tokens == 3
    assert choice.end == AnswerEnd("stop", ids_of("end.")[0])


def test_it_is_text_where_the_client_wants_to_see_what_stopped_it() -> None:
    choice = choice_of(include_stop=True)

    assert text_of(choice.take(output(ids_of("The sun end."), "stop"))) == "The sun end."
    assert choice.num_tokens == 3


def test_a_stop_string_ends_the_choice_at_the_token_that_completes_it() -> None:
    choice = choice_of(["n se"])

    delta = choice.take(output(ids_of("The sun sets and the moon ")))

    assert text_of(delta) == "The su"
    assert (choice.num_tokens, choice.end) == (3, AnswerEnd("stop", "n se"))


def test_a_stop_string_does_not_count_before_so_many_tokens() -> None:
    choice = choice_of(["u", "s and"], min_tokens=3)

    text = text_of(choice.take(output(ids_of("The sun sets and ")))) + text_of(choice.take(output([], "length")))

    assert text == "The sun set", "which was begun before the bound and completed behind it"
    assert (choice.num_tokens, choice.end) == (4, AnswerEnd("stop", "s and"))


def test_what_may_become_a_stop_string_is_shown_at_the_end_with_its_ids() -> None:
    choice = choice_of(["The sun goes"])

    assert choice.take(output(ids_of("The sun "))) is None
    last = choice.take(output(ids_of("sets"), "length"))

    assert last is not None
    assert text_of(last) == "The sun sets"
    assert (last.num_told, last.ids) == (0, ids_of("The sun sets"))
    assert choice.end == AnswerEnd("length")


def test_bytes_of_an_unfinished_character_are_shown_at_the_end() -> None:
    choice = choice_of()
    first = ids_of("abc世")[0]

    assert choice.take(output([first])) is None
    assert text_of(choice.take(output([], "length"))) == "abc\ufffd"


def test_cached_tokens_are_those_of_the_first_output() -> None:
    choice = choice_of()

    choice.take(output(ids_of("abcd"), cached_tokens=32))
    choice.take(output(ids_of("efgh"), cached_tokens=0))

    assert choice.cached_tokens == 32


def test_calls_end_an_answer_unless_one_was_demanded_by_name() -> None:
    ids = [*ids_of('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'), EOS_ID]
    ends = []
    for calls_end_it in (True, False):
        choice = choice_of(parser=reader(), calls_end_it=calls_end_it)
        delta = choice.take(output(ids, "stop"))
        assert delta is not None
        assert [piece for piece in delta.pieces if isinstance(piece, CallStart)] == [CallStart(0, "call_0", "f")]
        ends.append(choice.end)

    assert ends == [AnswerEnd("tool_calls"), AnswerEnd("stop")]


def test_an_answer_that_is_cut_within_a_call_ends_by_its_length() -> None:
    choice = choice_of(parser=reader())

    choice.take(output(ids_of('<tool_call>{"name": "f", "arguments": {"a": 1'), "length"))

    assert choice.end == AnswerEnd("length")


def test_thoughts_are_counted_and_can_be_left_out() -> None:
    ids = ids_of("<think>\nHm, what? </think>\n\nYes")
    shown, hidden = (
        choice_of(parser=reader(reasoning=True)),
        choice_of(parser=reader(reasoning=True), show_reasoning=False),
    )

    pieces = [
        list(delta.pieces) for delta in (shown.take(output(ids, "length")), hidden.take(output(ids, "length"))) if delta
    ]

    assert "".join(piece.text for piece in pieces[0] if isinstance(piece, Reasoning)) == "Hm, what? "
    assert all(isinstance(piece, Content) for piece in pieces[1])
    assert shown.num_reasoning_tokens == hidden.num_reasoning_tokens
    assert 2 <= shown.num_reasoning_tokens <= 4


def grouped(ids: list[int], sizes: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    rest = ids
    for number in range(len(ids)):
        size = sizes[number % len(sizes)]
        if rest:
            groups.append(rest[:size])
        rest = rest[size:]
    return groups


@given(
    text=st.text(alphabet="abc é世", min_size=1, max_size=60),
    stop=st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_grouping_of_tokens_changes_neither_text_nor_count(
    text: str, stop: list[str], sizes: list[int], include_stop: bool, min_tokens: int
) -> None:
    ids = ids_of(text)

    def run(groups: list[list[int]]) -> tuple[str, int, AnswerEnd | None]:
        choice = choice_of(stop, include_stop=include_stop, min_tokens=min_tokens)
        shown = ""
        for number, group in enumerate(groups):
            shown += text_of(choice.take(output(group, "length" if number == len(groups) - 1 else None)))
            if choice.end is not None:
                break
        return shown, choice.num_tokens, choice.end

    assert run(grouped(ids, sizes)) == run([ids])


TEXTS = st.lists(
    st.sampled_from(
        [
            *"ab é世{}",
            "<think>",
            "</think>",
            '<tool_call>{"name": "f", "arguments": {"x": "',
            '"}}</tool_call>',
            "\n",
            "stop",
        ]
    ),
    max_size=20,
).map("".join)


@given(
    text=TEXTS,
    sizes=st.lists(st.integers(1, 3), min_size=1),
    cut=st.integers(0, 100),
    stop=st.sampled_from([(), ("stop",)]),
)
def test_a_choice_that_replayed_what_was_told_goes_on_as_the_one_that_told_it(
    text: str, sizes: list[int], cut: int, stop: tuple[str, ...]
) -> None:
    """And every id, with its logprob, is told once and in order."""
    outputs = [
        Output(rid=1, ids=group, logprobs=[made_up_logprob(id_, number, 2) for id_ in group])
        for number, group in enumerate(grouped(ids_of(text), sizes))
    ]
    outputs.append(output([EOS_ID], "stop"))

    def new_choice() -> Choice:
        return choice_of(stop, logprobs=True, parser=reader(reasoning=True))

    def run(choice: Choice, outputs: Sequence[Output]) -> list[tuple[int, Delta]]:
        """Each delta with the number of outputs taken until then."""
        deltas = []
        for number, each in enumerate(outputs, 1):
            if choice.end is None and (delta := choice.take(each)) is not None:
                deltas.append((number, delta))
        return deltas

    whole = run(new_choice(), outputs)
    told = [id_ for _, delta in whole for id_ in delta.ids]
    assert [delta.num_told for _, delta in whole] == [
        sum(len(delta.ids) for _, delta in whole[:place]) for place in range(len(whole))
    ]
    assert told == [id_ for each in outputs for id_ in each.ids][: len(told)]
    assert all(len(delta.logprobs) == len(delta.ids) == len(delta.offsets) for _, delta in whole[:-1])

    place = cut % len(whole)
    seen, num_taken = sum(len(delta.ids) for _, delta in whole[:place]), whole[place - 1][0] if place else 0
    resumed = new_choice()
    for id_ in told[:seen]:
        resumed.replay(id_, None)
    assert [delta for _, delta in run(resumed, outputs[num_taken:])] == [delta for _, delta in whole[place:]]
    assert not any(isinstance(piece, CallArguments) and not piece.text for _, delta in whole for piece in delta.pieces)
