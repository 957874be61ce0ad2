"""Requests that ended, on their way to what counts and logs them: many at a time.

What a request does once is cold in the processor's caches whenever it is done: to count and log each for itself takes two to
three times as long as to do it for one of many. So ends wait here until `_MANY` of them do, at most for `_EVERY_S`.

What must hold: each end is told once, in the order in which they came; whoever reads what was counted calls `tell` before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from gateway.job import Record

__all__ = ["Endings"]

_EVERY_S: Final = 0.05
"""Soon enough for people who follow a log; who reads numbers need not wait."""
_MANY: Final = 64
"""Counting and logging so many takes a third of a millisecond, for which the event loop is held."""


class Endings:
    """Belongs to one event loop."""

    def __init__(self, on_ended: Callable[[Sequence[Record]], None]) -> None:
        self._on_ended = on_ended
        self._waiting: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: Record) -> None:
        """Of a request whose record nobody changes any more."""
        waiting = self._waiting
        waiting.append(record)
        if len(waiting) >= _MANY:
            self.tell()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._timed_out)

    def tell(self) -> None:
        """Now, of all that have come."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._on_ended(waiting)

    def _timed_out(self) -> None:
        self._timer = None
        self.tell()

    def close(self) -> None:
        """Nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.tell()
