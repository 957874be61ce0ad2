"""The tags that models put around thoughts and calls, as tokens, and what a prompt has done with them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["ModelTags", "Reasoning", "ReasoningState"]

ReasoningState = Literal["open", "none", "closed"]
"""What a prompt leaves to the answer: to go on thinking, to choose whether to think, or not to think."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A model that thinks before it answers has ``<think>`` and ``</think>`` as tokens of their own."""

    start: int
    end: int
    special_ids: Collection[int]
    """Tokens between the parts of a chat, of which a template always writes one before it lets the assistant speak."""

    def state_of(self, ids: Sequence[int]) -> ReasoningState:
        """Of a prompt: looks back to where the message that is to be answered or continued began, and no further, since
        the messages before it have tags too."""
        for id_ in reversed(ids):
            if id_ == self.start:
                return "open"
            if id_ == self.end:
                return "closed"
            if id_ in self.special_ids:
                break
        return "none"


@dataclass(frozen=True, slots=True)
class ModelTags:
    reasoning: Reasoning | None = None
    """None: the model does not think aloud."""
    call: tuple[int, int] | None = None
    """``<tool_call>`` and ``</tool_call>``; None: they are text like any other."""

    @classmethod
    def of(cls, encode: Callable[[str], Sequence[int]], special_ids: Collection[int]) -> ModelTags:
        """`encode`: text → ids, with no tokens around it."""
        thoughts, call = _own_tokens(encode, "think"), _own_tokens(encode, "tool_call")
        return cls(Reasoning(*thoughts, frozenset(special_ids)) if thoughts else None, call)


def _own_tokens(encode: Callable[[str], Sequence[int]], name: str) -> tuple[int, int] | None:
    match [encode(f"<{name}>"), encode(f"</{name}>")]:
        case [[start], [end]]:
            return int(start), int(end)
        case _:
            return None
