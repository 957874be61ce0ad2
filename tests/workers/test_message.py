"""Thoughts, content and calls out of an assistant's text, under every way to cut it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.message import MAX_UNDECIDED, CallArguments, CallStart, Content, MessageParser, Piece, Reasoning

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
LONGEST_HELD = 8 + len("</tool_call>") - 1
"""Line ends and the beginning of a tag."""


def parser(tools: bool = True, **options: Any) -> MessageParser:
    return MessageParser(tools=tools, call_id=lambda index: f"call-{index}", **options)


def cut_at(text: str, places: Iterable[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(borders)]


def pieces_of(parts: Sequence[str], **options: Any) -> list[Piece]:
    """What comes out in all, pieces of a kind joined."""
    message = parser(**options)
    pieces = [piece for part in parts for piece in message.push(part)] + list(message.finish())
    return [_joined(list(group)) for _, group in groupby(pieces, key=_kind)]


def _kind(piece: Piece) -> tuple[str, int]:
    return type(piece).__name__, getattr(piece, "index", 0)


def _joined(pieces: list[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces if not isinstance(piece, CallStart))
    match pieces[0]:
        case CallArguments(index):
            return CallArguments(index, text)
        case Content():
            return Content(text)
        case Reasoning():
            return Reasoning(text)
        case CallStart() as start:
            assert len(pieces) == 1, "a call is announced once"
            return start


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def call_pieces(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallStart(index, f"call-{index}", name), CallArguments(index, arguments)]


FRAGMENTS = st.one_of(
    st.sampled_from(TAGS),
    st.sampled_from([tag[:length] for tag in TAGS for length in range(1, len(tag))]),
    st.sampled_from(
        ['{"name": "f", "arguments": {', '{"arguments": {"a": [', '"name"', '"a": "b\\"', '", "name": "g"}']
    ),
    st.text('{}[]",:\\<>\n ef1é', max_size=6),
    st.just(call_text("f", '{"a": [1, "</tool_call>"]}')),
)
ANY_TEXT = st.lists(FRAGMENTS, max_size=12).map("".join)
OPTIONS = st.fixed_dictionaries(
    {"tools": st.booleans(), "parallel": st.booleans(), "reasoning": st.booleans(), "reasoning_open": st.booleans()}
)


@given(text=ANY_TEXT, places=st.lists(st.integers(0, 200)), options=OPTIONS)
def test_pieces_do_not_depend_on_how_the_text_is_cut(text: str, places: list[int], options: dict[str, bool]) -> None:
    whole = pieces_of([text], **options)

    assert pieces_of(cut_at(text, places), **options) == whole
    assert pieces_of(list(text), **options) == whole


@given(text=ANY_TEXT, options=OPTIONS)
def test_no_more_is_held_back_than_what_may_be_a_tag_or_become_a_call(text: str, options: dict[str, bool]) -> None:
    message = parser(**options)
    for end, char in enumerate(text, start=1):
        message.push(char)
        held = "".join(piece.text for piece in pieces_after(message, text[:end], options))
        undecided = held.startswith("<tool_call>", len(held) - len(held.lstrip("\n")))
        assert len(held) <= LONGEST_HELD or undecided


def pieces_after(message: MessageParser, text: str, options: dict[str, bool]) -> Sequence[Content | Reasoning]:
    """What would come out if the text ended here."""
    other = parser(**options)
    other.push(text)
    return [piece for piece in other.finish() if isinstance(piece, Content | Reasoning)]


WORDS = st.text('ab <>{}"\n\\é😀', max_size=12).map(lambda text: text.strip("\n"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(TAGS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.builds(
    json.dumps,
    st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
)
NAMES = st.text(min_size=1, max_size=8)


@given(
    thoughts=st.none() | WORDS,
    opened=st.booleans(),
    content=WORDS,
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3),
    places=st.lists(st.integers(0, 300)),
)
def test_a_message_as_templates_write_it_is_taken_apart_again(
    thoughts: str | None, opened: bool, content: str, calls: list[tuple[str, str]], places: list[int]
) -> None:
    text = "\n".join([content] * bool(content) + [call_text(*call) for call in calls])
    expected: list[Piece] = [Content(content)] if content else []
    expected += [piece for index, call in enumerate(calls) for piece in call_pieces(index, *call)]
    if thoughts is not None:
        text = f"{'' if opened else '<think>'}\n{thoughts}\n</think>\n\n{text}"
        expected = [Reasoning(thoughts)] * bool(thoughts) + expected

    opened = opened and thoughts is not None
    assert pieces_of(cut_at(text, places), reasoning=True, reasoning_open=opened) == expected


def test_thoughts_that_templates_have_opened_need_no_tag() -> None:
    assert pieces_of(["\nhm", "m\n</th", "ink>\n\nSo."], reasoning=True, reasoning_open=True) == [
        Reasoning("hmm"),
        Content("So."),
    ]


@pytest.mark.parametrize(
    "text", ["So <think>it</think>", "\n\n<thin", " <think>a</think>", "\n" * 9 + "<think>", "</think>a"]
)
def test_thoughts_come_first_or_not_at_all(text: str) -> None:
    assert pieces_of(list(text), reasoning=True) == [Content(text)]


def test_only_the_first_thoughts_are_thoughts_and_calls_in_them_are_none() -> None:
    text = f"<think>a{call_text('f', '{}')}<think></think>b<think>c</think>"

    assert pieces_of(list(text), reasoning=True) == [
        Reasoning(f"a{call_text('f', '{}')}<think>"),
        Content("b<think>c</think>"),
    ]


@given(text=ANY_TEXT, places=st.lists(st.integers(0, 200)))
def test_tags_that_nobody_asked_for_are_content(text: str, places: list[int]) -> None:
    assert pieces_of(cut_at(text, places), tools=False) == ([Content(text)] if text else [])


F = call_pieces(0, "f", "{}")
MALFORMED: list[tuple[str, list[Piece]]] = [
    # What cannot become a call is content.
    ("a\n<tool_call>\nb", [Content("a\n<tool_call>\nb")]),
    ("<tool_call></tool_call>", [Content("<tool_call></tool_call>")]),
    ("<tool_call>{}</tool_call>", [Content("<tool_call>{}</tool_call>")]),
    ('<tool_call>{"name": "f"}</tool_call>', [Content('<tool_call>{"name": "f"}</tool_call>')]),
    ('<tool_call>{"arguments": {}}</tool_call>', [Content('<tool_call>{"arguments": {}}</tool_call>')]),
    ('<tool_call>{"name": "", "arguments": {}}', [Content('<tool_call>{"name": "", "arguments": {}}')]),
    ('<tool_call>{"name": 1, "arguments": {}}', [Content('<tool_call>{"name": 1, "arguments": {}}')]),
    ('<tool_call>{"name": "f", "arguments": "{}"}', [Content('<tool_call>{"name": "f", "arguments": "{}"}')]),
    ('<tool_call>{"name": "f", "arguments": []}', [Content('<tool_call>{"name": "f", "arguments": []}')]),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}', [Content('<tool_call>{"name": "\\ud800", "arguments": {}}')]),
    ('<tool_call>{"name": "f" "arguments": {}}', [Content('<tool_call>{"name": "f" "arguments": {}}')]),
    ("<tool_call>{'name': 'f'}", [Content("<tool_call>{'name': 'f'}")]),
    ('<tool_call>[{"name": "f", "arguments": {}}]', [Content('<tool_call>[{"name": "f", "arguments": {}}]')]),
    ('<tool_call>{"arguments": {"a": <', [Content('<tool_call>{"arguments": {"a": <')]),
    # The text ends too early.
    ("a\n<tool_ca", [Content("a\n<tool_ca")]),
    ('a\n<tool_call>\n{"name": "f', [Content('a\n<tool_call>\n{"name": "f')]),
    ('<tool_call>{"name": "f", "arguments": ', [Content('<tool_call>{"name": "f", "arguments": ')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "b', call_pieces(0, "f", '{"a": "b')),
    ('<tool_call>{"name": "f", "arguments": {}', F),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool', F),
    # A call behind what looked like one.
    (f"<tool_call>\n{call_text('f', '{}')}", [Content("<tool_call>\n"), *F]),
    (f'<tool_call>{{"name": {call_text("f", "{}")}', [Content('<tool_call>{"name": '), *F]),
    # What is announced stays a call.
    ('<tool_call>{"name": "f", "arguments": {"a": tru, }}</tool_call>b', [*call_pieces(0, "f", '{"a": tru, }'), Content("b")]),
    ('<tool_call>{"name": "f", "arguments": {"a": [1}}\n</tool_call>b', [*call_pieces(0, "f", '{"a": [1}}'), Content("b")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "1}}\n</tool_call>b', call_pieces(0, "f", '{"a": "1}}\n</tool_call>b')),
    ('<tool_call>{"name": "f", "arguments": {}</tool_call>b', [*F, Content("b")]),
    ('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>b', [*call_pieces(0, "f", '{"a": [1'), Content("b")]),
    ('<tool_call>{"name": "f", "arguments": {}}b', [*F, Content("b")]),
    ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', [*F, Content("}</tool_call>")]),
    ('<tool_call>{"name": "f", "arguments": {}, b}</tool_call>', [*F, Content("b}</tool_call>")]),
    # What JSON allows.
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', call_pieces(0, "f", '{"a": 1}')),
    ('<tool_call>{"id": 7, "name": "f", "x": [{}], "arguments": {}, "arguments": [], "name": 1}</tool_call>', F),
    ('<tool_call>{"n\\u0061me": "\\u0066", "arguments": {}}</tool_call>', F),
    ('<tool_call>{"name": "</tool_call>", "arguments": {}}', call_pieces(0, "</tool_call>", "{}")),
    (call_text("f", '{"a": "</tool_call>\\"}"}'), call_pieces(0, "f", '{"a": "</tool_call>\\"}"}')),
    (call_text("f", '{"\\\\": "\\\\"}'), call_pieces(0, "f", '{"\\\\": "\\\\"}')),
    # Spaces around calls.
    (f"{call_text('f', '{}')} \n\n{call_text('g', '{}')}\n", [*F, *call_pieces(1, "g", "{}")]),
    (f"\n{call_text('f', '{}')}\n\n a \n", [*F, Content("a \n")]),
    (f"a \n\n{call_text('f', '{}')}", [Content("a "), *F]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MALFORMED)
def test_what_becomes_of_texts_that_are_not_quite_right(text: str, expected: list[Piece]) -> None:
    assert pieces_of([text]) == expected
    assert pieces_of(list(text)) == expected


def test_a_call_is_told_as_it_comes() -> None:
    message = parser()
    parts = ["Hi", ".\n<tool", "_call>\n", '{"name": "', 'f", "arguments": ', '{"a', '": 1', "}}\n", "</tool_call>"]

    assert [list(message.push(part)) for part in parts] == [
        [Content("Hi")],
        [Content(".")],
        [],
        [],
        [],
        [CallStart(0, "call-0", "f"), CallArguments(0, '{"a')],
        [CallArguments(0, '": 1')],
        [CallArguments(0, "}")],
        [],
    ]
    assert message.num_calls == 1
    assert list(message.finish()) == []


def test_without_parallel_calls_only_the_first_one_counts() -> None:
    text = f"a\n{call_text('f', '{}')}\n{call_text('g', '{}')}\nb\n<tool_call>c"

    assert pieces_of(list(text), parallel=False) == [Content("a"), *F, Content("b\n<tool_call>c")]


def test_arguments_before_the_name_are_held_back_up_to_a_bound() -> None:
    head, tail = '{"arguments": {"a": "', '"}, "name": "f"}'
    fits = "b" * (MAX_UNDECIDED - len(head + tail) + 1)  # the last bracket may lie behind it

    for filler, is_call in ((fits, True), (fits + "b", False)):
        text = f"<tool_call>{head}{filler}{tail}"
        for parts in ([text], [text[i : i + 1000] for i in range(0, len(text), 1000)]):
            pieces = pieces_of(parts)
            assert pieces == (call_pieces(0, "f", f'{{"a": "{filler}"}}') if is_call else [Content(text)])


def test_what_comes_next_is_known_to_be_thoughts() -> None:
    message = parser(reasoning=True)
    seen = [message.in_reasoning]
    for part in ["<think>", "a\n", "</think>", "b"]:
        message.push(part)
        seen.append(message.in_reasoning)

    assert seen == [False, True, True, False, False]
    assert parser(reasoning=True, reasoning_open=True).in_reasoning


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 40_000,
        '<tool_call>{"name": "f", "arguments": {' + '"a": "\\"<", ' * 40_000,
        '<tool_call>{"arguments": {' * 20_000,
        "\n" * 400_000,
        "</tool_cal" * 40_000,
        call_text("f", "{}") * 8_000,
        "<tool_call>" + "{[" * 200_000,
    ],
)
def test_time_grows_with_the_text_and_not_faster(text: str) -> None:
    """It takes 0.3 s; what looks at all of it for each part would take minutes."""
    for size in (len(text), 16):
        begun = time.process_time()
        pieces_of([text[i : i + size] for i in range(0, len(text), size)])
        assert time.process_time() - begun < 3
