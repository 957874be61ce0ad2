"""`Router`: the one mutable thing that the gateway talks to. It knows replicas, learns from them, and decides.

    cost(replica) = (wait + away + (w + delayed) · own work) ÷ weight        all in seconds

*Wait* is uncached prompt tokens already promised to the replica ÷ its prefill rate, plus what its running decodes add. Replicas
that take an order compute short prompts before long ones (`router.prompt_order`): what would come after this one is no wait,
but it is *delayed* by this one's work, which counts once more for each such prompt. *Own
work* is this prompt's uncached tokens ÷ that rate + a fixed part. With w = 1 this is the predicted time to the first token; w
rises with the wait that even the least busy replica has, because near saturation every token prefilled twice delays
everybody. *Away* is 0, but with several gateways that hear nothing of each other it is what counts against replicas that
another one chooses first. There is no threshold: a hot prefix spreads when waiting for it costs more than computing it again. A
replica of weight 2 gets a prompt as long as it costs at most twice as much there.

What changes what: `route` looks and changes nothing (so it is also what `/explain` asks); `begin`, `answered` and `finish`
move promises; `apply` and its siblings move knowledge. What has expired is dropped by the next `begin`, frame or health
probe of that replica, so until then `route` may still count it.

What must hold: every `begin` is followed by exactly one `finish`, and then nothing of it is left in any sum, also when its
replica has left or restarted meanwhile. A replica that leaves takes its index entries with it.

Errors: `PoolMismatch` (a replica that cannot join its pool), `UnknownReplica` (an operator named one that is not there),
`ReservationError` (our own bug). Frames, probes and results for a replica that has left are ignored: whoever watches it may
still have one in hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from router.blocks import BlockName
from router.fleet import Outcome, Replica, ReplicaView, Reservation
from router.index import ENTRY_BYTES, Holding, Index, Room
from router.policies import KEY_TOKENS, POLICIES, Candidate, Turn
from router.pool import Members, Pool, PoolMismatch
from router.settings import PolicyName, RoutingSettings
from router.trust import Snapshot, Step, Sync, Trust
from router.wire import Batch, Frame, Hello, Load, ReplicaSpec

__all__ = ["Decision", "Query", "Router", "UnknownReplica", "Unroutable"]


# Looked up once: `router.fleet` says why.
_OK, _FAILED, _EXACT, _BLIND = Outcome.OK, Outcome.FAILED, Trust.EXACT, Trust.BLIND


class UnknownReplica(LookupError):
    """There is no such replica."""


class Query(msgspec.Struct, frozen=True):
    """A prompt, as far as routing needs to know it."""

    model: str
    names: Sequence[BlockName]
    num_tokens: int
    num_bytes: int = 0
    """Of its canonical text, where tokens are unknown and `num_tokens` is an estimate from it."""
    exclude: frozenset[str] = frozenset()
    """Replicas that were tried already."""
    streamed: bool = True
    """False when the answer's first byte comes only with its last token, so that its time tells nothing of the prefill."""
    backlog_tokens: int = 0
    """Prompt tokens that wait before the fleet: they raise w as if the replicas had them."""
    yields: bool = False
    """Its tenant had its share: replicas that know priorities compute it after what does not yield."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    replica_id: str
    matched_tokens: int
    prompt_tokens: int
    reason: str
    """One of a few fixed words."""
    w: float
    policy: PolicyName
    candidates: tuple[Candidate, ...]
    wait_s: float = 0.0
    """Predicted, at the chosen one."""


@dataclass(frozen=True, slots=True)
class Unroutable:
    """``capacity``: all replicas that could serve it are busy. ``no_replica``: none is there, healthy and not excluded."""

    code: Literal["model_not_found", "no_replica", "capacity"]
    retry_after_s: float = 0.0


class Router:
    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self._settings = settings or RoutingSettings()
        self._choose = POLICIES[self._settings.policy]
        self._room = Room(self._settings.index_bytes // ENTRY_BYTES)
        self._pools: dict[str, Members] = {}
        self.all_text = True
        """Whether no pool is matched by tokens, so that every prompt will be looked at as text."""
        self._replicas: dict[str, Replica] = {}
        self._last_stamp = float("-inf")
        self._begun = 0

    # -- membership

    def add(self, replica_id: str, spec: ReplicaSpec, now: float) -> None:
        """A replica registers, or says again that it is there. It takes requests once `set_health` says that it is well.

        One with a new epoch, address, model, revision, kind or order is another replica: all that was known of the old one
        goes, but not what operators set. Model '' means not known yet: it serves nothing until it is added again with one.
        Raises `PoolMismatch`.
        """
        known = self._replicas.get(replica_id)
        if known is not None and _same_process(known, spec):
            known.spec = spec
            return
        members = self._pools.get(spec.model)
        if spec.model and members is not None and not members.replicas.keys() <= {replica_id}:
            members.require_fit(spec)
        if known is not None:
            self.remove(replica_id)
        members = self._pools.setdefault(spec.model, Members(spec, now, self._settings, self._room))
        self._pools_changed()
        replica = Replica(replica_id, spec, members.index.join(), self._settings)
        if known is not None:
            replica.weight, replica.cordoned = known.weight, known.cordoned
        members.replicas[replica_id] = self._replicas[replica_id] = replica
        members.share_out()

    def misfit(self, spec: ReplicaSpec, without: frozenset[str] = frozenset()) -> str:
        """Why a replica could not be added if those of `without` were gone; '' when it could."""
        members = self._pools.get(spec.model) if spec.model else None
        if members is None or members.replicas.keys() <= without:
            return ""
        try:
            members.require_fit(spec)
        except PoolMismatch as error:
            return str(error)
        return ""

    def remove(self, replica_id: str) -> None:
        """It is gone, with its index entries. Reservations on it stay valid until they are finished."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        members = self._pools[replica.spec.model]
        members.index.leave(replica.holding)
        del members.replicas[replica_id]
        members.share_out()
        if not members.replicas:
            del self._pools[replica.spec.model]
            self._pools_changed()

    def patch(
        self,
        replica_id: str,
        *,
        weight: float | None = None,
        cordoned: bool | None = None,
        draining: bool | None = None,
    ) -> None:
        """What operators set. Raises `UnknownReplica`, and ValueError for a weight that is not above 0."""
        replica = self._known(replica_id)
        if weight is not None:
            if not 0 < weight < math.inf:
                raise ValueError(f"weight {weight} is not above 0")
            replica.weight = weight
        if cordoned is not None:
            replica.cordoned = cordoned
        if draining is not None:
            replica.draining = draining

    def set_health(self, replica_id: str, healthy: bool, now: float) -> None:
        """By a probe, or by its event stream's being alive."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.healthy = healthy
            self._drop_expired(replica, now)

    def set_mismatch(self, replica_id: str, why: str) -> None:
        """What a probe found to be unlike its registration, as another model; '' when it is as registered."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.mismatch = why

    @property
    def patience(self) -> float:
        """See `RoutingSettings`."""
        return self._settings.patience

    def configure(self, settings: RoutingSettings) -> None:
        """Decide by these from now on, `index_bytes` apart. What was learned stays, and so do the priors that it began with."""
        self._settings = settings
        self._choose = POLICIES[settings.policy]
        for members in self._pools.values():
            members.configure(settings)

    def busy(self, replica_id: str, until: float) -> None:
        """It said busy and named a time. Bound that time before: a replica can ask for any."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.busy_until = until

    def spec(self, replica_id: str) -> ReplicaSpec:
        """How to reach it, credential included. Raises `UnknownReplica`."""
        return self._known(replica_id).spec

    def replicas(self) -> list[ReplicaView]:
        return list(self.each_replica())

    def each_replica(self) -> Iterator[ReplicaView]:
        """One after the other, for who must not compute for long: 4 us each. Those that leave meanwhile are left out."""
        for replica in list(self._replicas.values()):
            if self._replicas.get(replica.id) is replica:
                yield self._pools[replica.spec.model].view(replica)

    def models(self) -> list[str]:
        return [model for model in self._pools if model]

    def pool(self, model: str) -> Pool | None:
        members = self._pools.get(model) if model else None
        return None if members is None else members.record

    def unserved(self) -> Unroutable:
        """Why there is no pool for a model: nobody serves it, or nobody serves anything, as after a restart of the gateway."""
        if self.models():
            return Unroutable("model_not_found")
        return Unroutable("no_replica", self._settings.retry_after_s)

    # -- knowledge

    def apply(self, replica_id: str, frame: Frame, now: float) -> Sync:
        """Take in the next frame of its event stream."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return Sync.OK
        self._drop_expired(replica, now)
        if isinstance(frame, Hello):
            return self._greet(replica, frame)
        if replica.mismatch:
            return Sync.MISMATCH
        if isinstance(frame, Load):
            replica.take_load(frame, now)
            step = replica.stream.load(frame.seq)
        else:
            step = replica.stream.batch(frame.seq)
            if step is Step.APPLY and not self._change(replica, frame):
                step = Step.GAP
        if step is Step.GAP:
            replica.age_picture(now)
            return Sync.GAP
        if replica.stream.exact:
            replica.stale_at = math.inf
        return Sync.OK

    def apply_snapshot(self, replica_id: str, frame: Frame, now: float) -> Sync:
        """Take in the next frame of a snapshot: a greeting, which forgets what was known of its cache, then batches and loads.

        Until `end_snapshot` the picture grows and is not exact; decisions use what is there. `Sync.GAP`: it is no snapshot,
        or it cannot be true.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return Sync.OK
        if isinstance(frame, Hello):
            if not self._fits(replica, frame):
                return Sync.MISMATCH
            index = self._pools[replica.spec.model].index
            if frame.epoch == replica.stream.epoch:
                index.clear_confirmed(replica.holding)
            else:
                index.clear(replica.holding)
            replica.stream.disown()
            replica.snapshot = Snapshot(frame.epoch, frame.seq)
        elif replica.snapshot is None:
            return Sync.GAP
        else:
            replica.snapshot.seq = frame.seq
            if isinstance(frame, Load):
                replica.take_load(frame, now)
            elif not self._change(replica, frame):
                return Sync.GAP
        return Sync.OK

    def end_snapshot(self, replica_id: str) -> Sync:
        """The snapshot is complete: the picture is true for the seq of its last frame. `Sync.GAP`: there was none."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return Sync.OK
        snapshot, replica.snapshot = replica.snapshot, None
        if snapshot is None:
            return Sync.GAP
        replica.stream.snapshot(snapshot.epoch, snapshot.seq)
        if replica.stream.exact:
            replica.stale_at = math.inf
        return Sync.OK

    def events_lost(self, replica_id: str, now: float) -> None:
        """Its event stream ended. What it said is kept for a while, for a stream that comes back and replays the rest."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.lose_stream(now)

    def resume_point(self, replica_id: str) -> tuple[str, int] | None:
        """(epoch, seq of the last batch applied) to ask for the rest with; None when nothing was heard of it."""
        replica = self._replicas.get(replica_id)
        return None if replica is None else replica.stream.resume_point

    # -- decisions

    def route(self, query: Query, now: float, draw: float) -> Decision | Unroutable:
        """Where the prompt should go. Changes nothing. `draw` in [0, 1) breaks ties."""
        members = self._pools.get(query.model) if query.model else None
        if members is None:
            return self.unserved()
        candidates, w = self._weigh(members, query, now)
        choices = [candidate for candidate in candidates if candidate.eligible]
        all_ejected = False
        if not choices:
            refusal = self._refusal(members, candidates, now)
            if refusal is not None:
                return refusal
            # Better one that failed lately than none: ejection must never take down a pool.
            all_ejected = True
            choices = [candidate for candidate in candidates if candidate.why_not == "ejected"]
        chosen, reason = self._choose(choices, self._turn(members, query, draw))
        return Decision(
            chosen.replica,
            chosen.matched_tokens,
            query.num_tokens,
            "all_ejected" if all_ejected else reason,
            w,
            self._settings.policy,
            candidates,
            chosen.wait_s,
        )

    def has_room(self, decision: Decision, now: float, *, yields: bool = False) -> bool:
        """Whether the prompt could begin where it was decided to go when its turn comes: a sequence is free for it, and KV.
        `yields`: of its query.
        """
        uncached_tokens = decision.prompt_tokens - decision.matched_tokens
        return self._known(decision.replica_id).has_room(uncached_tokens, now, yields=yields)

    def soonest_s(self, decision: Decision, now: float, *, yields: bool = False) -> float:
        """The least time that other prompts take before this one on any replica that could take it and has room; infinity
        when none has. 0 as long as nothing was measured of any of them: a guess of their pace holds nobody up. O(replicas).
        """
        open_to_it = [(self._known(each.replica), each) for each in decision.candidates if each.eligible]
        waits = (
            each.wait_s - replica.decoding_s(now)
            for replica, each in open_to_it
            if replica.has_room(each.uncached_tokens, now, yields=yields)
        )
        if all(replica.rate is None for replica, _ in open_to_it):
            return math.inf if next(waits, None) is None else 0.0
        return min(waits, default=math.inf)

    def full(self, decision: Decision, now: float, *, yields: bool = False) -> frozenset[str]:
        """Replicas that have no room for the prompt."""
        return frozenset(
            each.replica
            for each in decision.candidates
            if not self._known(each.replica).has_room(each.uncached_tokens, now, yields=yields)
        )

    def prefill_tok_s(self, model: str) -> float:
        """Of a usual replica of the model, as measured, else as set."""
        members = self._pools.get(model)
        replicas = tuple(members.replicas.values()) if members is not None else ()  # metrics are read in another thread
        known = [replica.rate for replica in replicas if replica.rate is not None]
        return sum(known) / len(known) if known else self._settings.prefill_tok_s

    def fleet_tok_s(self, model: str) -> float:
        """Prefill tokens a second of all replicas of the model together."""
        members = self._pools.get(model)
        return self.prefill_tok_s(model) * (len(members.replicas) if members is not None else 1)

    def begin(self, decision: Decision, query: Query, request_id: str, now: float) -> Reservation:
        """The prompt is about to be sent: its work is promised and its blocks are expected there from now on.

        Raises `UnknownReplica` when the replica left since the decision.
        """
        replica = self._known(decision.replica_id)
        members = self._pools[replica.spec.model]
        self._drop_expired(replica, now)
        # Stamps tell one prompt's expected blocks from another's, so no two may be equal.
        self._last_stamp = max(now, math.nextafter(self._last_stamp, math.inf))
        self._begun += 1
        reservation = Reservation(
            replica=replica,
            request_id=request_id,
            names=query.names,
            stamp=self._last_stamp,
            matched_tokens=decision.matched_tokens,
            uncached_tokens=decision.prompt_tokens - decision.matched_tokens,
            streamed=query.streamed,
            begun_at=now,
            permit=replica.breaker.begin(now),
            num_bytes=query.num_bytes,
            yields=query.yields and replica.takes_order,
            matched_blocks=members.depth_of(decision.matched_tokens),
        )
        replica.reserve(reservation)
        if replica.trust is not _BLIND:
            room = self._room
            cap = min(members.capacity_of(replica), room.limit)
            reservation.last_sent, reservation.known = members.index.expect(
                replica.holding, query.names, reservation.stamp, cap
            )
            if room.used > room.limit:
                self._make_room()
        return reservation

    def answered(self, reservation: Reservation, now: float) -> None:
        """Its first body byte came: its prefill is done. Raises `ReservationError` after `finish`."""
        reservation.replica.answered(reservation, now)

    def admitted(self, reservation: Reservation) -> None:
        """A load frame of its replica, taken in before its `begin`, counts it already."""
        reservation.replica.admit(reservation)

    def finish(
        self,
        reservation: Reservation,
        now: float,
        outcome: Outcome,
        cached_tokens: int | None,
        prompt_tokens: int | None = None,
    ) -> None:
        """It ended, in whatever way. Exactly once: a second call raises `ReservationError`.

        `cached_tokens` and `prompt_tokens` are what the replica reported, None when it did not.
        """
        replica = reservation.replica
        members = self._pools[replica.spec.model] if self._replicas.get(replica.id) is replica else None
        if members is None or outcome is not _OK:
            computed = replica.finish(reservation, now, outcome, cached_tokens)
            if members is not None and not computed:
                # A client that left, or a refusal, says nothing of what was computed before; a failure may be a restart.
                known = 0 if outcome is _FAILED else reservation.known
                members.index.retract(replica.holding, reservation.names, reservation.stamp, known)
            return
        counted = members.prompt_tokens_of(reservation, prompt_tokens)
        replica.finish(reservation, now, outcome, cached_tokens, counted)
        if members.record.key_space == "text":
            members.judge_cache_size(reservation, cached_tokens, counted or reservation.prompt_tokens)

    # -- inside

    def _pools_changed(self) -> None:
        self.all_text = all(members.record.key_space == "text" for members in self._pools.values())

    def _known(self, replica_id: str) -> Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise UnknownReplica(f"there is no replica {replica_id!r}")
        return replica

    def _fits(self, replica: Replica, hello: Hello) -> bool:
        """Whether its pool can use it; remembers the answer."""
        members = self._pools[replica.spec.model]
        replica.mismatch = members.misfit(hello)
        if replica.mismatch:
            members.index.clear(replica.holding)
            replica.stream.cut()
            replica.stream.disown()
            return False
        members.learn(hello)
        replica.hello = hello
        replica.indexed = self._has_room_for(replica)
        if not replica.indexed:
            members.index.clear(replica.holding)
        return True

    def _has_room_for(self, replica: Replica) -> bool:
        """Whether all that it can hold fits into the index beside all that the others can."""
        others = sum(
            other.capacity_blocks for other in self._replicas.values() if other.indexed and other is not replica
        )
        wanted = replica.capacity_blocks
        return wanted <= self._settings.max_blocks and others + wanted <= self._room.limit

    def _make_room(self) -> None:
        """Drop what was sent anywhere longest ago, until the index is within its memory again.

        What events say is never dropped, because there is room for all that replicas can hold (`_has_room_for`).
        """
        room = self._room
        while room.used > room.limit:
            oldest = min(self._replicas.values(), key=lambda replica: replica.holding.oldest_stamp)
            if not oldest.holding.expected:
                return
            self._pools[oldest.spec.model].index.drop_oldest(oldest.holding, room.used - room.limit)

    def _greet(self, replica: Replica, hello: Hello) -> Sync:
        if not self._fits(replica, hello):
            return Sync.MISMATCH
        if replica.stream.hello(hello.epoch, hello.seq) is Step.RESTART:
            self._pools[replica.spec.model].index.clear(replica.holding)
        if replica.stream.exact:
            replica.stale_at = math.inf
        return Sync.OK

    def _change(self, replica: Replica, batch: Batch) -> bool:
        """Apply a batch to the index. False: the replica claims more blocks than it has, so nothing it said is believed."""
        if not replica.indexed:
            return True
        index, holding = self._pools[replica.spec.model].index, replica.holding
        assert isinstance(index, Index)  # a replica of the other kind is a misfit once it greets
        assert isinstance(holding, Holding)
        if batch.cleared:
            index.clear(holding)
        index.remove(holding, batch.removed)
        for run in batch.stored:
            index.store(holding, run.names)
        if holding.confirmed <= replica.capacity_blocks:
            self._make_room()
            return True
        index.clear(holding)
        replica.stream.disown()
        replica.snapshot = None
        return False

    def _drop_expired(self, replica: Replica, now: float) -> None:
        index, settings = self._pools[replica.spec.model].index, self._settings
        if now >= replica.stale_at:
            index.clear_confirmed(replica.holding)
            replica.stream.disown()
            replica.stale_at = math.inf
        if replica.trust is _EXACT:
            # Events come when a prompt is computed, so one that still waits keeps its blocks expected.
            index.expire(replica.holding, min(now - settings.optimistic_ttl_s, replica.oldest_stamp))
        else:
            index.expire(replica.holding, now - settings.learned_ttl_s)

    def _weigh(self, members: Members, query: Query, now: float) -> tuple[tuple[Candidate, ...], float]:
        """Every replica of the pool in seconds, and w."""
        settings = self._settings
        num_tokens, exclude = query.num_tokens, query.exclude
        most_matched = max(num_tokens - 1, 0)  # where tokens are unknown, both are estimates
        depths = members.index.match(query.names, members.matchable(num_tokens, query.num_bytes))
        usual_rate, fixed_s = members.usual_pace()
        least_wait = math.inf
        # Equal replicas measure apart, by what else their machines do and by the prompts that they got. A rate near that of
        # its peers is therefore taken for theirs: at face value it would move talks from one to the other for nothing, and a
        # replica that once looked slow would get no prompt that could show otherwise.
        slowest, fastest = usual_rate / settings.same_rate_within, usual_rate * settings.same_rate_within
        rows = []
        for replica in members.replicas.values():
            rate = replica.rate
            if rate is None or slowest <= rate <= fastest:
                rate = usual_rate
            matched = depth = 0
            if depths and (depth := depths.get(replica.holding.slot, 0)):
                matched = min(members.tokens_of(depth), most_matched)
            wait = replica.wait_s(now, rate)
            delayed = 0
            if replica.unanswered_tokens:
                match = query.names, depth, matched
                behind = replica.behind(*match, num_tokens - matched, now, rate, yields=query.yields)
                if behind is not None:
                    wait = max(wait - behind.tokens / rate, replica.decoding_s(now))
                    delayed = behind.delayed
            why_not = "excluded" if exclude and replica.id in exclude else replica.why_not(now)
            if not why_not and wait < least_wait:
                least_wait = wait
            rows.append((replica, why_not, matched, wait, (num_tokens - matched) / rate + fixed_s, delayed))
        if query.backlog_tokens:
            least_wait += query.backlog_tokens / (usual_rate * len(rows))
        w = 1.0 if least_wait == math.inf else min(1.0 + settings.w_per_wait_s * least_wait, settings.max_w)
        candidates = tuple(
            [
                Candidate(
                    replica.id,
                    not why_not,
                    why_not,
                    matched,
                    num_tokens - matched,
                    wait,
                    own,
                    (wait + replica.away_s + (w + delayed) * own) / replica.weight,
                    replica.trust,
                    replica.inflight,
                    replica.away_s,
                    delayed,
                )
                for replica, why_not, matched, wait, own, delayed in rows
            ]
        )
        return candidates, w

    def _turn(self, members: Members, query: Query, draw: float) -> Turn:
        settings = self._settings
        place = min(KEY_TOKENS // members.record.block_size, len(query.names))
        key = query.names[place - 1] if place else 0
        return Turn(draw, self._begun, settings.tie_ratio, key, settings.saturated_s)

    def _refusal(self, members: Members, candidates: Sequence[Candidate], now: float) -> Unroutable | None:
        """Why nobody may take the prompt; None when that is only because all were ejected."""
        waits = [members.replicas[each.replica].busy_until - now for each in candidates if each.why_not == "busy"]
        if waits:
            return Unroutable("capacity", min(waits))
        if any(candidate.why_not == "ejected" for candidate in candidates):
            return None
        return Unroutable("no_replica", self._settings.retry_after_s)


def _same_process(replica: Replica, spec: ReplicaSpec) -> bool:
    old = replica.spec
    if any(getattr(old, name) != getattr(spec, name) for name in ("url", "model", "revision", "kind", "priority")):
        return False
    # A restart may show in the event stream before the replica registers again.
    return spec.epoch in (old.epoch, replica.stream.epoch)
