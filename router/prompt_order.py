"""In which order a replica computes the prompts that it was sent, where it does as it is told: what goes before a prompt, and
what comes after it?

It computes the most urgent one next. `router.fleet` counts as a prompt's wait only what goes before it, and each prompt that
comes after it as a reason not to send it there. Replicas tell how much is left in sum at most, not of which prompt; this
keeps account of both, by the replica's pace.

Own workers interrupt what has begun for what is more urgent (`workers.scheduler`). Other engines finish it first: vLLM gives a
step's tokens to running requests before it looks at waiting ones. There only the answer tells that one is done, so what
is under way is at most done, and the others are not begun, however long ago that should have been.

Cost: adding, taking out and asking are O(prompts that are not computed yet), which are few: a fleet that is full lets
prompts wait before it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
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
_NOTHING: Final[Mapping[Any, float]] = {}


class _Left(msgspec.Struct, eq=False):
    owner: Any
    urgency: Urgency
    total: float
    tokens: float
    """Of those, what is left."""


class PromptOrder:
    def __init__(self, *, interrupts: bool = True) -> None:
        """`interrupts`: what is under way is computed later when something more urgent comes."""
        self._interrupts = interrupts
        self._lefts: list[_Left] = []  # the most urgent first
        self._under_way: _Left | None = None  # where it is finished first
        self._worked_until = float("-inf")

    def __len__(self) -> int:
        return len(self._lefts)

    def add(self, owner: object, urgency: Urgency, tokens: int, now: float, rate: float) -> None:
        """`rate`: prefill tokens a second, here and below."""
        self._work(now, rate)
        left = _Left(owner, urgency, float(tokens), float(tokens))
        insort(self._lefts, left, key=_urgency)
        if self._under_way is None and not self._interrupts:
            self._under_way = left

    def discard(self, owner: object, now: float, rate: float) -> None:
        """It is computed, or gone."""
        self._work(now, rate)
        self._lefts = [left for left in self._lefts if left.owner is not owner]
        if self._under_way is not None and self._under_way.owner is owner:
            self._under_way = self._lefts[0] if self._lefts else None

    def tokens_left(self, now: float, rate: float) -> float:
        """Of all of them. Changes nothing, like what follows."""
        return sum(self._rests(now, rate))

    def may_pass(self, urgency: Urgency) -> bool:
        """Whether anything is less urgent."""
        return bool(self._lefts) and self._lefts[-1].urgency > urgency

    def needed(self, shared: Mapping[Any, float], now: float, rate: float) -> dict[Any, float]:
        """Of the first so many tokens of owners, those that are left; only where there are some."""
        found = {}
        for left, rest in zip(self._lefts, self._rests(now, rate), strict=True):
            if (tokens := shared.get(left.owner, 0.0) - (left.total - rest)) > 0:
                found[left.owner] = tokens
        return found

    def behind(self, urgency: Urgency, now: float, rate: float, needed: Mapping[Any, float] = _NOTHING) -> Behind:
        """What a prompt that comes now would go before. `needed`: tokens of owners that are computed before it all the same."""
        if not self.may_pass(urgency):
            return _NOBODY
        tokens, delayed = 0.0, 0
        under_way, yields = self._under_way, urgency.yields
        for left, rest in zip(self._lefts, self._rests(now, rate), strict=True):
            if rest and left.urgency > urgency and left is not under_way:
                tokens += max(rest - needed.get(left.owner, 0.0), 0.0) if needed else rest
                delayed += left.urgency.yields == yields
        return Behind(tokens, delayed)

    def _rests(self, now: float, rate: float) -> list[float]:
        """Tokens left of each, in order."""
        done = rate * (now - self._worked_until)
        rests = [left.tokens for left in self._lefts]
        if done <= 0.0:
            return rests
        if self._interrupts:
            for place, tokens in enumerate(rests):
                if done < tokens:
                    rests[place] = tokens - done
                    break
                rests[place] = 0.0
                done -= tokens
        elif self._under_way is not None:
            place = self._lefts.index(self._under_way)
            rests[place] = max(rests[place] - done, 0.0)
        return rests

    def _work(self, now: float, rate: float) -> None:
        """The replica has computed since the last time."""
        for left, rest in zip(self._lefts, self._rests(now, rate), strict=True):
            left.tokens = rest
        self._worked_until = max(now, self._worked_until)
