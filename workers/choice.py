"""One choice of an answer as it grows: engine outputs in, text to show out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from workers.output import OutputText
from workers.protocol import Output

__all__ = ["Choice"]


class Choice:
    def __init__(self, index: int, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self.index = index
        self.num_tokens = 0
        """What the client pays for: up to the token that ended it, that one included."""
        self.cached_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self._text = OutputText(decode, stop)
        self._has_stops = bool(stop)

    def take(self, output: Output) -> str:
        """The text that may be shown now; with the last of it `finish_reason` is set, and no output counts after that."""
        if not self.num_tokens:
            self.cached_tokens = output.cached_tokens
        # The token that ends a sequence counts but is no text, not even where a client named a word as its end.
        shown = output.ids[:-1] if output.finish_reason == "stop" else output.ids
        text = self._push(shown)
        if self.finish_reason is None and output.finish_reason is not None:
            self.num_tokens += len(output.ids) - len(shown)
            text += self._text.finish()
            ended = output.finish_reason == "stop" or self._text.stopped_by is not None
            self.finish_reason = "stop" if ended else "length"
        return text

    def _push(self, ids: Sequence[int]) -> str:
        if not self._has_stops:
            self.num_tokens += len(ids)
            return self._text.push(ids)
        text = ""
        for id_ in ids:  # one by one, to find the token that completes a stop string
            text += self._text.push([id_])
            self.num_tokens += 1
            if self._text.stopped_by is not None:
                self.finish_reason = "stop"
                break
        return text
