"""One choice of an answer as it grows: engine outputs in, what may be shown out. Pure.

What must hold: a delta tells every id, with its logprobs, exactly once, and all that may be shown of the ids told so far has
been shown with them. So who has seen some deltas and knows their ids can go on elsewhere: `replay` brings another choice
into exactly the state that this one was in. That needs nothing but the ids, for what is held back (bytes of an unfinished
character, the beginning of a stop string, of a tag, of a tool call) follows from them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from workers.message import Content, MessageParser, Piece, Reasoning
from workers.output import OutputText
from workers.protocol import Output, TokenLogprob

__all__ = ["AnswerEnd", "Choice", "Delta", "FinishReason"]

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    reason: FinishReason
    stopped_by: str | int | None = None
    """The stop string or the stop token of the client's; None for the model's own end and for none at all."""


class Delta(msgspec.Struct, frozen=True):
    """What is new of a choice: one event of a stream, or a part of a whole answer."""

    pieces: Sequence[Piece]
    num_told: int
    """Ids that earlier deltas told."""
    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None]
    """One for each id where the request asked for them; None for a prompt's first token."""
    offsets: Sequence[int]
    """With `logprobs`: characters in front of each token's text."""
    end: AnswerEnd | None
    """With the last one."""


class Choice:
    def __init__(
        self,
        index: int,
        text: OutputText,
        *,
        has_stops: bool = False,
        min_tokens: int = 0,
        include_stop: bool = False,
        eos_ids: Collection[int] = (),
        logprobs: bool = False,
        num_chars_before: int = 0,
        parser: MessageParser | None = None,
        show_reasoning: bool = True,
        calls_end_it: bool = True,
    ) -> None:
        """`has_stops`: whether `text` may end by itself, which it shall not before `min_tokens`. `eos_ids`: ends of the
        model's own. `num_chars_before`: of an echoed prompt, to count offsets from. `calls_end_it`: whether tool calls
        give the finish reason ``tool_calls``.
        """
        self.index = index
        self.num_tokens = 0
        """What the client pays for: up to the token that ended it, that one included."""
        self.num_reasoning_tokens = 0
        self.cached_tokens = 0
        self.end: AnswerEnd | None = None
        """Set with the last delta; no output counts after that."""
        self._text = text
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._eos_ids = eos_ids
        self._logprobs = logprobs
        self._num_chars_before = num_chars_before
        self._parser = parser
        self._show_reasoning = show_reasoning
        self._calls_end_it = calls_end_it
        self._one_by_one = has_stops or logprobs or parser is not None
        self._has_begun = False
        self._num_told = 0
        self._untold: list[int] = []
        self._untold_logprobs: list[TokenLogprob] = []
        self._untold_offsets: list[int] = []

    def take(self, output: Output) -> Delta | None:
        """What may be shown now; None as long as that is nothing."""
        if not self._has_begun:
            self._has_begun = True
            self.cached_tokens = output.cached_tokens
        pieces = self._advance(output)
        if not pieces and self.end is None:
            return None
        delta = Delta(pieces, self._num_told, self._untold, self._untold_logprobs, self._untold_offsets, self.end)
        self._settle()
        return delta

    def replay(self, id_: int, ended: Literal["stop", "length"] | None) -> None:
        """The next of the ids that were told elsewhere, and whether the sequence ended with it."""
        self._advance(Output(rid=0, ids=[id_], finish_reason=ended))
        self._settle()

    def _settle(self) -> None:
        """Everything up to here has been told."""
        self._num_told = self.num_tokens
        self._untold = []
        if self._logprobs:
            self._untold_logprobs, self._untold_offsets = [], []

    def _advance(self, output: Output) -> Sequence[Piece]:
        # The token that ends a sequence counts but is no text, not even where a client named a word as its end.
        ids = shown = output.ids
        if output.finish_reason == "stop" and not self._include_stop:
            shown = ids[:-1]
        if self._one_by_one:
            pieces = self._push_one_by_one(shown)
        else:
            self._untold += shown
            self.num_tokens += len(shown)
            pieces = self._parse(self._text.push(shown))
        if output.finish_reason is not None and self.end is None:
            for id_ in ids[len(shown) :]:
                self._count(id_)
            pieces = [*pieces, *self._parse(self._text.finish(), last=True)]
            self.end = self._end_of(output)
        if self._logprobs:
            self._untold_logprobs += output.logprobs[: len(self._untold_offsets) - len(self._untold_logprobs)]
        return pieces

    def _push_one_by_one(self, ids: Sequence[int]) -> Sequence[Piece]:
        """Find the token that completes a stop string, where each one's text begins, which ones are thoughts."""
        pieces: Sequence[Piece] = ()
        for id_ in ids:
            self._count(id_)
            was_reasoning = self.in_reasoning
            text = self._text.push((id_,), self.num_tokens > self._min_tokens)
            stopped_by = self._text.stopped_by
            new = self._parse(text, last=stopped_by is not None)
            pieces = [*pieces, *new] if pieces else new
            if was_reasoning and self.in_reasoning:  # the tags around thoughts are none
                self.num_reasoning_tokens += 1
            if stopped_by is not None:
                self.end = AnswerEnd(self._reason("stop"), stopped_by)
                break
        return pieces

    def _count(self, id_: int) -> None:
        self.num_tokens += 1
        self._untold.append(id_)
        if self._logprobs:
            self._untold_offsets.append(self._num_chars_before + self._text.num_chars)

    def _parse(self, text: str, *, last: bool = False) -> Sequence[Piece]:
        if self._parser is None:
            return (Content(text),) if text else ()
        pieces = [*self._parser.push(text), *(self._parser.finish() if last else ())]
        return pieces if self._show_reasoning else [piece for piece in pieces if not isinstance(piece, Reasoning)]

    @property
    def in_reasoning(self) -> bool:
        return self._parser is not None and self._parser.in_reasoning

    def _end_of(self, output: Output) -> AnswerEnd:
        if self._text.stopped_by is not None:  # what was held back became one at the end
            return AnswerEnd(self._reason("stop"), self._text.stopped_by)
        if output.finish_reason != "stop":
            return AnswerEnd("length")
        last = output.ids[-1]
        return AnswerEnd(self._reason("stop"), None if last in self._eos_ids else last)

    def _reason(self, reason: Literal["stop"]) -> FinishReason:
        called = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if called and self._calls_end_it else reason
