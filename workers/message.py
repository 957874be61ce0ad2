"""An assistant's text as it comes → what a chat answer is made of: reasoning, content, tool calls. Pure.

Models write all three into one text. Qwen3 and its like put what they think between ``<think>`` and ``</think>``; a call in the
Hermes and Qwen form is ``<tool_call>``, a JSON object with ``name`` and ``arguments``, ``</tool_call>``.

The rules, which ask only for the text and never for how it was cut:

- Thoughts come first or not at all; tags within them are text. Line ends beside their tags, and before a call, are what chat
  templates put there by themselves. They are dropped, so a message that is sent back renders to the text it came from.
- A call is announced when its name is known and its arguments have begun, in whichever order. What cannot become one is
  content, tag and all, and so is what would have to wait for it longer than `MAX_UNDECIDED`.
- An announced call stays one. Its arguments are told as they come, JSON or not; it ends where its text cannot go on as an
  object, so a missing bracket or closing tag costs nothing but itself. Spaces behind it are dropped.

Held back is only what may still be, or belong to, a tag: a few characters, and the beginning of a call. The time is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from workers.tool_call import CallReader

__all__ = ["CallArguments", "CallStart", "Content", "MessageParser", "Piece", "Reasoning"]


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call is announced: everything about it but its arguments."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the pieces joined are the JSON text that the model wrote."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments

MAX_UNDECIDED: Final = 65_536
"""Characters of a call that are held back at most. Only arguments that come before the name need so many."""

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"

_MAX_LINE_ENDS: Final = 8
"""Dropped before a tag. Templates write one or two; a model that writes them without end is not to be held back."""

_SPACES: Final = " \t\r\n"


class _State(Enum):
    BEFORE_THOUGHTS = auto()
    THOUGHTS = auto()
    CONTENT = auto()
    CALL = auto()
    AFTER_CALL = auto()
    """Behind the object, before its closing tag."""


class MessageParser:
    """One choice of one answer. The pieces do not depend on how the text is split, once those of a kind are joined."""

    def __init__(
        self,
        *,
        tools: bool,
        parallel: bool = True,
        reasoning: bool = False,
        reasoning_open: bool = False,
        call_id: Callable[[int], str],
    ) -> None:
        """`tools`: calls are looked for. `parallel` False: only the first one counts. `reasoning`: so are the tags around
        thoughts; `reasoning_open`: the prompt has already opened them. `call_id`: index of a call → its id."""
        self._tools = tools
        self._parallel = parallel
        self._call_id = call_id
        self._state = _State.BEFORE_THOUGHTS if reasoning else _State.CONTENT
        self._dropping = ""  # characters that count for nothing before the first other one
        if reasoning and reasoning_open:
            self._state, self._dropping = _State.THOUGHTS, "\n"
        self._held = ""  # text that may still be, or belong to, a tag
        self._call = CallReader()
        self._undecided: list[str] = []  # of a call that is not announced yet, from the line ends before its tag on
        self._room = 0  # how much longer that may become
        self._told = True  # whether the call counts
        self._num_calls = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to the thoughts."""
        return self._state is _State.THOUGHTS

    @property
    def num_calls(self) -> int:
        """Calls announced."""
        return self._num_calls

    def push(self, text: str) -> Sequence[Piece]:
        pieces: list[Piece] = []
        text, start, before = self._held + text, 0, None
        while start < len(text) and (start, self._state) != before:
            before = start, self._state
            start = self._step(text, start, pieces)
        self._held = text[start:]
        return pieces

    def finish(self) -> Sequence[Piece]:
        """No more text will come: what was held back."""
        held, self._held = self._held, ""
        if self._state is _State.AFTER_CALL:  # the beginning of a closing tag, at the one place where it is due
            return []
        if self._state is _State.CALL:
            held = "".join(self._undecided)
            self._undecided.clear()
        return [Reasoning(held) if self.in_reasoning else Content(held)] if held else []

    def _step(self, text: str, start: int, pieces: list[Piece]) -> int:
        """Read on from `start`; returns how far. Neither that nor the state moves when more text is needed."""
        match self._state:
            case _State.BEFORE_THOUGHTS:
                return self._look_for_thoughts(text, start)
            case _State.THOUGHTS | _State.CONTENT:
                return self._read_text(text, start, pieces)
            case _State.CALL:
                return self._read_call(text, start, pieces)
            case _State.AFTER_CALL:
                return self._leave_call(text, start)

    def _look_for_thoughts(self, text: str, start: int) -> int:
        tag_start = _skip(text, start, "\n")
        if tag_start - start <= _MAX_LINE_ENDS:
            if text.startswith(_THINK, tag_start):
                self._state, self._dropping = _State.THOUGHTS, "\n"
                return tag_start + len(_THINK)
            if _THINK.startswith(text[tag_start : tag_start + len(_THINK)]):
                return start
        self._state = _State.CONTENT
        return start

    def _read_text(self, text: str, start: int, pieces: list[Piece]) -> int:
        if self._dropping:
            start = _skip(text, start, self._dropping)
            if start == len(text):
                return start
            self._dropping = ""
        thinking = self.in_reasoning
        if not thinking and not self._tools:
            pieces.append(Content(text[start:]))
            return len(text)
        tag = _END_THINK if thinking else _CALL
        found = text.find(tag, start)
        shown = _before_line_ends(text, start, found if found >= 0 else _end_without_begun(text, start, tag))
        if shown > start:
            pieces.append(Reasoning(text[start:shown]) if thinking else Content(text[start:shown]))
        if found < 0:
            return shown
        start = found + len(tag)
        if thinking:
            self._state, self._dropping = _State.CONTENT, "\n"
        else:
            self._state, self._call = _State.CALL, CallReader()
            self._undecided, self._room = [text[shown:start]], MAX_UNDECIDED
        return start

    def _read_call(self, text: str, start: int, pieces: list[Piece]) -> int:
        call, announced = self._call, self._call.announced
        stop = call.feed(text, start, len(text) if announced else min(len(text), start + self._room))
        if not announced:
            self._room -= stop - start
            self._undecided.append(text[start:stop])
            if call.announced:
                self._announce(pieces)
            elif call.ended or not self._room:
                pieces.append(Content("".join(self._undecided)))
                self._state = _State.CONTENT
                return stop
        arguments = call.take_arguments()
        if arguments and self._told:
            pieces.append(CallArguments(self._num_calls - 1, arguments))
        if call.ended:
            self._state = _State.AFTER_CALL
        return stop

    def _announce(self, pieces: list[Piece]) -> None:
        assert self._call.name is not None, "no call is announced without it"
        self._undecided.clear()
        self._told = self._parallel or not self._num_calls
        if self._told:
            pieces.append(CallStart(self._num_calls, self._call_id(self._num_calls), self._call.name))
            self._num_calls += 1

    def _leave_call(self, text: str, start: int) -> int:
        start = _skip(text, start, _SPACES)
        if text.startswith(_END_CALL, start):
            start += len(_END_CALL)
        elif _END_CALL.startswith(text[start : start + len(_END_CALL)]):
            return start
        self._state, self._dropping = _State.CONTENT, _SPACES
        return start


def _skip(text: str, start: int, chars: str) -> int:
    while start < len(text) and text[start] in chars:
        start += 1
    return start


def _before_line_ends(text: str, start: int, end: int) -> int:
    """`end` without the line ends before it, as many as count for a tag."""
    first = max(start, end - _MAX_LINE_ENDS)
    while end > first and text[end - 1] == "\n":
        end -= 1
    return end


def _end_without_begun(text: str, start: int, tag: str) -> int:
    """The end of the text, without what may be the beginning of a tag."""
    for length in range(min(len(tag) - 1, len(text) - start), 0, -1):
        if text.endswith(tag[:length]):
            return len(text) - length
    return len(text)
