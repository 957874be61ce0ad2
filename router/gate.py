"""Before a pool: a prompt goes straight through while a replica can take it, else it waits in a fair queue.

    nothing waits, not saturated      straight to the replica that the router chose: `try_pass`
    saturated, or others wait         a place in the queue: `wait`, then decided anew when its turn comes: `release`

Two bounds, both on the wait that is predicted at the replicas. Above `max_wait_s` the pool is saturated and the queue begins.
Once it has begun, replicas get their next prompt when they have less than `ahead_s` to do: enough that none runs dry, and so
little that whoever is next in the fair order is soon computed, for at many replicas nobody passes what lies there already.
While prompts wait here they raise w as if they waited there (`Query.backlog_tokens`), so a saturated fleet keeps its cache.

The head waits for room even where a smaller prompt behind it would fit: else a large one would never get any.

Pure: knows no clock and no futures; whoever owns it calls `release` when something changed, and after `next_in_s`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from router.fair_queue import Entry, FairQueue, Priority
from router.fleet import Reservation
from router.route import Decision, Query, Router, Unroutable

__all__ = ["Asked", "Dropped", "Failed", "Gate", "GateSettings", "GateView", "Placed"]

_REQUEST_TOKENS: Final = 128
"""What a prompt counts for beside its uncached tokens: one that is all cached takes a place and some milliseconds too."""
_CREDIT_S: Final = 5.0
"""What a tenant of weight 1 may catch up on: what the fleet computes in so long. Talks come in bursts of a few seconds; more
would let one that comes back hold up the others for longer than they notice."""
_OUTPUT_WEIGHT: Final = 2
"""A generated token against a prompt token: as in the virtual token counter, and about what providers charge."""
_LOOK_AGAIN_S: Final = 0.05
"""What nobody tells of (an operator, a health check, a wait that was predicted wrong) is seen so soon."""
_LEAST_PAUSE_S: Final = 0.005
"""A look costs a decision; more often than this it would slow what it waits for."""
_RANK_BITS: Final = 42
"""Milliseconds since 1970 take 41 until 2039."""
_SHARED_S: Final = 60.0
"""So long after requests of two tenants came, replicas are kept free for whoever comes next."""
_RATE_WINDOW_S: Final = 20.0
_SAMPLE_S: Final = 1.0
_LEAST_RETRY_S: Final = 1.0
_MOST_RETRY_S: Final = 60.0
"""OpenAI's SDKs heed a Retry-After of up to a minute."""
_BUSY_SHARE: Final = 0.7
"""Of its prefill rate, what a replica should be given at most when replicas are ordered by `wanted_replicas`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    max_wait_s: float = 2.0
    ahead_s: float = 0.2
    max_queued: int = 1024
    deadline_s: float = 30.0


class Asked(NamedTuple):
    """A prompt, and for whom."""

    query: Query
    request_id: str
    tenant: str
    weight: float = 1.0
    priority: Priority = Priority.DEFAULT


class Placed(NamedTuple):
    """It goes there, and its work is promised."""

    decision: Decision
    reservation: Reservation

    def engine_priority(self, priority: Priority) -> int:
        """For own workers; a smaller one goes first."""
        return 2 * priority + self.reservation.yields

    def engine_rank(self, priority: Priority, unix_s: float) -> int:
        """For replicas that are told a number and nothing else: the same, and within it by when it is sent (`unix_s`) and for
        how long it lets others pass.
        """
        return self.engine_priority(priority) << _RANK_BITS | round(1000 * (unix_s + self.reservation.passed_s))


@dataclass(frozen=True, slots=True)
class Dropped:
    """It will not be served: no room in the queue, its deadline, or nobody there who could."""

    why: Literal["full", "displaced", "deadline", "no_replica"]
    retry_after_s: float
    """When to come back, by the measured rate of service; whatever it is, from 1 to 60."""
    in_vain: bool = False
    """By then it could not be served either."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be decided on: our own bug, which is its alone, for whoever answers it to tell."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class GateView:
    """One pool's queue at one moment."""

    model: str
    depth: dict[Priority, int]
    work: int
    """Tokens that wait."""
    tok_s: float
    """Uncached prompt tokens a second that went to replicas lately."""
    wanted_replicas: int
    """Enough for what was served lately and for what waits, within a deadline."""


