"""The ledger: every counter there is, and who may take from them. Pure: time is passed in (`gateway.limits.counters`).

What must hold: a call takes from all of its counters or from none; what counts never exceeds a limit, in whatever minute;
what was taken goes back once, and a correction of something that was forgotten meanwhile changes nothing.

A *holder* is one process in one of its lives. What it holds (parallel requests, reserved parts of a day's budget) has a time to
live that each call of the holder renews; `forget` ends it at once. Amounts of a window need no holder: they pass by themselves.

A caller may ask for more than it needs, to spend it later without asking (`extras`): a lease, which lives `LEASE_S`. Of a
window it counts as if it were spent at its very end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

import msgspec

from gateway.limits.counters import (
    BUCKET_S,
    WINDOW_S,
    Counter,
    DayCounter,
    HeldCounter,
    WindowCounter,
)

__all__ = ["HOLD_S", "LEASE_BUCKETS", "LEASE_S", "Change", "Granted", "Ledger", "Limit", "Measure", "Refused"]

LEASE_S: Final = 1.0
"""Longer ones would count longer than they can be spent: a second costs 1.7% of a minute's limit."""
LEASE_BUCKETS: Final = math.ceil(LEASE_S / BUCKET_S) + 1
"""How much later than now what is leased counts. One more than it lives: a unit that was set aside for a trip may be spent when
the trip is over, which takes less than a bucket."""
HOLD_S: Final = 15.0
"""What a process that was killed held is free again after so long, where nobody tells."""


class Measure(IntEnum):
    REQUESTS = 0
    TOKENS = 1
    PARALLEL = 2
    TOKENS_DAY = 3
    USD_DAY = 4
    """Counted in millionths."""


class Limit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    counter: str
    """Names it among all: ``key:k3j2:requests``."""
    measure: Measure
    most: int


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """In the order of the limits asked for."""

    bucket: int
    """In which amounts of windows were counted; leased ones `LEASE_BUCKETS` later."""
    left: Sequence[int]
    """What each limit still leaves for others."""
    extras: Sequence[int] = ()
    """Of what was asked for as extras; empty when nothing was."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    limit: Limit
    """The one that stands in the way longest."""
    wait_s: float | None
    """Seconds until the same would be granted; None: never, since it is more than the whole limit."""
    reset_s: float
    """Until the whole limit is free again."""
    left: int = 0


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A correction of what was taken."""

    counter: str
    measure: Measure
    held: int = 0
    """How many more (negative: fewer) are held."""
    spent: int = 0
    """How many more (negative: fewer) were spent, of a window in `bucket`."""
    bucket: int = 0


