"""One timer for the many waits of a connection, hardly any of which lasts until its end.

Setting and cancelling a timer of the event loop costs 4 us among everything else that a request does. So a wait that ends in
time leaves the timer where it is, and the next one, which as a rule ends later, finds it set: what fires too early is set anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["Alarm"]

_SLACK_S: Final = 0.001  # uvloop's clock ticks in milliseconds


class Alarm:
    __slots__ = ("_handle", "_loop", "_ring", "_rings_at", "deadline")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ring: Callable[[], None] | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self.deadline = 0.0
        """When it rings, in the loop's time. May be moved later as it is."""

    def set(self, deadline: float, ring: Callable[[], None]) -> None:
        """Call `ring`, once, at `deadline`, instead of what was set before."""
        self.deadline, self._ring = deadline, ring
        if self._handle is None:
            self._wait()
        elif deadline < self._rings_at:
            self._handle.cancel()
            self._wait()

    def clear(self) -> None:
        """Call nobody; the timer stays for the next wait."""
        self._ring = None

    def close(self) -> None:
        """The last: nothing is left with the event loop."""
        self._ring = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wait(self) -> None:
        self._rings_at = self.deadline
        self._handle = self._loop.call_at(self.deadline, self._fired)

    def _fired(self) -> None:
        self._handle = None
        ring = self._ring
        if ring is None:
            return
        if self.deadline - self._loop.time() > _SLACK_S:
            self._wait()
        else:
            self._ring = None
            ring()
