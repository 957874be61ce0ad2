"""Each replica as the router sees it: what it is, what was promised to it, how fast it is, whether it may be used.

What must hold: a `Reservation` is released exactly once, and when all are released every promise is 0; whatever became of
the replica meanwhile. Work is counted in tokens and requests (whole numbers, so that sums return to 0) and turned into
seconds only when somebody asks.

Frames come from a replica, so their numbers are untrusted: a wrong one may make the replica look bad or good, but must not
raise or make the arithmetic of others wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

import msgspec

from router.breaker import Breaker, BreakerState, Pass, Verdict
from router.index import Holding
from router.learning import MAX_TOK_S, MIN_TOK_S, CacheSize, Pace
from router.prompt_order import Behind, PromptOrder, Urgency
from router.settings import RoutingSettings
from router.text_index import TextHolding
from router.trust import Accuracy, EventStream, Snapshot, Trust
from router.wire import Hello, Load, ReplicaSpec

__all__ = ["Outcome", "Replica", "ReplicaView", "Reservation", "ReservationError"]

_HEAVY_TOKENS: Final = 128
"""Fewer uncached tokens than these take less time than a network's noise, so others are not disturbed by them."""

_KEPT_FREE: Final = 1 / 8
"""Of sequences and KV, for tenants that had less than their share: an answer holds its own for as long as it takes, and who
comes meanwhile would wait for one to end."""

_SURE_SAMPLES: Final = 8
"""Before so many prompts were timed, the time of one says nothing of what was cached."""
_TELLING_S: Final = 0.05
"""What computing a prompt anew must take at least for its time to tell whether it was cached."""


class Outcome(Enum):
    """How a request ended, as far as its replica is concerned."""

    OK = "ok"
    FAILED = "failed"
    """5xx, no connection, time-out, broken answer: the replica's fault."""
    BUSY = "busy"
    """429, or 503 with Retry-After: not a fault."""
    CLIENT_ERROR = "client_error"
    CANCELLED = "cancelled"


class ReservationError(RuntimeError):
    """A reservation was used after its release: our own bug."""


