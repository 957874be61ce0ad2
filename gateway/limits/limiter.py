"""Limits of requests where the ledger is in the same process: one call, no wait, about 6 us a request with nine limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from gateway.limits.ledger import Granted, Ledger, Limit, Refused
from gateway.limits.reservation import Reservation
from gateway.limits.rules import Amounts

__all__ = ["Limiter", "LocalLimiter"]

_SELF: Final = "self"
_SHARE_WAIT_S: Final = 1.0
"""What is more than a share of a limit may be less than the whole, and the ledger may be back by then."""


class Limiter(Protocol):
    """Who decides whether a request is within its limits. Every call is quick; only `reserve` may wait, and not for long."""

    def look(self, limits: Sequence[Limit]) -> Refused | None:
        """Whether one more request would be refused, as far as that is known here. Takes nothing.

        `limits`: of requests a minute and of parallel ones.
        """

    def try_reserve(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused | None:
        """Take `amounts` from all limits, or nothing. None: that cannot be decided here, `reserve` must be awaited."""

    async def reserve(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused:
        """The same. Cancelled, it takes nothing."""


class LocalLimiter:
    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        share: int = 1,
        is_fallback: bool = False,
    ) -> None:
        """`clock`: monotonic; `wall_clock`: Unix; seconds. `share`: into how many parts each limit is divided, of which one is
        this process's; one of each at least. `is_fallback`: for a ledger that is away, which reservations say.
        """
        self.ledger = ledger
        self._clock = clock
        self._wall_clock = wall_clock
        self._share = share
        self._is_fallback = is_fallback

    def look(self, limits: Sequence[Limit]) -> Refused | None:
        if not limits:
            return None
        if self._share > 1:
            limits = self._shares(limits)
        return self.ledger.look(limits, self._clock(), self._wall_clock())

    def try_reserve(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused:
        if not limits:
            return Reservation(self, limits, amounts, 0, (), self._is_fallback)
        if self._share > 1:
            limits = self._shares(limits)
        wanted = [amounts[limit.measure] for limit in limits]
        verdict = self.ledger.acquire(_SELF, limits, wanted, self._clock(), self._wall_clock())
        if isinstance(verdict, Granted):
            return Reservation(self, limits, amounts, verdict.bucket, verdict.left, self._is_fallback)
        if verdict.wait_s is None and self._is_fallback:
            return msgspec.structs.replace(verdict, wait_s=_SHARE_WAIT_S)
        return verdict

    async def reserve(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused:
        return self.try_reserve(limits, amounts)

    def settle(self, reservation: Reservation, used: Amounts) -> None:
        limits = reservation.limits
        if limits:
            reserved, bucket = reservation.amounts, reservation.bucket
            self.ledger.settle(_SELF, limits, reserved, used, bucket, self._clock(), self._wall_clock())

    def _shares(self, limits: Sequence[Limit]) -> Sequence[Limit]:
        return [Limit(limit.counter, limit.measure, max(1, limit.most // self._share)) for limit in limits]
