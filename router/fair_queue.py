"""Who goes next when not all can: a bounded queue, fair between tenants by work, with three priorities.

Between the tenants of a priority: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). An entry's start tag is
max(virtual time - credit, its tenant's last finish tag), its finish tag adds work ÷ weight, the least start tag is served, and
virtual time is the greatest tag served. So between two tenants that both wait all the time, work ÷ weight differs by at most
one entry of each, and the credit. One that was away owes nothing for what nobody else wanted, and catches up on `credit` at
most: people ask in bursts, and a burst that on average is within its tenant's share should not wait as if it were not (Linux's
sleepers are given the same). Of the fair orders it is the one that needs not know an entry's work before it is served, and a
prompt's work changes while it waits: its prefix may be computed for somebody else. What an answer took is known at its end and
charged then (`charge`), as in the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

Between priorities: the higher one first, but `_GUARD` of the work goes to each lower one that waits, so none starves.

What must hold: entries of a tenant and priority have their turn in the order of their ranks, equal ones as they came; each
leaves once, by `pop`, `remove`, `expire`, or displaced by `push`; there are never more than the limit.

    push        O(log entries); when full O(tenants)
    head, pop   O(log entries), amortised
    remove      O(1)
    expire      O(log entries) for each that expires
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Generic, TypeVar

__all__ = ["Entry", "FairQueue", "Priority"]

_GUARD: Final = 1 / 16
"""Little enough that those who wait for an answer do not feel it."""
_SPARE: Final = 64
"""So much garbage is not worth collecting."""

T = TypeVar("T")


class Priority(IntEnum):
    """A smaller number goes first, as in engines."""

    INTERACTIVE = -1
    DEFAULT = 0
    BATCH = 1


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """Something that waits, or has waited."""

    item: T
    tenant: str
    weight: float
    """Of the tenant: its share against others of 1."""
    priority: Priority
    work: int
    """Tokens, at least 1, as far as it can be told when it comes."""
    deadline: float
    rank: float = 0.0
    """Of its tenant's in this priority, a smaller one goes first."""
    waits: bool = False


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """What one tenant has waiting in one priority."""

    tag: float
    """Start tag of its first entry; while it has none, its last finish tag."""
    weight: float
    work: int = 0
    entries: OrderedDict[Entry[T], None] = field(default_factory=OrderedDict)
    """As they came."""
    in_heap: bool = False
    _ranked: list[tuple[float, int, Entry[T]]] = field(default_factory=list)
    """A heap of them, and of some that have left."""

    def add(self, entry: Entry[T], number: int) -> None:
        self.entries[entry] = None
        self.work += entry.work
        if len(self._ranked) > _SPARE + 2 * len(self.entries):
            self._ranked = [each for each in self._ranked if each[2] in self.entries]
            heapq.heapify(self._ranked)
        heapq.heappush(self._ranked, (entry.rank, number, entry))

    def first(self) -> Entry[T]:
        """Whose turn it is, of those that there are."""
        while self._ranked[0][2] not in self.entries:
            heapq.heappop(self._ranked)
        return self._ranked[0][2]


class _Band(Generic[T]):
    """One priority. Tags only grow, so a heap that still has an older one is put right when it comes to the top."""

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self.size = 0
        self.work = 0
        self.owed = 0.0
        """Tokens that it may serve before higher priorities."""
        self._flows: dict[str, _Flow[T]] = {}
        self._heap: list[tuple[float, int, _Flow[T]]] = []
        self._order = itertools.count()
        self._now = 0.0
        """Virtual time."""

    def add(self, entry: Entry[T]) -> None:
        flow = self._flows.get(entry.tenant)
        if flow is None:
            self._forget_idle()
            flow = self._flows[entry.tenant] = _Flow(-math.inf, entry.weight)
        flow.weight = entry.weight
        if not flow.entries:
            flow.tag = max(flow.tag, self._now - self.credit, 0.0)
        flow.add(entry, next(self._order))
        if not flow.in_heap:
            self._enter_heap(flow)
        self.size += 1
        self.work += entry.work

    def discard(self, entry: Entry[T]) -> None:
        flow = self._flows[entry.tenant]
        del flow.entries[entry]
        self._gone(flow, entry)

    def head(self) -> Entry[T]:
        return self._first().first()

    def pop(self, work: int) -> None:
        flow = self._first()
        entry = flow.first()
        del flow.entries[entry]
        self._now = max(self._now, flow.tag)
        flow.tag += work / flow.weight
        self._gone(flow, entry)

    def owed_to_first(self) -> float:
        flow = self._first()
        return (self._now - flow.tag) * flow.weight

    def charge(self, tenant: str, work: int) -> None:
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.tag += work / flow.weight

    def newest(self, tenant: str) -> Entry[T] | None:
        flow = self._flows.get(tenant)
        return next(reversed(flow.entries)) if flow is not None and flow.entries else None

    def backlogged(self) -> float:
        """Weights of the tenants that wait, together."""
        return sum(flow.weight for flow in self._flows.values() if flow.entries)

    def work_of(self, tenant: str) -> int:
        flow = self._flows.get(tenant)
        return flow.work if flow is not None else 0

    def _first(self) -> _Flow[T]:
        while True:
            tag, _, flow = self._heap[0]
            if flow.entries and tag == flow.tag:
                return flow
            heapq.heappop(self._heap)
            flow.in_heap = False
            if flow.entries:
                self._enter_heap(flow)

    def _enter_heap(self, flow: _Flow[T]) -> None:
        flow.in_heap = True
        heapq.heappush(self._heap, (flow.tag, next(self._order), flow))

    def _gone(self, flow: _Flow[T], entry: Entry[T]) -> None:
        flow.work -= entry.work
        self.size -= 1
        self.work -= entry.work
        if not self.size:  # nobody waited for anybody: there is nothing to be even about
            self._flows.clear()
            self._heap.clear()
            self._now = self.owed = 0.0

    def _forget_idle(self) -> None:
        """Tenants that are away and owe nothing. The others must be remembered: else leaving would pay."""
        if len(self._flows) <= _SPARE + 2 * len(self._heap):
            return
        oldest = self._now - self.credit
        self._flows = {
            tenant: flow for tenant, flow in self._flows.items() if flow.entries or flow.in_heap or flow.tag > oldest
        }