class _Stage(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    RELEASED = "released"


# By names of their own: to look a member up in its enum takes 0.12 us (CPython 3.11), and a request does it thirty times.
_OK, _PREFILL, _DECODE, _RELEASED = Outcome.OK, _Stage.PREFILL, _Stage.DECODE, _Stage.RELEASED
_EXACT, _LEARNING, _BLIND = Trust.EXACT, Trust.LEARNING, Trust.BLIND
_GOOD, _CLOSED = Verdict.GOOD, BreakerState.CLOSED


class Reservation(msgspec.Struct, eq=False):
    """The work one request promised to one replica. Made by `Router.begin`, ended by `Router.finish`."""

    replica: Replica
    request_id: str
    names: Sequence[int]
    stamp: float
    matched_tokens: int
    uncached_tokens: int
    streamed: bool
    begun_at: float
    permit: Pass
    num_bytes: int = 0
    """Of its text, where tokens are unknown."""
    yields: bool = False
    """The replica computes it after those that do not, also if it began before."""
    passed_s: float = 0.0
    """For how long it lets shorter ones pass there."""
    matched_blocks: int = 0
    """How many of `names` the replica was expected to hold by then."""
    last_sent: float | None = None
    """When the deepest block of it that was sent there before had last been sent."""
    known: int = 0
    """How many leading blocks of it had been sent there before, where no events tell what came of them."""
    heavy_before: int | None = None
    """Of `Replica`: prompts with work begun there by its own begin. None: it was not alone even then."""
    alone: bool = False
    """No other prompt with work to do was there from its begin to its first byte."""
    stage: _Stage = _PREFILL
    admitted: bool = False
    prefill_s: float | None = None

    @property
    def replica_id(self) -> str:
        return self.replica.id

    @property
    def prompt_tokens(self) -> int:
        return self.matched_tokens + self.uncached_tokens

    def matched_in(self, prompt_tokens: int) -> int:
        """What was expected to be cached if the prompt comes to so many tokens: where they are unknown both were estimates."""
        return self.matched_tokens * prompt_tokens // max(self.prompt_tokens, 1) if self.matched_tokens else 0

    @property
    def clean_s(self) -> float | None:
        """Seconds to its first byte, if they tell what its prompt took: nobody disturbed it, and no decoding is in them."""
        return self.prefill_s if self.alone and self.streamed else None


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica at one moment, for people and metrics."""

    id: str
    spec: ReplicaSpec
    """Without the credential."""
    trust: Trust
    healthy: bool
    cordoned: bool
    draining: bool
    weight: float
    mismatch: str
    """Why it does not fit its pool; '' when it does."""
    breaker: BreakerState
    busy_until: float
    inflight: int
    promised_tokens: int
    """Prompt tokens sent to it that have not given a first byte yet."""
    load: Load | None
    load_at: float
    """When `load` came."""
    hello: Hello | None
    prefill_tok_s: float | None
    """None when neither reported nor learned."""
    fixed_s: float | None
    """What a prompt costs there even when all of it is cached; None when not learned."""
    bytes_per_token: float | None
    """Of its pool's text, as learned; None where tokens are known."""
    capacity_tokens: int
    """What its cache is taken to hold: as it says, else as learned, else the prior."""
    capacity_learned: bool
    confirmed_blocks: int
    expected_blocks: int
    indexed: bool
    """Whether its events are followed; False for one whose cache is too large for the index."""
    accuracy: Accuracy
    breaker_transitions: int = 0
    """Changes of `breaker` so far."""
    event_gaps: int = 0
    """Of `router.trust.EventStream`, as the next two: frames that came after a gap,"""
    event_snapshots: int = 0
    """whole pictures taken,"""
    event_restarts: int = 0
    """and former lives of the replica."""


class Replica:
    """State of one replica and the rules that concern it alone. Changed only through `Router`."""

    def __init__(
        self, replica_id: str, spec: ReplicaSpec, holding: Holding | TextHolding, settings: RoutingSettings
    ) -> None:
        self.id = replica_id
        self.spec = spec
        self.holding = holding
        self.settings = settings
        self.stream = EventStream()
        self.snapshot: Snapshot | None = None
        self.accuracy = Accuracy()
        self.breaker = Breaker(settings.eject_after, settings.eject_s, settings.max_eject_s)
        self.weight = 1.0
        self.cordoned = False
        self.draining = False
        self.healthy = False
        self.mismatch = ""
        self.away_s = 0.0
        """What its being another gateway's first choice counts against it."""
        self.busy_until = 0.0
        self.stale_at = float("inf")
        """When the picture left by a lost stream is dropped."""
        self.hello: Hello | None = None
        self.load: Load | None = None
        self.load_at = 0.0
        self.indexed = True
        """Whether the index has room for what its events say."""
        self.rate: float | None = None
        """Prefill tokens a second: reported, else learned, else None."""
        self.fixed_s: float | None = None
        """Seconds a prompt costs even when all of it is cached, where they were learned."""
        self.pace = Pace(settings.fixed_s, settings.prefill_tok_s)
        self.cache_size = CacheSize()
        self.reports_cached = False
        """Whether it ever reported a cached token: many servers say 0 for all they do not count."""
        self.inflight = 0
        self.unanswered_tokens = 0
        self.unadmitted_tokens = 0
        is_own = spec.kind == "warmpath"
        self._order = PromptOrder(interrupts=is_own) if is_own or spec.priority else None
        """None: it computes prompts as they come."""
        self._unadmitted = 0
        """Requests sent to it that its load frames do not count yet."""
        self._prefilling: dict[Reservation, None] = {}  # oldest first
        self._heavy = 0
        """How many of those have work to do,"""
        self._heavy_begun = 0
        """and how many there ever were."""
        self._load_until = float("-inf")
        self._first_since = float("-inf")
        """When the oldest of `_prefilling` came to be the oldest."""

    def configure(self, settings: RoutingSettings) -> None:
        self.settings = settings
        self.breaker.configure(settings.eject_after, settings.eject_s, settings.max_eject_s)

    @property
    def takes_order(self) -> bool:
        """Whether it computes prompts in the order that it is told."""
        return self._order is not None

    @property
    def trust(self) -> Trust:
        if self.hello is not None and self.indexed and self.stream.exact:
            return _EXACT
        return _BLIND if self.mismatch or not self.settings.learned_tokens else _LEARNING

    @property
    def _known_rate(self) -> float:
        return self.settings.prefill_tok_s if self.rate is None else self.rate

    @property
    def capacity_blocks(self) -> int:
        """Blocks its cache has; 0 when it did not tell."""
        return 0 if self.hello is None else self.hello.capacity_blocks

    # -- may it be used?

    def why_not(self, now: float) -> str:
        """Why no new request may go there; '' when one may."""
        if not self.healthy:
            return "unhealthy"
        if self.mismatch:
            return "mismatch"
        if self.cordoned:
            return "cordoned"
        if self.draining:
            return "draining"
        if self.breaker.state is not _CLOSED and not self.breaker.admits(now):
            return "ejected"
        if now < self.busy_until:
            return "busy"
        return ""

    # -- how long would a prompt wait?

    def wait_s(self, now: float, rate: float) -> float:
        """Seconds until it would begin with a prompt sent now, at `rate` prefill tokens a second."""
        load = self.load
        if load is not None and now < self._load_until:
            backlog = load.waiting_uncached_tokens - rate * (now - self.load_at)
            return (max(backlog, 0.0) + self.unadmitted_tokens) / rate + max(load.running, 0) * self._running_s(load)
        if not self.inflight:
            return 0.0
        return self._own_backlog(now, rate) / rate + (self.inflight - len(self._prefilling)) * self.settings.running_s

    def behind(
        self,
        names: Sequence[int],
        matched_blocks: int,
        matched_tokens: int,
        uncached_tokens: int,
        now: float,
        rate: float,
        *,
        yields: bool,
    ) -> Behind | None:
        """What we sent there and `wait_s` counts, but would be computed after such a prompt sent now. None: nothing is sent."""
        order = self._order
        if not order:
            return None
        urgency = Urgency(yields, now + self._passed_s(uncached_tokens, rate))
        if not order.may_pass(urgency):
            return order.behind(urgency, now, rate)
        needed = self._needed(names, matched_blocks, matched_tokens, now, rate)
        if needed:
            urgency = Urgency(yields, now + self._passed_s(uncached_tokens + sum(needed.values()), rate))
        return order.behind(urgency, now, rate, needed)

    def _needed(
        self, names: Sequence[int], matched_blocks: int, matched_tokens: int, now: float, rate: float
    ) -> Mapping[Reservation, float]:
        """Tokens that others here have yet to compute of what such a prompt is expected to find cached."""
        matched_blocks = min(matched_blocks, len(names))
        if not matched_blocks or not self._order:
            return {}
        shared = {}
        for other in self._prefilling:
            begin = other.matched_blocks
            end = min(len(other.names), matched_blocks)
            if begin < end and other.names[end - 1] == names[end - 1]:
                shared[other] = min(matched_tokens, other.prompt_tokens) - other.matched_tokens
        return self._order.needed(shared, now, rate) if shared else {}

    def decoding_s(self, now: float) -> float:
        """The part of `wait_s` that running decodes add: a preference among replicas, no time in which nothing can begin."""
        load = self.load
        if load is not None and now < self._load_until:
            return max(load.running, 0) * self._running_s(load)
        return (self.inflight - len(self._prefilling)) * self.settings.running_s

    def _passed_s(self, uncached_tokens: float, rate: float) -> float:
        """For how long such a prompt lets shorter ones pass."""
        return self.settings.patience * uncached_tokens / rate

    def has_room(self, uncached_tokens: int, now: float, *, yields: bool = False) -> bool:
        """Whether a prompt with so much to compute could begin beside what runs and waits there: a sequence is free for it, or
        will be for the next one, and the KV cache can hold it. One that yields must leave some of both free. True where the
        replica does not tell, and for a prompt that it can never hold: that one it refuses.
        """
        load, hello = self.load, self.hello
        if load is None or hello is None or now >= self._load_until:
            return True
        usable = 1 - _KEPT_FREE if yields else 1.0
        if load.running + load.waiting + self._unadmitted > usable * hello.max_num_seqs > 0:
            return False
        capacity = hello.capacity_blocks * hello.block_size
        promised = self.unadmitted_tokens + (load.waiting_uncached_tokens if load.waiting > 0 else 0)
        if uncached_tokens > capacity:
            return True
        if uncached_tokens > usable * capacity:
            usable = 1.0
        return load.kv_used_blocks * hello.block_size + promised + uncached_tokens <= usable * capacity

    def _own_backlog(self, now: float, rate: float) -> float:
        """Tokens left of what we promised, where the replica does not tell: the first one is under way."""
        if self._order is not None and self.spec.priority:
            return self._order.tokens_left(now, rate)
        if not self._prefilling:
            return 0.0
        first = next(iter(self._prefilling))
        done = rate * (now - max(first.begun_at, self._first_since))
        return self.unanswered_tokens - min(max(done, 0.0), first.uncached_tokens)

    def _running_s(self, load: Load) -> float:
        """A prompt waits for the step under way; counted by how full the batch is, so that emptier replicas are preferred."""
        step_s = load.step_ms / 1000
        if self.hello is None or not 0 < step_s < 60:
            return self.settings.running_s
        return max(step_s / max(self.hello.max_num_seqs, 1), self.settings.running_s)

    # -- promises

    def reserve(self, reservation: Reservation) -> None:
        uncached_tokens = reservation.uncached_tokens
        is_heavy = uncached_tokens >= _HEAVY_TOKENS
        if is_heavy:
            self._heavy += 1
            self._heavy_begun += 1
        if self._heavy == is_heavy:
            reservation.heavy_before = self._heavy_begun
        self.inflight += 1
        self.unanswered_tokens += uncached_tokens
        self.unadmitted_tokens += uncached_tokens
        self._unadmitted += 1
        self._prefilling[reservation] = None
        if self._order is not None:
            order, begun_at, rate = self._order, reservation.begun_at, self._known_rate
            match = reservation.names, reservation.matched_blocks, reservation.matched_tokens
            needed = self._needed(*match, begun_at, rate)
            reservation.passed_s = self._passed_s(uncached_tokens + sum(needed.values()), rate)
            urgency = Urgency(reservation.yields, begun_at + reservation.passed_s)
            order.add(reservation, urgency, uncached_tokens, begun_at, rate)

    @property
    def oldest_stamp(self) -> float:
        """Stamp of the oldest request that has not given a first byte yet; infinity when there is none."""
        first = next(iter(self._prefilling), None)
        return float("inf") if first is None else first.stamp

    def answered(self, reservation: Reservation, now: float) -> None:
        """Its first body byte came: its prompt is computed."""
        if reservation.stage is _RELEASED:
            raise ReservationError(f"{reservation.request_id} was already finished")
        if reservation.stage is _DECODE:
            return
        self._leave_prefill(reservation, now)
        reservation.prefill_s = now - reservation.begun_at
        self.breaker.first_byte(reservation.permit, now)

    def finish(
        self,
        reservation: Reservation,
        now: float,
        outcome: Outcome,
        cached_tokens: int | None,
        prompt_tokens: int | None = None,
    ) -> bool:
        """Release it; whether its prompt was computed. `prompt_tokens`: what the prompt came to, if now known better."""
        if reservation.stage is _RELEASED:
            raise ReservationError(f"{reservation.request_id} was already finished")
        computed = reservation.stage is _DECODE
        if not computed:
            if outcome is _OK:  # a whole answer at once has its first byte here
                self.answered(reservation, now)
            else:
                self._leave_prefill(reservation, now)
        reservation.stage = _RELEASED
        self.inflight -= 1
        if outcome is _OK:
            self.breaker.end(reservation.permit, _GOOD, now)
            self._learn(reservation, cached_tokens, prompt_tokens or reservation.prompt_tokens)
            return True
        self.breaker.end(reservation.permit, Verdict.BAD if outcome is Outcome.FAILED else Verdict.NOTHING, now)
        if outcome is Outcome.BUSY:
            self.busy_until = max(self.busy_until, now + self.settings.busy_s)
        return computed

    def _leave_prefill(self, reservation: Reservation, now: float) -> None:
        if reservation is next(iter(self._prefilling)):
            self._first_since = now
        reservation.stage = _DECODE
        reservation.alone = reservation.heavy_before == self._heavy_begun
        uncached_tokens = reservation.uncached_tokens
        self._heavy -= uncached_tokens >= _HEAVY_TOKENS
        del self._prefilling[reservation]
        self.unanswered_tokens -= uncached_tokens
        if self._order is not None:
            self._order.discard(reservation, now, self._known_rate)
        self.admit(reservation)

    def admit(self, reservation: Reservation) -> None:
        """Its load frames count it from now on."""
        if not reservation.admitted:
            reservation.admitted = True
            self.unadmitted_tokens -= reservation.uncached_tokens
            self._unadmitted -= 1

    # -- what it tells, and what can be learned

    def take_load(self, load: Load, now: float) -> None:
        """From now on `load` counts the requests in its `admitted`, so our own promises for them end."""
        self.load, self.load_at, self._load_until = load, now, now + self.settings.load_fresh_s
        if MIN_TOK_S <= load.prefill_tok_s <= MAX_TOK_S:
            self.rate = load.prefill_tok_s
        if load.admitted:
            admitted = frozenset(load.admitted)
            for reservation in self._prefilling:
                if reservation.request_id in admitted:
                    self.admit(reservation)

    def lose_stream(self, now: float) -> None:
        """Its events stopped: our own promises count again, and the picture ages."""
        self.stream.cut()
        self.snapshot = None
        self._load_until = float("-inf")
        self.age_picture(now)

    def age_picture(self, now: float) -> None:
        self.stale_at = min(self.stale_at, now + self.settings.stale_after_s)

    def _learn(self, reservation: Reservation, cached_tokens: int | None, prompt_tokens: int) -> None:
        predicted = reservation.matched_in(prompt_tokens)
        uncached: int | None = prompt_tokens if not predicted else None
        if cached_tokens is not None:
            cached = min(max(cached_tokens, 0), prompt_tokens)
            self.reports_cached |= cached > 0
            self.accuracy.count(predicted, cached)
            if self.reports_cached:
                uncached = prompt_tokens - cached
        if self.load is None and uncached is not None:
            self._learn_pace(reservation, uncached)

    def _learn_pace(self, reservation: Reservation, uncached_tokens: int) -> None:
        if reservation.clean_s is not None:
            self.pace.learn(uncached_tokens, reservation.clean_s)
        elif reservation.prefill_s is not None and uncached_tokens >= _HEAVY_TOKENS:
            self.pace.learn_bound(uncached_tokens, reservation.prefill_s)
        if self.pace.samples:  # bounds alone are no measurement: it may be any number of times faster
            self.rate, self.fixed_s = self.pace.tok_s, self.pace.fixed_s

    def cached_of(self, reservation: Reservation, cached_tokens: int | None, prompt_tokens: int) -> int | None:
        """Prompt tokens that it had cached, as it says or as its time to first byte shows; None when neither tells."""
        if cached_tokens is not None and (cached_tokens > 0 or self.reports_cached):
            return min(max(cached_tokens, 0), prompt_tokens)
        if reservation.clean_s is None or self.pace.samples < _SURE_SAMPLES:
            return None
        anew_s = prompt_tokens / self.pace.tok_s
        if anew_s < max(_TELLING_S, self.pace.fixed_s):
            return None
        share = 1 - (reservation.clean_s - self.pace.fixed_s) / anew_s
        return round(min(max(share, 0.0), 1.0) * prompt_tokens)

    def view(self, *, bytes_per_token: float | None = None, capacity_tokens: int = 0) -> ReplicaView:
        """What only its pool knows is given."""
        return ReplicaView(
            id=self.id,
            spec=msgspec.structs.replace(self.spec, credential=""),
            trust=self.trust,
            healthy=self.healthy,
            cordoned=self.cordoned,
            draining=self.draining,
            weight=self.weight,
            mismatch=self.mismatch,
            breaker=self.breaker.state,
            busy_until=self.busy_until,
            inflight=self.inflight,
            promised_tokens=self.unanswered_tokens,
            load=self.load,
            load_at=self.load_at,
            hello=self.hello,
            prefill_tok_s=self.rate,
            fixed_s=self.fixed_s,
            bytes_per_token=bytes_per_token,
            capacity_tokens=capacity_tokens,
            capacity_learned=not self.capacity_blocks and self.cache_size.blocks is not None,
            confirmed_blocks=self.holding.confirmed,
            expected_blocks=self.holding.expected,
            indexed=self.indexed,
            accuracy=replace(self.accuracy),
            breaker_transitions=self.breaker.transitions,
            event_gaps=self.stream.gaps,
            event_snapshots=self.stream.snapshots,
            event_restarts=self.stream.restarts,
        )