class _ServiceRate:
    """Tokens a second over the last while. Samples a running total, so that counting is one addition."""

    def __init__(self) -> None:
        self._total = 0
        self._next_at = -math.inf
        self._samples: deque[tuple[float, int]] = deque()

    def count(self, tokens: int, now: float) -> None:
        if now >= self._next_at:
            self._sample(now)
        self._total += tokens

    def tok_s(self, now: float) -> float:
        """0 when nothing is known."""
        if not self._samples:
            return 0.0
        since, total = self._samples[0]
        return (self._total - total) / max(now - since, _SAMPLE_S)

    def _sample(self, now: float) -> None:
        self._next_at = now + _SAMPLE_S
        self._samples.append((now, self._total))
        while len(self._samples) > 1 and self._samples[0][0] < now - _RATE_WINDOW_S:
            self._samples.popleft()


class Gate:
    """Of one pool. `Router` knows the replicas; this knows who waits for them."""

    def __init__(self, router: Router, model: str, settings: GateSettings) -> None:
        self._router = router
        self._model = model
        self._settings = settings
        self._queue: FairQueue[Asked] = FairQueue(settings.max_queued)
        self._rate = _ServiceRate()
        self._last_tenant: str | None = None
        self._shared_until = -math.inf
        self._weighed: tuple[Asked, Decision] | None = None
        """What was asked last and had to wait, and where it would have gone."""
        self._short_by_s = 0.0
        """How much longer than it may the head would wait at the replica that is free soonest."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def configure(self, settings: GateSettings) -> None:
        """Go by these from now on; who waits keeps its place and its deadline."""
        self._settings = settings
        self._queue.limit = settings.max_queued

    def try_pass(self, asked: Asked, now: float, draw: float) -> Placed | Unroutable | None:
        """Straight through, past an empty queue. None: it has to wait."""
        if asked.tenant != self._last_tenant:
            if self._last_tenant is not None:
                self._shared_until = now + _SHARED_S
            self._last_tenant = asked.tenant
        if self._queue:
            return None
        settings = self._settings
        return self._try_place(asked, settings.ahead_s if now < self._shared_until else settings.max_wait_s, now, draw)

    def wait(self, asked: Asked, since: float, now: float, draw: float) -> tuple[Entry[Asked], Entry[Asked] | None]:
        """Give it a place in the queue: the place, and whose place was lost by it, maybe its own. `since`: when it came first,
        from which its deadline counts.
        """
        self._queue.set_credit(_CREDIT_S * self._router.fleet_tok_s(self._model))
        decision: Decision | Unroutable
        if self._weighed is not None and self._weighed[0] is asked:
            decision = self._weighed[1]
        else:
            decision = self._router.route(asked.query, now, draw)
        self._weighed = None
        uncached = asked.query.num_tokens if isinstance(decision, Unroutable) else _uncached(decision)
        entry = Entry(
            asked,
            tenant=asked.tenant,
            weight=asked.weight,
            priority=asked.priority,
            work=uncached + _REQUEST_TOKENS,
            deadline=since + self._settings.deadline_s,
            rank=since + self._router.patience * uncached / self._router.prefill_tok_s(self._model),
        )
        return entry, self._queue.push(entry)

    def leave(self, entry: Entry[Asked]) -> None:
        """Nobody waits for it any more."""
        self._queue.remove(entry)

    def release(
        self, now: float, draw: Callable[[], float], at_most: int
    ) -> list[tuple[Entry[Asked], Placed | Dropped | Failed]]:
        """Those whose wait is over, in order; at most so many that are placed. Their work is promised already.

        One that cannot be decided on is among them, so that it holds up nobody and those that were taken out are not lost.
        """
        over: list[tuple[Entry[Asked], Placed | Dropped | Failed]] = [
            (entry, self.refusal(entry.item, "deadline", now)) for entry in self._queue.expire(now)
        ]
        placed = 0
        while placed < at_most and (entry := self._queue.head()) is not None:
            # One that is owed its share competes with its own prompts only, and those lie at the replicas if it is alone.
            owed = self._queue.owed() >= entry.work
            within_s = self._settings.max_wait_s if owed else self._settings.ahead_s
            query = msgspec.structs.replace(
                entry.item.query,
                backlog_tokens=self._queue.work - entry.work,
                yields=not owed and now < self._shared_until,
            )
            try:
                found = self._try_place(entry.item._replace(query=query), within_s, now, draw())
            except Exception as error:
                self._queue.remove(entry)
                over.append((entry, Failed(error)))
                continue
            if found is None:
                break
            if isinstance(found, Unroutable):
                self._queue.remove(entry)
                over.append((entry, Dropped("no_replica", max(found.retry_after_s, _LEAST_RETRY_S))))
                continue
            self._queue.pop(_uncached(found.decision) + _REQUEST_TOKENS)
            over.append((entry, found))
            placed += 1
        return over

    def next_in_s(self) -> float:
        """When to call `release` again though nobody told anything; infinity when nothing waits."""
        if not self._queue:
            return math.inf
        return min(max(self._short_by_s, _LEAST_PAUSE_S), _LOOK_AGAIN_S)

    def answered(self, tenant: str, output_tokens: int) -> None:
        """What an answer took counts against its tenant too, while anybody waits."""
        if self._queue:
            self._queue.charge(tenant, _OUTPUT_WEIGHT * output_tokens)

    def refusal(self, asked: Asked, why: Literal["full", "displaced", "deadline"], now: float) -> Dropped:
        tok_s = self._rate.tok_s(now)
        ahead = self._queue.ahead_of(asked.tenant, asked.weight, asked.priority)
        wait_s = ahead / tok_s if tok_s else (_MOST_RETRY_S if ahead else _LEAST_RETRY_S)
        return Dropped(why, min(max(wait_s, _LEAST_RETRY_S), _MOST_RETRY_S), in_vain=wait_s > _MOST_RETRY_S)

    def view(self, now: float) -> GateView:
        tok_s, work = self._rate.tok_s(now), self._queue.work
        wanted_tok_s = tok_s + work / self._settings.deadline_s
        return GateView(
            model=self._model,
            depth={priority: self._queue.depth(priority) for priority in Priority},
            work=work,
            tok_s=tok_s,
            wanted_replicas=max(1, math.ceil(wanted_tok_s / (_BUSY_SHARE * self._router.prefill_tok_s(self._model)))),
        )

    def _try_place(self, asked: Asked, within_s: float, now: float, draw: float) -> Placed | Unroutable | None:
        router, query = self._router, asked.query
        decision = router.route(query, now, draw)
        if isinstance(decision, Unroutable):
            self._short_by_s = math.inf
            return None if decision.code == "capacity" else decision
        has_room = router.has_room(decision, now, yields=query.yields)
        if decision.wait_s > within_s or not has_room:
            soonest_s = router.soonest_s(decision, now, yields=query.yields)
            if soonest_s > within_s:
                # A wait falls by a second a second while its replica computes.
                self._short_by_s = soonest_s - self._settings.ahead_s
                self._weighed = asked, decision
                return None
            if not has_room:
                query = msgspec.structs.replace(
                    query, exclude=query.exclude | router.full(decision, now, yields=query.yields)
                )
                decision = router.route(query, now, draw)
                if isinstance(decision, Unroutable):
                    return decision
        self._rate.count(_uncached(decision), now)
        return Placed(decision, router.begin(decision, query, asked.request_id, now))


def _uncached(decision: Decision) -> int:
    return decision.prompt_tokens - decision.matched_tokens