@dataclass(slots=True)
class _Share:
    work: int
    weight: float


class FairQueue(Generic[T]):
    def __init__(self, limit: int, credit: float = 0.0) -> None:
        """At most `limit` entries. `credit`: work ÷ weight that a tenant may catch up on after it was away."""
        self.limit = limit
        """May change: who waits already keeps its place."""
        self._bands: dict[Priority, _Band[T]] = {priority: _Band(credit) for priority in Priority}  # the highest first
        self._shares: dict[str, _Share] = {}
        self._deadlines: list[tuple[float, int, Entry[T]]] = []
        self._order = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def work(self) -> int:
        """Tokens of all that waits."""
        return sum(band.work for band in self._bands.values())

    def set_credit(self, credit: float) -> None:
        """For tenants that come back from now on."""
        for band in self._bands.values():
            band.credit = credit

    def depth(self, priority: Priority) -> int:
        return self._bands[priority].size

    def push(self, entry: Entry[T]) -> Entry[T] | None:
        """Let it wait. When there is no room, who has to leave: of the tenant with most work waiting for its weight, the
        newest of its lowest priority. That may be `entry` itself; so one that asks for little always gets in.
        """
        if self._size < self.limit:
            self._add(entry)
            return None
        share = self._shares.get(entry.tenant)
        most, loser = ((share.work if share is not None else 0) + entry.work) / entry.weight, entry.tenant
        for tenant, other in self._shares.items():
            if tenant != entry.tenant and other.work / other.weight > most:
                most, loser = other.work / other.weight, tenant
        displaced = self._last_of(loser)
        if displaced is None or (loser == entry.tenant and displaced.priority <= entry.priority):
            return entry
        self.remove(displaced)
        self._add(entry)
        return displaced

    def head(self) -> Entry[T] | None:
        """Whose turn it is."""
        band = self._next_band()
        return None if band is None else band.head()

    def owed(self) -> float:
        """Tokens that the head's tenant may catch up on before it has had its share; 0 when it had, or nobody waits."""
        band = self._next_band()
        return 0.0 if band is None else max(band.owed_to_first(), 0.0)

    def pop(self, work: int) -> Entry[T]:
        """Take the head out. `work`: what it comes to, as is known now. Raises LookupError when nobody waits."""
        served = self._next_band()
        if served is None:
            raise LookupError("nobody waits")
        entry = served.head()
        above = True
        for band in self._bands.values():
            if band is served:
                above = False
                band.owed = max(band.owed - work, 0.0) if band.owed else 0.0
            elif not above and band.size:
                band.owed += _GUARD * work
        served.pop(work)
        self._left(entry)
        return entry

    def remove(self, entry: Entry[T]) -> bool:
        """Whether it was still waiting."""
        if not entry.waits:
            return False
        self._bands[entry.priority].discard(entry)
        self._left(entry)
        return True

    def expire(self, now: float) -> list[Entry[T]]:
        """Take out those whose deadline has come."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].waits):
            entry = heapq.heappop(self._deadlines)[2]
            if self.remove(entry):
                expired.append(entry)
        return expired

    def charge(self, tenant: str, work: int) -> None:
        """It took so many tokens more than was known when it was served. Forgotten when it has nothing to wait for."""
        if self._size:
            for band in self._bands.values():
                band.charge(tenant, work)

    def ahead_of(self, tenant: str, weight: float, priority: Priority) -> float:
        """Tokens that will be served before a new entry of this tenant, if nobody else comes."""
        ahead = 0.0
        for level, band in self._bands.items():
            if level < priority:
                ahead += band.work
            elif level == priority:
                mine = band.work_of(tenant)
                others = band.backlogged() - (weight if mine else 0.0)
                ahead += min(mine * (others + weight) / weight, band.work)
        return ahead

    def _add(self, entry: Entry[T]) -> None:
        entry.waits = True
        self._bands[entry.priority].add(entry)
        share = self._shares.setdefault(entry.tenant, _Share(0, entry.weight))
        share.work, share.weight = share.work + entry.work, entry.weight
        self._size += 1
        if len(self._deadlines) > _SPARE + 2 * self._size:
            self._deadlines = [each for each in self._deadlines if each[2].waits]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (entry.deadline, next(self._order), entry))

    def _left(self, entry: Entry[T]) -> None:
        entry.waits = False
        self._size -= 1
        share = self._shares[entry.tenant]
        share.work -= entry.work
        if not share.work:
            del self._shares[entry.tenant]

    def _next_band(self) -> _Band[T] | None:
        """The highest that waits, unless a lower one is owed its head."""
        highest = None
        for band in self._bands.values():
            if not band.size:
                continue
            if highest is None:
                highest = band
            elif band.owed >= band.head().work:
                return band
        return highest

    def _last_of(self, tenant: str) -> Entry[T] | None:
        for band in reversed(self._bands.values()):
            if (entry := band.newest(tenant)) is not None:
                return entry
        return None