class Ledger:
    def __init__(self, hold_s: float = HOLD_S) -> None:
        """`hold_s`: without a call of a holder for so long, it is taken for dead; infinite for a process's own ledger."""
        self._hold_s = hold_s
        self._counters: dict[str, Counter] = {}
        self._next_sweep = 0.0

    def __len__(self) -> int:
        """Counters that are remembered: those used within the last two minutes or days."""
        return len(self._counters)

    def acquire(
        self,
        holder: str,
        limits: Sequence[Limit],
        amounts: Sequence[int],
        now: float,
        unix: float,
        extras: Sequence[int] | None = None,
    ) -> Granted | Refused:
        """Take an amount of each limit, or nothing. `extras`: up to so many more of each, where nobody is the worse for it."""
        if now >= self._next_sweep:
            self._sweep(now, unix)
        known = self._counters
        counters = []
        left = []
        refused = False
        for limit, amount in zip(limits, amounts, strict=True):
            counter = known.get(limit.counter) or self._new(limit.counter, limit.measure)
            if now >= counter.next_end:
                counter.refresh(now, unix)
            free = limit.most - counter.used - amount
            if free < 0:
                refused = True
            counters.append(counter)
            left.append(free)
        if refused:
            return _refusal(limits, amounts, counters, left, now, unix)
        bucket = int(now // BUCKET_S)
        until = now + self._hold_s
        if extras is None:
            for counter, amount in zip(counters, amounts, strict=True):
                counter.add(holder, amount, bucket, until)
            return Granted(bucket, left)
        granted = []
        for place, counter in enumerate(counters):
            extra = min(extras[place], left[place])
            left[place] -= extra
            granted.append(extra)
            counter.add(holder, amounts[place] + extra, bucket + LEASE_BUCKETS if extras[place] else bucket, until)
        return Granted(bucket, left, granted)

    def look(self, limits: Sequence[Limit], now: float, unix: float) -> Refused | None:
        """What `acquire` of one each would say if it refused. Takes nothing."""
        for limit in limits:
            counter = self._counters.get(limit.counter)
            if counter is None:
                continue
            if now >= counter.next_end:
                counter.refresh(now, unix)
            if counter.used >= limit.most:
                return _refusal([limit], [1], [counter], [limit.most - counter.used - 1], now, unix)
        return None

    def used(self, limit: Limit, now: float, unix: float) -> int:
        """What counts against a limit."""
        counter = self._counters.get(limit.counter)
        if counter is None:
            return 0
        counter.refresh(now, unix)
        return counter.used

    def settle(
        self,
        holder: str,
        limits: Sequence[Limit],
        reserved: Sequence[int],
        used: Sequence[int],
        bucket: int,
        now: float,
        unix: float,
    ) -> None:
        """`used` instead of `reserved`, both by measure, of what `acquire` took in `bucket`."""
        known = self._counters
        for limit in limits:
            measure = limit.measure
            if measure < 2:
                spent = used[measure] - reserved[measure]
                if spent and (counter := known.get(limit.counter)) is not None:
                    counter.change(holder, 0, spent, bucket)
            else:
                counter = known.get(limit.counter) or self._new(limit.counter, measure)
                if now >= counter.next_end:
                    counter.refresh(now, unix)
                counter.change(holder, -reserved[measure], used[measure] if measure > 2 else 0, 0)

    def change(self, holder: str, changes: Sequence[Change], now: float, unix: float) -> None:
        for change in changes:
            counter = self._counters.get(change.counter)
            if counter is None:
                if change.measure not in _DAYS:
                    continue
                counter = self._new(change.counter, change.measure)
            counter.refresh(now, unix)
            counter.change(holder, change.held, change.spent, change.bucket)

    def renew(self, holder: str, holds: Sequence[Change], now: float, dead: Sequence[str] = ()) -> None:
        """`holder` lives, and holds so much (`held`) of these counters as far as they have forgotten it. `dead`: earlier lives
        of the same process, which hold nothing of them any more.
        """
        for hold in holds:
            counter = self._counters.get(hold.counter) or self._new(hold.counter, hold.measure)
            if isinstance(counter, HeldCounter):
                for name in dead:
                    counter.forget(name)
                counter.renew(holder, hold.held, now + self._hold_s)

    def forget(self, holder: str) -> None:
        """`holder` is dead: what it held is free."""
        for counter in self._counters.values():
            if isinstance(counter, HeldCounter):
                counter.forget(holder)

    def _new(self, name: str, measure: Measure) -> Counter:
        counter = self._counters[name] = _KINDS[measure]()
        return counter

    def _sweep(self, now: float, unix: float) -> None:
        """Once a minute, drop the counters of which nothing counts."""
        self._next_sweep = now + WINDOW_S
        for counter in self._counters.values():
            counter.refresh(now, unix)
        self._counters = {name: counter for name, counter in self._counters.items() if counter.used}


_KINDS: Final[tuple[Callable[[], Counter], ...]] = (
    WindowCounter,
    WindowCounter,
    HeldCounter,
    DayCounter,
    DayCounter,
)
"""By measure."""
_DAYS: Final = frozenset({Measure.TOKENS_DAY, Measure.USD_DAY})


def _refusal(
    limits: Sequence[Limit],
    amounts: Sequence[int],
    counters: Sequence[Counter],
    left: Sequence[int],
    now: float,
    unix: float,
) -> Refused:
    """Of all limits that refuse, the one that does so longest: to come back sooner would be in vain."""
    worst: Refused | None = None
    for limit, amount, counter, free in zip(limits, amounts, counters, left, strict=True):
        if free >= 0:
            continue
        wait_s = counter.wait_s(-free, now, unix) if amount <= limit.most else None
        refused = Refused(limit, wait_s, counter.reset_s(now, unix), max(0, free + amount))
        if wait_s is None:
            return refused
        if worst is None or worst.wait_s is None or wait_s > worst.wait_s:
            worst = refused
    assert worst is not None
    return worst
