"""The gate alone: who passes, who waits and for what, and what those are told who do not get in."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from router import (
    Asked,
    Decision,
    Dropped,
    Failed,
    Gate,
    GateSettings,
    Outcome,
    Placed,
    Priority,
    Query,
    Reservation,
    Router,
)
from router.fair_queue import Entry
from router.wire import Load
from tests.router.fleets import MODEL, RATE, foreign_fleet, hello, load, own_fleet, query, tokens

_numbers = itertools.count()


def asked(tenant: str = "a", num_tokens: int = 800, *, seed: int | None = None) -> Asked:
    number = next(_numbers)
    return Asked(query(tokens(number if seed is None else seed, num_tokens)), f"{tenant}{number}", tenant)


def new_gate(router: Router, *, max_wait_s: float = 2.0, max_queued: int = 100) -> Gate:
    return Gate(router, MODEL, GateSettings(max_wait_s=max_wait_s, max_queued=max_queued))


def passes(router: Router, gate: Gate, what: Asked, now: float = 0.0) -> bool:
    """Whether it goes straight through; then it ends at once."""
    placed = gate.try_pass(what, now, 0.0)
    if not isinstance(placed, Placed):
        return False
    router.finish(placed.reservation, now, Outcome.OK, None)
    return True


def enters(gate: Gate, what: Asked, now: float = 0.0) -> Entry[Asked]:
    assert gate.try_pass(what, now, 0.0) is None
    entry, displaced = gate.wait(what, now, now, 0.0)
    assert displaced is None
    return entry


def released(gate: Gate, now: float, at_most: int = 100) -> list[Placed | Dropped | Failed]:
    return [end for _, end in gate.release(now, lambda: 0.0, at_most)]


def busy(router: Router, seconds: float, replica: str = "r0", **more: int) -> None:
    """It says that it has so much to compute."""
    frame: Load = msgspec.structs.replace(load(tokens=int(seconds * RATE)), **more)
    router.apply(replica, frame, 0.0)


def test_a_single_tenant_passes_until_the_wait_is_max_wait_s() -> None:
    router = own_fleet(1)
    gate = new_gate(router)

    busy(router, 1.9)
    assert passes(router, gate, asked())
    busy(router, 2.1)
    assert not passes(router, gate, asked())


def test_a_pace_that_nobody_measured_holds_nobody_up() -> None:
    gate = new_gate(foreign_fleet(1))

    placed = [gate.try_pass(asked(num_tokens=16_000), 0.0, 0.0) for _ in range(20)]

    last = placed[-1]
    assert isinstance(last, Placed)
    assert last.decision.wait_s > 2.0  # by the setting for replicas of which nothing is known


def test_where_two_tenants_ask_replicas_are_kept_free_for_who_comes_next() -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    assert passes(router, gate, asked("a"))
    assert passes(router, gate, asked("b"))

    busy(router, 0.5)
    assert not passes(router, gate, asked("a"))
    busy(router, 0.05)
    assert passes(router, gate, asked("b"))

    later = 61.0
    router.apply("r0", load(tokens=int(RATE)), later)
    assert passes(router, gate, asked("b"), later), "a is gone"


def test_answers_that_are_generated_are_no_wait() -> None:
    """They count where to go, but with many of them a replica would never have less than `ahead_s` to do."""
    router = own_fleet(1)
    gate = new_gate(router)
    assert passes(router, gate, asked("a"))
    assert passes(router, gate, asked("b"))

    router.apply("r0", msgspec.structs.replace(hello(), max_num_seqs=1000), 0.0)
    router.apply("r0", load(running=500), 0.0)

    assert passes(router, gate, asked("a"))


@pytest.mark.parametrize(("running", "waiting", "free"), [(63, 0, True), (64, 0, True), (64, 1, False), (60, 5, False)])
def test_a_replica_whose_sequences_are_all_taken_gets_one_more_to_begin_with_and_no_second(
    running: int, waiting: int, free: bool
) -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    busy(router, 0.0, running=running, waiting=waiting)

    assert passes(router, gate, asked()) is free


def test_a_promise_takes_a_sequence_until_a_load_frame_counts_it() -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    busy(router, 0.0, running=63)

    came = [gate.try_pass(asked(num_tokens=16), 0.0, 0.0) for _ in range(3)]

    assert [placed is not None for placed in came] == [True, True, False]


def test_a_prompt_waits_for_room_in_the_kv_cache_and_goes_where_there_is_some() -> None:
    router = own_fleet(2, capacity=100)
    gate = new_gate(router)
    for replica in ("r0", "r1"):
        busy(router, 0.0, replica, kv_used_blocks=80)
    entry = enters(gate, asked(num_tokens=800, seed=1))
    assert released(gate, 0.0) == []

    busy(router, 0.1, "r1", kv_used_blocks=40)

    (placed,) = released(gate, 0.0)
    assert isinstance(placed, Placed)
    assert placed.decision.replica_id == "r1", "r0 would answer sooner, had it room"
    assert not entry.waits


def test_who_was_away_passes_a_flood_and_its_prompts_are_computed_first() -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    assert passes(router, gate, asked("quiet"))
    flood = [asked("flood", 4000) for _ in range(20)]
    busy(router, 1.0)
    for each in flood:
        enters(gate, each)
    for second in range(1, 5):
        router.apply("r0", load(), float(second))
        (sent,) = released(gate, float(second), at_most=1)
        assert isinstance(sent, Placed)
        if second < 4:
            router.finish(sent.reservation, float(second), Outcome.OK, None)

    entry = enters(gate, asked("quiet", 800), 4.0)
    ((first, placed),) = gate.release(4.0, lambda: 0.0, 100)

    assert first is entry
    assert isinstance(sent, Placed)
    assert isinstance(placed, Placed)
    assert placed.decision.wait_s == 0.0, "what lies there yields to it"
    assert placed.engine_priority(Priority.DEFAULT) == 0
    assert sent.engine_priority(Priority.DEFAULT) == 1
    assert sent.engine_priority(Priority.INTERACTIVE) < placed.engine_priority(Priority.DEFAULT)


def test_a_rank_orders_by_priority_then_by_who_yields_then_by_when_it_came_and_how_long_it_is() -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    short, long = (gate.try_pass(asked(num_tokens=number), 0.0, 0.0) for number in (80, 80_000))
    yielding = gate.try_pass(asked(num_tokens=80), 0.0, 0.0)
    assert isinstance(short, Placed)
    assert isinstance(long, Placed)
    assert isinstance(yielding, Placed)
    yielding.reservation.yields = True
    now, year_2070 = 1.8e9, 3.2e9

    ranks = [
        short.engine_rank(Priority.INTERACTIVE, year_2070),
        short.engine_rank(Priority.DEFAULT, now),
        short.engine_rank(Priority.DEFAULT, now + 9.9),
        long.engine_rank(Priority.DEFAULT, now),
        short.engine_rank(Priority.DEFAULT, now + 10.1),
        short.engine_rank(Priority.DEFAULT, year_2070),
        yielding.engine_rank(Priority.DEFAULT, now),
        yielding.engine_rank(Priority.DEFAULT, year_2070),
        short.engine_rank(Priority.BATCH, now),
    ]

    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)
    assert all(abs(rank) < 1 << 53 for rank in ranks), "exact in any JSON reader"


def test_who_does_not_get_in_is_told_the_work_before_it_by_the_rate_of_service() -> None:
    router = own_fleet(1)
    gate = new_gate(router, max_wait_s=0.5, max_queued=10)
    now = 0.0
    for _ in range(100):  # 8,000 tokens a second for ten seconds
        assert passes(router, gate, asked(num_tokens=800), now)
        router.apply("r0", load(), now)
        now += 0.1
    router.apply("r0", load(tokens=40_000), now)
    for _ in range(10):
        enters(gate, asked(num_tokens=8000 - 128), now)
    last = asked(num_tokens=8000)
    assert gate.try_pass(last, now, 0.0) is None
    entry, displaced = gate.wait(last, now, now, 0.0)
    assert displaced is entry

    told = gate.refusal(last, "full", now)

    assert told.retry_after_s == pytest.approx(10.0, rel=0.05), "80,000 tokens at 8,000 a second"
    assert not told.in_vain


def test_the_deadline_ends_a_wait_and_new_settings_hold_for_who_comes_then() -> None:
    router = own_fleet(1)
    gate = new_gate(router, max_wait_s=0.5)
    busy(router, 1000)
    enters(gate, asked(num_tokens=1600))
    gate.configure(GateSettings(max_wait_s=0.5, max_queued=1, deadline_s=5.0))
    what = asked("b")
    assert gate.try_pass(what, 1.0, 0.0) is None
    entry, displaced = gate.wait(what, 1.0, 1.0, 0.0)

    assert displaced is not None
    assert displaced is not entry, "the other tenant has more waiting"
    router.apply("r0", load(tokens=1_000_000), 5.0)
    assert released(gate, 5.9) == []
    (dropped,) = released(gate, 6.0)
    assert isinstance(dropped, Dropped)
    assert dropped.why == "deadline"
    assert len(gate) == 0


def test_nothing_is_left_of_what_yielded() -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    assert passes(router, gate, asked("a"))
    assert passes(router, gate, asked("b"))
    busy(router, 1.0)
    enters(gate, asked("a"))
    router.apply("r0", load(), 0.0)
    (placed,) = released(gate, 0.0)
    assert isinstance(placed, Placed)
    assert placed.reservation.yields

    router.finish(placed.reservation, 1.0, Outcome.CANCELLED, None)

    assert placed.reservation.replica.behind((), 0, 0, 0, 1.0, RATE, yields=False) is None


def test_those_who_had_their_share_leave_some_sequences_and_kv_to_those_who_had_not() -> None:
    router = own_fleet(1, capacity=1000)
    gate = new_gate(router)
    assert passes(router, gate, asked("a"))
    assert passes(router, gate, asked("b"))
    busy(router, 1.0)
    enters(gate, asked("b", 160))

    busy(router, 0.0, running=57)
    assert released(gate, 0.0) == [], "64 sequences, of which eight are kept"
    busy(router, 0.0, kv_used_blocks=870)
    assert released(gate, 0.0) == []
    busy(router, 0.0, running=50, kv_used_blocks=860)
    assert len(released(gate, 0.0)) == 1


def test_who_cannot_be_decided_on_is_told_alone_and_those_whose_time_has_come_are_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    busy(router, 10.0)
    late = enters(gate, asked("late"))
    broken, well = enters(gate, asked("broken"), 20.0), enters(gate, asked("well"), 20.0)
    router.apply("r0", load(), 30.0)
    begin, error = router.begin, RuntimeError("a bug")

    def begins(decision: Decision, query: Query, request_id: str, now: float) -> Reservation:
        if request_id == broken.item.request_id:
            raise error
        return begin(decision, query, request_id, now)

    monkeypatch.setattr(router, "begin", begins)
    over = dict(gate.release(30.0, lambda: 0.0, 100))

    assert over.keys() == {late, broken, well}
    assert len(gate) == 0
    assert isinstance(over[late], Dropped)
    assert over[broken] == Failed(error)
    assert isinstance(over[well], Placed)


def test_a_prompt_is_weighed_once_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    router = own_fleet(1)
    gate = new_gate(router)
    busy(router, 10.0)
    what = asked()
    assert gate.try_pass(what, 0.0, 0.0) is None
    monkeypatch.setattr(router, "route", None)

    entry, _ = gate.wait(what, 0.0, 0.0, 0.0)

    assert entry.work == 800 + 128
