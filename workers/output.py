"""Ids as they come → text as it may be shown.

Three things make a delta late: a character whose bytes are not all there, the beginning of what may become a stop string,
and nothing else. Pure: knows neither engine nor HTTP, only a function from ids to text.

What must hold, however the ids are grouped: the deltas joined are the text of all ids decoded at once, cut before the stop
string that is complete first, and no part of that stop string was ever shown. The prompt is never decoded, so nothing of
it can leak.

That is exact for decoders that turn bytes into text and put U+FFFD for what is no UTF-8, as byte-level ones do. Those that
judge a whole run of byte tokens at once (byte fallback) take text back when such a run ends broken; then what was shown
stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["Decode", "OutputText"]

Decode = Callable[[Sequence[int]], str]

_UNDECODABLE: Final = "\ufffd"

_UNFINISHED: Final = 3
"""Bytes, and so tokens and U+FFFD at most, that an unfinished character can have: UTF-8 has four at most."""

_LONG_WINDOW: Final = 16
"""Tokens. Only a model that goes on to say U+FFFD makes a longer one."""


class OutputText:
    """The text of one sequence: `push` ids, then `finish`; each returns what is new to show."""

    def __init__(self, decode: Decode, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        """`include_stop`: the text ends behind the stop string."""
        self.num_chars = 0
        """Characters decoded so far, shown or held back; those of an unfinished one are not among them."""
        self._detokenizer = _Detokenizer(decode)
        self._stops = _StopFinder(stop, include_stop) if stop else None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text. Whatever is pushed afterwards is not part of it."""
        return self._stops.found if self._stops is not None else None

    def push(self, ids: Sequence[int], may_stop: bool = True) -> str:
        """`may_stop` False: a stop string that is complete with these ids does not count."""
        text = self._detokenizer.push(ids)
        self.num_chars += len(text)
        return text if self._stops is None else self._stops.push(text, may_stop)

    def finish(self) -> str:
        """No more ids will come: what was held back."""
        text = self._detokenizer.finish()
        return text if self._stops is None else self._stops.push(text) + self._stops.finish()


class _Detokenizer:
    """Decodes a window, not the whole: the last ids whose text is out, for decoders that look to the left, then those
    whose text may still change. So a token costs the same at any length."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0  # ids at the start of the window whose text is all out
        self._num_shown = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        self._window += ids
        text = self._decode(self._window)
        if not text.endswith(_UNDECODABLE):
            return self._show_all(text)
        num_pending = len(self._window) - self._num_context
        if num_pending <= _UNFINISHED:
            return ""
        # Too many ids for one unfinished character, so the model says U+FFFD, or no UTF-8 at all: only the end of it can
        # still become something else.
        undecodable = len(text) - len(text.rstrip(_UNDECODABLE))
        delta = self._show(text, len(text) - min(undecodable, _UNFINISHED))
        if num_pending > _LONG_WINDOW:
            self._try_cut(text)
        return delta

    def finish(self) -> str:
        text = self._decode(self._window)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        delta = text[self._num_shown : end]
        self._num_shown += len(delta)
        return delta

    def _show_all(self, text: str) -> str:
        """The window ends with a whole character."""
        delta = self._show(text, len(text))
        if delta:
            del self._window[: self._num_context]
            self._num_shown = len(self._decode(self._window))
        else:
            del self._window[self._num_context :]  # ids without text, such as special ones, are no context for others
        self._num_context = len(self._window)
        return delta

    def _try_cut(self, text: str) -> None:
        """Shorten the window at a place where its two parts alone give the same text: no character lies across it."""
        for place in range(len(self._window) - _UNFINISHED, self._num_context, -1):
            left = self._decode(self._window[:place])
            if len(left) <= self._num_shown and left + self._decode(self._window[place:]) == text:
                del self._window[:place]
                self._num_context = 0
                self._num_shown -= len(left)
                return


class _StopFinder:
    """Text as it comes → text in front of the first stop string, or up to its end."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""  # the longest end of the text that begins a stop string
        self.found: str | None = None

    def push(self, delta: str, may_stop: bool = True) -> str:
        if self.found is not None or not delta:
            return ""
        text = self._held + delta
        if may_stop and (shown := self._find(text, seen=len(self._held))) is not None:
            self._held = ""
            return shown
        self._held = self._beginning_of_a_stop(text)
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, seen: int) -> str | None:
        """The text that remains if a stop string is complete behind the characters that were `seen` before."""
        # Which one is complete first; of several at the same place the first in the list.
        ends = [
            (start + len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, seen + 1 - len(stop)))) >= 0
        ]
        if not ends:
            return None
        end, self.found = min(ends, key=lambda item: item[0])
        return text[: end if self._include_stop else end - len(self.found)]

    def _beginning_of_a_stop(self, text: str) -> str:
        longest = max(len(stop) for stop in self._stops) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stops):
                return end
        return ""
