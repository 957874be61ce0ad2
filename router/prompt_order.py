"""The prompts that one own worker has still to compute, in the order in which it will, and how much of each is left.

Own workers compute what is urgent first (`workers/scheduler.py`): what does not yield, and then by rank: when a prompt came,
and the later the longer it takes. So a prompt does not wait for all that lies at its replica, and it delays some of that.
Workers tell how much is left in sum, not of which prompt; this keeps account of what we sent, by the replica's pace.

Cost: adding, taking out and asking are O(prompts that are not computed yet), which are few: a fleet that is full lets
prompts wait before it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["Behind", "PromptOrder", "Urgency"]

_urgency: Final = attrgetter("urgency")


class Urgency(NamedTuple):
    """A smaller one is computed sooner."""

    yields: bool
    rank: float
    """Seconds, on the router's clock."""


class Behind(NamedTuple):
    """What is computed after a prompt, although it came before."""

    tokens: float
    delayed: int
    """Prompts of them that it has no right to delay: they yield no more than it does."""


_NOBODY: Final = Behind(0.0, 0)


class _Left(msgspec.Struct, eq=False):
    owner: object
    urgency: Urgency
    tokens: float


class PromptOrder:
    def __init__(self) -> None:
        self._lefts: list[_Left] = []  # the most urgent first
        self._worked_until = float("-inf")

    def __len__(self) -> int:
        return len(self._lefts)

    def add(self, owner: object, urgency: Urgency, tokens: int, now: float, rate: float) -> None:
        """`rate`: prefill tokens a second, here and below."""
        self._work(now, rate)
        insort(self._lefts, _Left(owner, urgency, float(tokens)), key=_urgency)

    def discard(self, owner: object, now: float, rate: float) -> None:
        """It is computed, or gone."""
        self._work(now, rate)
        self._lefts = [left for left in self._lefts if left.owner is not owner]

    def last_of(self, concerns: Callable[[Any], bool]) -> Urgency | None:
        """The least urgent owner's that concerns the caller, of those with something left. None: there is none."""
        return next((left.urgency for left in reversed(self._lefts) if concerns(left.owner)), None)

    def behind(self, urgency: Urgency, now: float, rate: float) -> Behind:
        """What a prompt that comes now would go before. Changes nothing."""
        if not self._lefts or self._lefts[-1].urgency <= urgency:
            return _NOBODY
        done = rate * max(now - self._worked_until, 0.0)
        tokens, delayed = 0.0, 0
        for left in self._lefts:
            rest = max(left.tokens - done, 0.0)
            done = max(done - left.tokens, 0.0)
            if rest and left.urgency > urgency:
                tokens += rest
                delayed += left.urgency.yields == urgency.yields
        return Behind(tokens, delayed)

    def _work(self, now: float, rate: float) -> None:
        """The replica has computed since the last time, the most urgent first."""
        done = rate * max(now - self._worked_until, 0.0)
        self._worked_until = max(now, self._worked_until)
        for left in self._lefts:
            if done <= 0.0:
                return
            part = min(left.tokens, done)
            left.tokens -= part
            done -= part
