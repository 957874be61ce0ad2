"""Limits of requests where the ledger is somewhere else: few trips to it, and none that a request waits for in vain.

A limit of fewer than `20 x processes` is asked for with every request, and so is admitted to exactly. Of a larger one a process
leases a slice, a twentieth of its share, and spends it by itself: a request whose limits all have units here is decided in one
synchronous call. All that a request lacks is fetched in *one* trip, for which what is here already is set aside.

A slice of a window lives a second and counts as if it were spent at its end, so every minute is exact; what is unspent then
goes back. Leased parallel slots and parts of budgets go back when nobody used them for a second; slots beyond a slice that have
become free, at the next tick.

While the ledger does not answer, each process decides by itself, by its share of every limit, and says so (`is_local`). Who
finds out waits for the link's deadline; after that no request does: the ledger is tried in the background, once a second. A
process that comes back holds under a new name what it still holds, and the old name holds nothing (`_rejoin`): a message of the
old one that arrives late takes nothing for long.

What must hold: a unit is at the ledger, in a slice, or in one reservation; a trip that is cancelled gives back what it got.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.limits.ledger import LEASE_BUCKETS, LEASE_S, Change, Granted, Limit, Measure, Refused
from gateway.limits.limiter import LocalLimiter
from gateway.limits.link import LedgerLink, LedgerUnavailable, Post, patience
from gateway.limits.reservation import Reservation
from gateway.limits.rules import Amounts
from gateway.repeating import repeat

__all__ = ["LeasingLimiter"]

_log = logging.getLogger("warmpath.limits")

_SLICES: Final = 20
"""Of a process's share: 5% of a limit may lie unspent with idle processes, for a second."""
_IDLE_S: Final = 1.0
_TICK_S: Final = 0.25
_RENEW_EVERY_S: Final = 5.0
_RETRY_EVERY_S: Final = 1.0
_REFUSED_FOR_S: Final = 0.1
"""How long a refusal is believed without asking again: refunds may come at any time."""
_TURN_S: Final = 0.5
"""How long a request may wait until fewer trips are under way: a ledger that is so slow is as good as away."""
_MOST_DEAD: Final = 16
"""Lives, of a second or more each, that a ledger may still believe in: older ones it has forgotten by itself."""
_MOST_UNTOLD: Final = 1 << 16
"""Corrections that wait for a ledger that is away. Windows pass in a minute, and budgets are as many as keys."""


class _Slice:
    __slots__ = ("bucket", "ends", "units")

    def __init__(self, units: int, bucket: int, ends: float) -> None:
        self.units = units
        self.bucket = bucket
        self.ends = ends


class _Pool:
    """What this process leased of one limit."""

    __slots__ = ("is_asking", "left", "limit", "slices", "used_at")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.slices: list[_Slice] = []
        self.is_asking = False
        """Whether a trip is under way that brings a slice: another one would lie about."""
        self.left = limit.most
        """What the ledger still had when it was asked last."""
        self.used_at = 0.0

    def find(self, amount: int, now: float) -> _Slice | None:
        for piece in self.slices:
            if piece.units >= amount and piece.ends > now:
                return piece
        return None


@dataclass(slots=True)
class _Plan:
    """A trip: what is here already, and what must be fetched."""

    limits: Sequence[Limit]
    amounts: Amounts
    buckets: list[int]
    left: list[int]
    aside: list[tuple[Limit, _Slice, int]] = field(default_factory=list)
    lacking: list[int] = field(default_factory=list)
    """Places in `limits`."""
    extras: list[int] = field(default_factory=list)
    """To fetch on top, of those."""
    asking: list[_Pool] = field(default_factory=list)

    @property
    def wanted(self) -> list[int]:
        return [self.amounts[self.limits[place].measure] for place in self.lacking]


class _Leased(Reservation, kw_only=True, eq=False):
    buckets: list[int]
    """Where each limit's amount was counted."""


