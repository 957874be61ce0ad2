"""What one counter holds, and until when. Pure; `now` is monotonic seconds, `unix` seconds since 1970.

`WindowCounter`: amounts of the last minute, in buckets of half a second. An amount counts until the *end* of its bucket plus a
minute: so no minute, wherever it begins, holds more than the limit, a counter has at most 125 numbers, and less than 1% of a
limit is lost. A token bucket or GCRA that lets a whole minute through at once admits up to twice the limit in some minutes, and
a fixed window does at its border.

`HeldCounter`: amounts that somebody holds now, by holder. A holder that does not renew them loses them.

`DayCounter`: the same, and what was spent on this UTC day. A request that runs past midnight is spent on the day of its end.

All are asked several times a request, so what counts is a plain field, true until `next_end`: `refresh` when that has come.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

__all__ = ["BUCKET_S", "WINDOW_S", "Counter", "DayCounter", "HeldCounter", "WindowCounter"]

WINDOW_S: Final = 60.0
BUCKET_S: Final = 0.5
"""A power of two, so that a bucket's borders are exact."""
_DAY_S: Final = 86_400
_FREE_SOON_S: Final = 1.0
"""Until one of many running requests ends: nobody can know."""
_LOOK_AT_DATE_S: Final = 1.0
"""Wall clocks step; a date that was looked at once may not come when it was due."""


class Counter(ABC):
    __slots__ = ("next_end", "used")

    def __init__(self) -> None:
        self.used = 0
        """What counts against the limit, until `next_end`."""
        self.next_end = math.inf

    @abstractmethod
    def refresh(self, now: float, unix: float) -> None:
        """Make `used` what counts now."""

    @abstractmethod
    def add(self, holder: str, amount: int, bucket: int, until: float) -> None:
        """Take an amount: of a window in `bucket`, of anything held until the time `until`."""

    @abstractmethod
    def change(self, holder: str, held: int, spent: int, bucket: int) -> None:
        """Correct what `holder` took: `held` more (or fewer) are held, `spent` more (or fewer) were used, in `bucket`."""

    @abstractmethod
    def wait_s(self, excess: int, now: float, unix: float) -> float:
        """Seconds until `excess` of what counts now will have gone, or a guess."""

    @abstractmethod
    def reset_s(self, now: float, unix: float) -> float:
        """Seconds until nothing of what counts now does."""


class WindowCounter(Counter):
    __slots__ = ("_amounts",)

    def __init__(self) -> None:
        super().__init__()
        self._amounts: dict[int, int] = {}  # by bucket, almost in order: a lease counts a little into the future

    def refresh(self, now: float, unix: float) -> None:
        """At most twice a second, over at most 125 numbers."""
        for bucket in [bucket for bucket in self._amounts if _end_of(bucket) <= now]:
            self.used -= self._amounts.pop(bucket)
        self.next_end = _end_of(min(self._amounts)) if self._amounts else math.inf

    def add(self, holder: str, amount: int, bucket: int, until: float) -> None:
        self.used += amount
        amounts = self._amounts
        if bucket in amounts:
            amounts[bucket] += amount
        else:
            amounts[bucket] = amount
            self.next_end = min(self.next_end, _end_of(bucket))

    def change(self, holder: str, held: int, spent: int, bucket: int) -> None:
        amount = self._amounts.get(bucket)
        if amount is None:
            return  # that minute is over
        spent = max(spent, -amount)
        self._amounts[bucket] = amount + spent
        self.used += spent

    def wait_s(self, excess: int, now: float, unix: float) -> float:
        for bucket, amount in sorted(self._amounts.items()):
            excess -= amount
            if excess <= 0:
                return _end_of(bucket) - now
        return WINDOW_S

    def reset_s(self, now: float, unix: float) -> float:
        return _end_of(max(self._amounts)) - now if self._amounts else 0.0


class _Hold:
    __slots__ = ("amount", "until")

    def __init__(self) -> None:
        self.amount = 0
        self.until = 0.0


class HeldCounter(Counter):
    __slots__ = ("_holds",)

    def __init__(self) -> None:
        super().__init__()
        self._holds: dict[str, _Hold] = {}

    def refresh(self, now: float, unix: float) -> None:
        for holder in [holder for holder, hold in self._holds.items() if hold.until <= now]:
            self.forget(holder)
        self.next_end = min((hold.until for hold in self._holds.values()), default=math.inf)

    def add(self, holder: str, amount: int, bucket: int, until: float) -> None:
        hold = self._holds.get(holder)
        if hold is None:
            hold = self._holds[holder] = _Hold()
        hold.amount += amount
        hold.until = until
        if until < self.next_end:
            self.next_end = until
        self.used += amount

    def change(self, holder: str, held: int, spent: int, bucket: int) -> None:
        hold = self._holds.get(holder)
        if hold is None:
            return  # forgotten, and with it all that it held
        held = max(held, -hold.amount)
        hold.amount += held
        self.used += held

    def renew(self, holder: str, amount: int, until: float) -> None:
        """`holder` is alive, and holds `amount` as far as this counter has forgotten it."""
        if holder in self._holds:
            self._holds[holder].until = until
        elif amount:
            self.add(holder, amount, 0, until)

    def forget(self, holder: str) -> None:
        if (hold := self._holds.pop(holder, None)) is not None:
            self.used -= hold.amount

    def wait_s(self, excess: int, now: float, unix: float) -> float:
        return _FREE_SOON_S

    def reset_s(self, now: float, unix: float) -> float:
        return _FREE_SOON_S if self.used else 0.0


class DayCounter(HeldCounter):
    __slots__ = ("_day", "_spent")

    def __init__(self) -> None:
        super().__init__()
        self._spent = 0
        self._day = 0
        self.next_end = -math.inf

    def refresh(self, now: float, unix: float) -> None:
        super().refresh(now, unix)
        day = int(unix // _DAY_S)
        if day != self._day:
            self._day = day
            self.used -= self._spent
            self._spent = 0
        self.next_end = min(self.next_end, now + min(_LOOK_AT_DATE_S, _DAY_S - unix % _DAY_S))

    def change(self, holder: str, held: int, spent: int, bucket: int) -> None:
        super().change(holder, held, spent, bucket)
        spent = max(spent, -self._spent)
        self._spent += spent
        self.used += spent

    def wait_s(self, excess: int, now: float, unix: float) -> float:
        return _FREE_SOON_S if excess <= self.used - self._spent else self.reset_s(now, unix)

    def reset_s(self, now: float, unix: float) -> float:
        return _DAY_S - unix % _DAY_S


def _end_of(bucket: int) -> float:
    return (bucket + 1) * BUCKET_S + WINDOW_S
