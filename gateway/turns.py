"""Work on the event loop in small turns: what a fleet of replicas says at once must not hold up requests.

Applying an event frame is plain computing on the loop's thread, and a snapshot of 65,000 blocks is 20 to 50 ms of it. So those
who apply frames take turns: one at a time, in order of arrival, each for about `TURN_S`, and after a whole one all others on
the loop come first. All turns together get a third of the loop's time, and besides what they left unused before, up to
`BURST_S`: a gateway that has just started knows nothing of its fleet, and each request that it places meanwhile costs a replica
more than the turns cost the request. Who overdraws it makes the next one wait. A frame that comes alone, as nearly all do,
waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

__all__ = ["BURST_S", "TURN_S", "Turn", "Turns"]

TURN_S: Final = 0.002
BURST_S: Final = 1.0
"""By the clock. Full caches of 8 replicas are 0.25 s of computing, which takes longer where a machine does other things too."""
_SHARE: Final = 1 / 3
_LONGEST_PAUSE_S: Final = 0.1


class Turn:
    __slots__ = ("_began", "_clock")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    @property
    def is_over(self) -> bool:
        return self.spent_s >= TURN_S


class Turns:
    """Shared by all who take turns. `asyncio.Lock` wakes its waiters in order, and each in an iteration of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._credit_s = BURST_S
        self._at = clock()

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Turn]:
        """Compute without awaiting while it lasts, and leave it when it is over."""
        async with self._lock:
            turn = Turn(self._clock)
            try:
                yield turn
            finally:
                was_whole = turn.is_over
                pause_s = self._pause_after(turn.spent_s)
            if was_whole or pause_s > 0:
                await asyncio.sleep(pause_s)

    def _pause_after(self, spent_s: float) -> float:
        """A token bucket: credit comes with time and goes with work. 0: none is due."""
        now = self._clock()
        earned = self._credit_s + (now - self._at) * _SHARE
        self._credit_s, self._at = min(earned, BURST_S) - spent_s, now
        self._credit_s = max(self._credit_s, -_LONGEST_PAUSE_S * _SHARE)
        return max(-self._credit_s / _SHARE, 0.0)
