"""Routers with replicas in them, and short ways to make what they are asked and told."""

import random
from collections.abc import Iterator, Sequence

from router import (
    Decision,
    Outcome,
    Query,
    ReplicaView,
    Reservation,
    Router,
    RoutingSettings,
    Sync,
    block_names,
    root_name,
)
from router.wire import Batch, Frame, Hello, Load, ReplicaSpec, Stored, pack_ids

MODEL = "m"
ROOT = root_name(model=MODEL)
RATE = 8000.0


def spec(
    kind: str = "warmpath", *, model: str = MODEL, epoch: str = "e1", revision: str = "", url: str = "http://h"
) -> ReplicaSpec:
    return ReplicaSpec(url=url, model=model, kind=kind, epoch=epoch, revision=revision, credential="secret")


def hello(epoch: str = "e1", seq: int = 0, *, model: str = MODEL, capacity: int = 10_000) -> Hello:
    return Hello(
        epoch=epoch,
        seq=seq,
        model=model,
        block_size=16,
        tokenizer_digest="digest",
        numerics="n",
        capacity_blocks=capacity,
        max_num_seqs=64,
        started_at=0.0,
    )


def batch(seq: int, stored: Sequence[int] = (), removed: Sequence[int] = (), *, cleared: bool = False) -> Batch:
    runs = [Stored(ROOT, list(stored))] if stored else []
    return Batch(seq=seq, ts=0.0, stored=runs, removed=list(removed), cleared=cleared)


def load(seq: int = 0, *, tokens: int = 0, running: int = 0, rate: float = RATE, admitted: Sequence[str] = ()) -> Load:
    return Load(
        seq=seq,
        ts=0.0,
        waiting=0,
        waiting_uncached_tokens=tokens,
        running=running,
        kv_used_blocks=0,
        prefill_tok_s=rate,
        step_ms=0.0,
        admitted=list(admitted),
    )


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=count)


def query(ids: Sequence[int], *, model: str = MODEL, exclude: Sequence[str] = ()) -> Query:
    return Query(model=model, names=block_names(pack_ids(ids), ROOT), num_tokens=len(ids), exclude=frozenset(exclude))


def own_fleet(count: int, routing: RoutingSettings | None = None, *, capacity: int = 10_000) -> Router:
    """Healthy own workers r0, r1, … with an open event stream."""
    router = Router(routing)
    for number in range(count):
        name = f"r{number}"
        router.add(name, spec(), 0.0)
        assert router.apply(name, hello(capacity=capacity), 0.0) is Sync.OK
        router.set_health(name, True, 0.0)
    return router


def foreign_fleet(count: int, routing: RoutingSettings | None = None) -> Router:
    router = Router(routing)
    for number in range(count):
        router.add(f"r{number}", spec("openai"), 0.0)
        router.set_health(f"r{number}", True, 0.0)
    return router


def decide(router: Router, asked: Query, now: float = 0.0, draw: float = 0.0) -> Decision:
    decision = router.route(asked, now, draw)
    assert isinstance(decision, Decision)
    return decision


def send(router: Router, asked: Query, now: float = 0.0, draw: float = 0.0, *, request_id: str = "x") -> Reservation:
    return router.begin(decide(router, asked, now, draw), asked, request_id, now)


def serve(router: Router, asked: Query, now: float = 0.0, draw: float = 0.0) -> str:
    """Send it and let it end well after the time it should take; where it went."""
    reservation = send(router, asked, now, draw)
    router.finish(reservation, now + 0.02 + reservation.uncached_tokens / RATE, Outcome.OK, None)
    return reservation.replica_id


def take_snapshot(router: Router, frames: Sequence[Frame], now: float = 0.0, replica_id: str = "r0") -> Sync:
    """As the gateway does: frame by frame until one of them is refused."""
    for frame in frames:
        if (sync := router.apply_snapshot(replica_id, frame, now)) is not Sync.OK:
            return sync
    return router.end_snapshot(replica_id)


def view(router: Router, replica_id: str = "r0") -> ReplicaView:
    return next(each for each in router.replicas() if each.id == replica_id)


def why_not(router: Router, now: float = 0.0) -> dict[str, str]:
    decision = decide(router, query(tokens(0, 64)), now)
    return {candidate.replica: candidate.why_not for candidate in decision.candidates}


def draws(count: int) -> Iterator[float]:
    generator = random.Random(0)
    for _ in range(count):
        yield generator.random()