class LeasingLimiter:
    def __init__(
        self,
        link: LedgerLink,
        fallback: LocalLimiter,
        clock: Callable[[], float],
        *,
        name: str,
        processes: int,
        on_mode: Callable[[bool], None] = lambda is_local: None,
        on_error: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """`name`: of this process, and of no other one before or beside it; `processes`: how many use the ledger. `on_mode` is
        told when it is lost and found again, `on_error` of every failure.
        """
        self._link = link
        self._fallback = fallback
        self._clock = clock
        self._name = name
        self._processes = processes
        self._on_mode = on_mode
        self._on_error = on_error
        self._life = 0
        self._dead: deque[str] = deque(maxlen=_MOST_DEAD)
        self._pools: dict[str, _Pool] = {}
        self._held: dict[str, Change] = {}
        """What the ledger holds for this process, to be renewed."""
        self._untold: dict[tuple[str, int], Change] = {}
        """Corrections that the ledger does not know yet, by counter and bucket."""
        self._refused: dict[str, tuple[float, Refused]] = {}
        self._trips: set[asyncio.Task[Reservation | Refused]] = set()
        self._turns = asyncio.Semaphore(link.most_calls)
        self._telling: asyncio.Task[None] | None = None
        self._renew_at = 0.0
        self._retry_at = 0.0
        self.is_local = False
        """Whether the ledger is away."""

    @property
    def holder(self) -> str:
        return f"{self._name}.{self._life}"

    # --- reserving

    def look(self, limits: Sequence[Limit]) -> Refused | None:
        if self.is_local:
            return self._fallback.look(limits)
        now = self._clock()
        for limit in limits:
            known = self._refused.get(limit.counter)
            if known is not None and known[1].limit == limit and now < known[0] + _REFUSED_FOR_S:
                at, refused = known
                return msgspec.structs.replace(refused, wait_s=max((refused.wait_s or 0.0) - (now - at), 0.001))
        return None

    def try_reserve(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused | None:
        if self.is_local:
            return self._fallback.try_reserve(limits, amounts)
        now = self._clock()
        pieces: list[tuple[_Pool, _Slice]] = []
        for limit in limits:
            pool = self._pools.get(limit.counter)
            if pool is None or pool.limit != limit or (piece := pool.find(amounts[limit.measure], now)) is None:
                return None
            pieces.append((pool, piece))
        left = []
        buckets = []
        for pool, piece in pieces:
            amount = amounts[pool.limit.measure]
            piece.units -= amount
            pool.used_at = now
            left.append(pool.left + piece.units)
            buckets.append(piece.bucket)
        return self._reservation(limits, amounts, buckets, left)

    async def reserve(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused:
        trip = asyncio.ensure_future(self._in_turn(limits, amounts))
        self._trips.add(trip)
        trip.add_done_callback(self._trips.discard)
        try:
            return await asyncio.shield(trip)
        except asyncio.CancelledError:
            trip.add_done_callback(_give_back)
            raise

    async def _in_turn(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused:
        if self._turns.locked():
            try:
                async with patience(_TURN_S):
                    await self._turns.acquire()
            except TimeoutError:
                if not self.is_local:
                    self._lost(LedgerUnavailable("timeout", was_sent=False), self._life)
                return self._fallback.try_reserve(limits, amounts)
        else:
            await self._turns.acquire()
        try:
            if self.is_local:
                return self._fallback.try_reserve(limits, amounts)
            if (refused := self.look(limits)) is not None:  # another one was told so meanwhile
                return refused
            return await self._trip(limits, amounts)
        finally:
            self._turns.release()

    async def _trip(self, limits: Sequence[Limit], amounts: Amounts) -> Reservation | Refused:
        plan = self._set_aside(limits, amounts)
        if not plan.lacking:
            return self._reservation(limits, amounts, plan.buckets, plan.left)
        life = self._life
        asked_at = self._clock()
        try:
            missing = [limits[place] for place in plan.lacking]
            verdict = await self._link.acquire(self.holder, missing, plan.wanted, plan.extras)
        except LedgerUnavailable as error:
            self._put_back(plan, life)
            self._lost(error, life)
            return self._fallback.try_reserve(limits, amounts)
        except BaseException:
            self._put_back(plan, life)
            raise
        finally:
            for pool in plan.asking:
                pool.is_asking = False
        if life != self._life:  # the ledger was lost meanwhile, and what it gave is held by nobody who lives
            self._put_back(plan, life)
            return self._fallback.try_reserve(limits, amounts)
        if isinstance(verdict, Refused):
            self._put_back(plan, life)
            if verdict.wait_s is not None and verdict.limit.measure == Measure.REQUESTS:
                self._refused[verdict.limit.counter] = self._clock(), verdict
            return verdict
        self._take_in(plan, verdict, asked_at)
        return self._reservation(limits, amounts, plan.buckets, plan.left)

    def _set_aside(self, limits: Sequence[Limit], amounts: Amounts) -> _Plan:
        now = self._clock()
        plan = _Plan(limits, amounts, [0] * len(limits), [0] * len(limits))
        for place, limit in enumerate(limits):
            amount = amounts[limit.measure]
            pool = self._pool(limit)
            piece = pool.find(amount, now) if pool is not None else None
            if pool is not None and piece is not None:
                piece.units -= amount
                pool.used_at = now
                plan.aside.append((limit, piece, amount))
                plan.buckets[place], plan.left[place] = piece.bucket, pool.left + piece.units
                continue
            plan.lacking.append(place)
            extra = 0
            if pool is not None and not pool.is_asking:
                extra = max(self._slice(limit) - amount, 0)
                pool.is_asking = True
                plan.asking.append(pool)
            plan.extras.append(extra)
        return plan

    def _take_in(self, plan: _Plan, granted: Granted, asked_at: float) -> None:
        extras = granted.extras or [0] * len(plan.lacking)
        for place, wanted, asked, extra, left in zip(
            plan.lacking, plan.wanted, plan.extras, extras, granted.left, strict=True
        ):
            limit = plan.limits[place]
            bucket = granted.bucket + LEASE_BUCKETS if asked else granted.bucket
            plan.buckets[place], plan.left[place] = bucket, left + extra
            if limit.measure >= Measure.PARALLEL:
                self._hold(limit, wanted + extra)
            if (pool := self._pool(limit)) is None:
                continue
            pool.left = left
            pool.used_at = asked_at
            if extra:
                # From the time of asking: the ledger counts from when it granted, which is later.
                ends = asked_at + LEASE_S if limit.measure < Measure.PARALLEL else math.inf
                pool.slices.append(_Slice(extra, bucket, ends))

    def _put_back(self, plan: _Plan, life: int) -> None:
        for limit, piece, amount in plan.aside:
            pool = self._known_pool(limit)
            if life == self._life and pool is not None and piece in pool.slices:
                piece.units += amount
            elif limit.measure < Measure.PARALLEL:  # its slice was given back, or is of a life that is over
                self._tell(limit.counter, limit.measure, 0, -amount, piece.bucket)
            else:
                self._release(limit, amount)

    def _reservation(
        self, limits: Sequence[Limit], amounts: Amounts, buckets: list[int], left: list[int]
    ) -> Reservation:
        return _Leased(self, limits, amounts, 0, left, buckets=buckets)

    def settle(self, reservation: Reservation, used: Amounts) -> None:
        assert isinstance(reservation, _Leased)
        reserved = reservation.amounts
        urgent = False
        for limit, bucket in zip(reservation.limits, reservation.buckets, strict=True):
            measure = limit.measure
            if measure < Measure.PARALLEL:
                self._tell(limit.counter, limit.measure, 0, used[measure] - reserved[measure], bucket)
            elif measure == Measure.PARALLEL and (pool := self._known_pool(limit)) is not None and not self.is_local:
                pool.used_at = self._clock()
                if not pool.slices:
                    pool.slices.append(_Slice(1, 0, math.inf))
                elif pool.slices[0].units < self._slice(limit):
                    pool.slices[0].units += 1
                else:  # another process may lack what lies here
                    self._release(limit, 1)
            else:
                self._hold(limit, -reserved[measure])
                self._tell(
                    limit.counter,
                    limit.measure,
                    -reserved[measure],
                    used[measure] if measure > Measure.PARALLEL else 0,
                    0,
                )
            urgent |= not self._slice(limit)
        if urgent:
            self._tell_soon()

    # --- what lies here

    def _slice(self, limit: Limit) -> int:
        """Units to lease at once; 0 of a limit that is too small for it."""
        return limit.most // (_SLICES * self._processes)

    def _pool(self, limit: Limit) -> _Pool | None:
        if not self._slice(limit):
            return None
        pool = self._known_pool(limit)
        if pool is None:
            if limit.counter in self._pools:  # its limit was changed
                self._return(self._pools[limit.counter], math.inf)
            pool = self._pools[limit.counter] = _Pool(limit)
        return pool

    def _known_pool(self, limit: Limit) -> _Pool | None:
        pool = self._pools.get(limit.counter)
        return pool if pool is not None and pool.limit == limit else None

    def _hold(self, limit: Limit, more: int) -> None:
        known = self._held.get(limit.counter)
        held = max((known.held if known is not None else 0) + more, 0)
        self._held[limit.counter] = Change(limit.counter, limit.measure, held=held)

    def _release(self, limit: Limit, amount: int) -> None:
        self._hold(limit, -amount)
        self._tell(limit.counter, limit.measure, -amount, 0, 0)

    def _tell(self, counter: str, measure: Measure, held: int, spent: int, bucket: int) -> None:
        if not held and not spent:
            return
        name = counter, bucket
        known = self._untold.get(name)
        if known is not None:
            held, spent = held + known.held, spent + known.spent
        elif len(self._untold) >= _MOST_UNTOLD:
            self._on_error("dropped")
            return
        self._untold[name] = Change(counter, measure, held, spent, bucket)

    def _tell_later(self, untold: Mapping[tuple[str, int], Change]) -> None:
        """What could not be told, and what came meanwhile."""
        since, self._untold = self._untold, dict(untold)
        for change in since.values():
            self._tell(change.counter, change.measure, change.held, change.spent, change.bucket)

    # --- keeping the ledger informed

    async def begin(self) -> None:
        """Before the first request, so that none waits for a connection to be made."""
        try:
            await self._link.post(Post(self.holder, [], [], []), surely=True)
        except LedgerUnavailable as error:
            self._lost(error, self._life)

    async def run(self) -> None:
        """For as long as requests come: gives back what lies idle, renews what is held, looks for a ledger that was lost."""
        await repeat(self.tick, _TICK_S, _log, "keeping up with the ledger of limits")

    async def tick(self) -> None:
        now = self._clock()
        self._return_idle(now)
        self._refused = {name: known for name, known in self._refused.items() if now < known[0] + _REFUSED_FOR_S}
        if not self.is_local:
            await self._tell_all(now)
        elif now >= self._retry_at:
            self._retry_at = now + _RETRY_EVERY_S
            await self._rejoin()

    async def aclose(self) -> None:
        """Give back all that is not in use. Waits for trips under way, which are short."""
        await asyncio.gather(*self._trips, return_exceptions=True)
        if self._telling is not None:
            await asyncio.gather(self._telling, return_exceptions=True)
        self._return_idle(math.inf)
        if not self.is_local:
            await self._tell_all(self._clock())
        await self._link.aclose()

    def _return_idle(self, now: float) -> None:
        for name, pool in list(self._pools.items()):
            self._return(pool, now)
            if not pool.slices and not pool.is_asking and now >= pool.used_at + _IDLE_S:
                del self._pools[name]

    def _return(self, pool: _Pool, now: float) -> None:
        """Give back what is over or idle."""
        limit = pool.limit
        is_idle = now >= pool.used_at + _IDLE_S
        for piece in pool.slices:
            if piece.ends > now and not is_idle:
                continue
            if limit.measure < Measure.PARALLEL:
                self._tell(limit.counter, limit.measure, 0, -piece.units, piece.bucket)
            else:
                self._release(limit, piece.units)
            piece.units = 0
        pool.slices = [piece for piece in pool.slices if piece.units]

    def _tell_soon(self) -> None:
        """Who waits for a slot of a small limit shall not wait for a tick. One message for all that end at once."""
        if self._telling is None and not self.is_local:
            self._telling = asyncio.ensure_future(self._tell_now())

    async def _tell_now(self) -> None:
        try:
            while self._untold and not self.is_local:
                await self._tell_all(self._clock())
        finally:
            self._telling = None

    async def _tell_all(self, now: float) -> None:
        holds: list[Change] = []
        given_back: list[Change] = []
        if now >= self._renew_at:
            self._renew_at = now + _RENEW_EVERY_S
            for held in self._held.values():
                (holds if held.held else given_back).append(held)
        if not self._untold and not holds and not given_back:
            return
        life = self._life
        untold, self._untold = self._untold, {}
        try:
            await self._link.post(Post(self.holder, list(untold.values()), holds, []), surely=False)
        except LedgerUnavailable as error:
            if not error.was_sent:
                self._tell_later(untold)
            self._lost(error, life)
            return
        for held in given_back:  # which the ledger knows now
            if self._held.get(held.counter) is held:
                del self._held[held.counter]

    def _lost(self, error: LedgerUnavailable, life: int) -> None:
        """Whatever was sent may have happened, or may yet: so this process begins a new life, in which nothing is unclear."""
        self._on_error(error.kind)
        if self.is_local or life != self._life:
            return
        self.is_local = True
        self._retry_at = self._clock() + _RETRY_EVERY_S
        self._on_mode(True)
        self._begin_life()
        for name, pool in self._pools.items():
            if pool.limit.measure >= Measure.PARALLEL:
                unused = sum(piece.units for piece in pool.slices)
                self._hold(pool.limit, -unused)
            self._pools[name] = _Pool(pool.limit)

    def _begin_life(self) -> None:
        self._dead.append(self.holder)
        self._life += 1

    async def _rejoin(self) -> None:
        untold, self._untold = self._untold, {}
        # What is held says `_held`: changes of it were the old life's.
        changes = [msgspec.structs.replace(change, held=0) for change in untold.values() if change.spent]
        post = Post(self.holder, changes, list(self._held.values()), list(self._dead))
        try:
            await self._link.post(post, surely=True)
        except LedgerUnavailable as error:
            self._on_error(error.kind)
            if error.was_sent:
                self._begin_life()
            else:
                self._tell_later(untold)
            return
        self._dead.clear()
        self.is_local = False
        self._renew_at = self._clock()
        self._on_mode(False)


def _give_back(trip: asyncio.Task[Reservation | Refused]) -> None:
    """Nobody waits for it any more."""
    if not trip.cancelled() and trip.exception() is None and isinstance(verdict := trip.result(), Reservation):
        verdict.end_failed()
