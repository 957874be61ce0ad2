"""Ejection of a replica that keeps failing, and the way back.

Five failures in a row eject it for 30 s times the number of ejections in a row (at most 300 s). After that one request is
let through; its first byte closes the breaker, its failure ejects again. Only failures count (5xx, connect errors,
time-outs): busy answers, clients' mistakes and clients who leave decide nothing, so a bad client cannot eject a replica
(sglang#25811).

Results arrive late: a request begun before the last change of state says nothing about what came after. Each request
therefore carries the `Pass` it was begun under, and a result with an outdated pass is ignored.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

__all__ = ["Breaker", "BreakerState", "Pass", "Verdict"]


class BreakerState(Enum):
    CLOSED = "closed"
    """Normal service."""
    OPEN = "open"
    """Ejected until a time; after it, waiting for a request to try with."""
    TRIAL = "trial"
    """One request is out to see whether it is well again."""


class Verdict(Enum):
    """What a request's end says about the replica."""

    GOOD = "good"
    BAD = "bad"
    NOTHING = "nothing"


class _Event(Enum):
    GOOD = "good"
    BAD = "bad"
    BAD_ONCE_TOO_OFTEN = "bad once too often"
    TRY = "try"
    """The ejection is over and a request is sent."""
    TRIAL_BAD = "trial bad"
    TRIAL_UNDECIDED = "trial undecided"


# By names of their own, here and where requests come by: to look a member up in its enum takes 0.12 us (CPython 3.11).
_C, _O, _T = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.TRIAL
_GOOD, _BAD = Verdict.GOOD, Verdict.BAD

_NEXT: Final[dict[tuple[BreakerState, _Event], BreakerState]] = {
    (_C, _Event.GOOD): _C,
    (_C, _Event.BAD): _C,
    (_C, _Event.BAD_ONCE_TOO_OFTEN): _O,
    (_O, _Event.TRY): _T,
    (_T, _Event.TRIAL_BAD): _O,
    (_T, _Event.TRIAL_UNDECIDED): _O,
    # A request sent although the replica was ejected, because all of them were: its success is as good as a trial's, its
    # failure tells nothing new.
    (_O, _Event.GOOD): _C,
    (_T, _Event.GOOD): _C,
    (_O, _Event.BAD): _O,
    (_T, _Event.BAD): _T,
}


class Pass(msgspec.Struct, frozen=True, gc=False):
    """After how many changes of state a request was begun, and whether it is the trial."""

    generation: int
    trial: bool


class Breaker:
    def __init__(self, eject_after: int, eject_s: float, max_eject_s: float) -> None:
        self._eject_after = eject_after
        self._eject_s = eject_s
        self._max_eject_s = max_eject_s
        self.state = BreakerState.CLOSED
        self.until = 0.0
        """End of the last ejection."""
        self._failures = 0
        self._ejections = 0
        self._closed_at = 0.0
        self._generation = 0
        self._permit = Pass(0, False)
        """Of all that begins in this generation but for its trial."""

    def configure(self, eject_after: int, eject_s: float, max_eject_s: float) -> None:
        """Of the next failures and ejections; one under way ends when it was to end."""
        self._eject_after, self._eject_s, self._max_eject_s = eject_after, eject_s, max_eject_s

    @property
    def transitions(self) -> int:
        """Changes of state so far."""
        return self._generation

    def admits(self, now: float) -> bool:
        return self.state is _C or (self.state is _O and now >= self.until)

    def begin(self, now: float) -> Pass:
        """A request is sent, admitted or not."""
        if self.state is _O and now >= self.until:
            self._move(_Event.TRY)
            return Pass(self._generation, True)
        return self._permit

    def first_byte(self, permit: Pass, now: float) -> None:
        """Enough to let an ejected replica back in. Not enough to forgive failures: it may break every answer half way."""
        if self.state is not _C:
            self.end(permit, _GOOD, now)

    def end(self, permit: Pass, verdict: Verdict, now: float) -> None:
        if permit.generation != self._generation:
            return
        if verdict is _GOOD:
            self._failures = 0
            if self.state is not _C:  # most ends are those of a replica that is well: nothing moves
                self._closed_at = now
                self._move(_Event.GOOD)
        elif verdict is _BAD:
            self._fail(permit, now)
        elif permit.trial:
            self._move(_Event.TRIAL_UNDECIDED)

    def _fail(self, permit: Pass, now: float) -> None:
        if permit.trial:
            self._eject(_Event.TRIAL_BAD, now)
            return
        if self.state is _C:
            self._failures += 1
            if self._failures >= self._eject_after:
                self._eject(_Event.BAD_ONCE_TOO_OFTEN, now)
                return
        self._move(_Event.BAD)

    def _eject(self, event: _Event, now: float) -> None:
        # A replica that stayed well for as long as it was ejected before starts to count anew.
        served_s = self._ejection_s()
        if event is _Event.BAD_ONCE_TOO_OFTEN and now - self._closed_at >= served_s:
            self._ejections = 0
        self._ejections += 1
        self.until = now + self._ejection_s()
        self._failures = 0
        self._move(event)

    def _ejection_s(self) -> float:
        return min(self._eject_s * self._ejections, self._max_eject_s)

    def _move(self, event: _Event) -> None:
        state = _NEXT[self.state, event]
        if state is not self.state:
            self.state = state
            self._generation += 1
            self._permit = Pass(self._generation, False)
