"""An assistant's text as it comes → what a chat answer is made of: reasoning, content, tool calls. Pure.

Models write all three into one text. Qwen3 and its like put what they think between ``<think>`` and ``</think>``; a call in the
Hermes and Qwen form is ``<tool_call>``, a JSON object with ``name`` and ``arguments``, ``</tool_call>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        raise NotImplementedError

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to the thoughts."""
        raise NotImplementedError

    @property
    def num_calls(self) -> int:
        """Calls announced."""
        raise NotImplementedError

    def push(self, text: str) -> Sequence[Piece]:
        raise NotImplementedError

    def finish(self) -> Sequence[Piece]:
        """No more text will come: what was held back."""
        raise NotImplementedError
