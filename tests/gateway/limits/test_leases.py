"""Processes that lease from one ledger: exact where limits are small, few trips where they are large, nothing lost anywhere."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits.leases import LeasingLimiter
from gateway.limits.ledger import Granted, Ledger, Limit, Measure, Refused
from gateway.limits.limiter import LocalLimiter
from gateway.limits.link import LedgerServer, LedgerUnavailable, Post, RemoteLedger
from gateway.limits.reservation import Reservation
from gateway.limits.rules import Amounts
from tests.gateway.limits.ledgers import Clock

ONE: Amounts = (1, 100, 1, 100, 50)
ANSWERED: Amounts = (1, 40, 0, 40, 20)


def limit(measure: Measure, most: int, name: str = "key:a") -> Limit:
    return Limit(f"{name}:{measure.name.lower()}", measure, most)


class Link:
    """To a supervisor in the same process; counts trips, and fails or waits as a test wants."""

    most_calls = 8

    def __init__(self, server: LedgerServer, process: str) -> None:
        async def call(message: bytes) -> bytes:
            return server.handle(process, message)

        def post(message: bytes) -> None:
            server.handle(process, message)

        self._ledger = RemoteLedger(call, post)
        self.trips = 0
        self.failure: LedgerUnavailable | None = None
        self.fails_after_it_did = False
        self.gate: Callable[[], Awaitable[Any]] | None = None

    async def acquire(
        self, holder: str, limits: Sequence[Limit], amounts: Sequence[int], extras: Sequence[int]
    ) -> Granted | Refused:
        self.trips += 1
        if self.failure is not None and not self.fails_after_it_did:
            raise self.failure
        verdict = await self._ledger.acquire(holder, limits, amounts, extras)
        if self.gate is not None:
            await self.gate()
        if self.failure is not None:
            raise self.failure
        return verdict

    async def post(self, post: Post, *, surely: bool) -> None:
        if self.failure is not None:
            raise self.failure
        await self._ledger.post(post, surely=surely)

    async def aclose(self) -> None: ...


class Fleet:
    def __init__(self, processes: int) -> None:
        self.clock = Clock()
        self.server = LedgerServer(Ledger(), self.clock, self.clock)
        self.modes: list[bool] = []
        self.errors: list[str] = []
        self.links = [Link(self.server, f"p{number}") for number in range(processes)]
        self.processes = [
            LeasingLimiter(
                link,
                LocalLimiter(Ledger(math.inf), self.clock, self.clock, share=processes, is_fallback=True),
                self.clock,
                name=f"p{number}",
                processes=processes,
                on_mode=self.modes.append,
                on_error=self.errors.append,
            )
            for number, link in enumerate(self.links)
        ]

    async def take(self, number: int, limits: Sequence[Limit], amounts: Amounts = ONE) -> Reservation | Refused:
        limiter = self.processes[number]
        verdict = limiter.try_reserve(limits, amounts)
        return verdict if verdict is not None else await limiter.reserve(limits, amounts)

    async def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.clock.advance(0.25)
            for process in self.processes:
                await process.tick()

    def used(self, counted: Limit) -> int:
        return self.server.ledger.used(counted, self.clock.now, self.clock.now)


async def test_a_small_limit_is_admitted_to_exactly_with_one_trip_a_request() -> None:
    fleet = Fleet(4)
    limits = [limit(Measure.REQUESTS, 60), limit(Measure.PARALLEL, 79)]

    verdicts = await asyncio.gather(*(fleet.take(number % 4, limits) for number in range(200)))

    assert sum(isinstance(verdict, Reservation) for verdict in verdicts) == 60
    assert 60 <= sum(link.trips for link in fleet.links) <= 200


async def test_a_large_limit_takes_few_trips_and_is_never_exceeded() -> None:
    fleet = Fleet(4)
    limits = [limit(Measure.REQUESTS, 6000), limit(Measure.TOKENS, 600_000), limit(Measure.REQUESTS, 9000, "tenant:t")]

    admitted = 0
    for number in range(8000):
        if number % 200 == 0:
            await fleet.wait(0.25)
        verdict = await fleet.take(number % 4, limits)
        if isinstance(verdict, Reservation):
            admitted += 1
            verdict.end(ONE)

    assert 0.95 * 6000 <= admitted <= 6000
    assert sum(link.trips for link in fleet.links) <= 0.1 * admitted + 2000  # and one for each that was refused


async def test_under_saturation_no_minute_has_more_than_the_limit_and_most_of_it_is_used() -> None:
    fleet = Fleet(4)
    requests = limit(Measure.REQUESTS, 1200)
    times: list[float] = []

    for _ in range(4 * 200):
        await fleet.wait(0.25)
        verdicts = [await fleet.take(number % 4, [requests]) for number in range(16)]
        times += [fleet.clock.now for verdict in verdicts if isinstance(verdict, Reservation)]

    for begin in times[::50]:
        assert sum(begin <= time < begin + 60 for time in times) <= 1200
    settled = [time for time in times if time >= times[0] + 70]
    assert len(settled) >= 0.95 * 1200 * (times[-1] - times[0] - 70) / 60


async def test_what_lies_idle_goes_back_after_a_second() -> None:
    fleet = Fleet(1)
    limits = [limit(Measure.REQUESTS, 1000), limit(Measure.PARALLEL, 1000), limit(Measure.TOKENS_DAY, 100_000)]
    verdict = await fleet.take(0, limits)
    assert isinstance(verdict, Reservation)
    assert [fleet.used(counted) for counted in limits] == [50, 50, 5000]

    verdict.end(ANSWERED)
    await fleet.wait(2.0)

    assert [fleet.used(counted) for counted in limits] == [1, 0, 40]


async def test_a_request_takes_one_trip_for_all_that_it_lacks() -> None:
    fleet = Fleet(1)
    leased = [limit(Measure.REQUESTS, 1000), limit(Measure.TOKENS, 1 << 30), limit(Measure.PARALLEL, 1000)]
    small = [limit(Measure.REQUESTS, 10, "tenant:t"), limit(Measure.PARALLEL, 10, "tenant:t")]
    await fleet.take(0, leased)

    verdict = await fleet.take(0, [*leased, *small])
    assert isinstance(verdict, Reservation)
    assert fleet.links[0].trips == 2
    for _ in range(9):
        assert isinstance(fleet.processes[0].try_reserve(leased, ONE), Reservation)
    assert fleet.links[0].trips == 2


async def test_a_request_that_is_refused_keeps_nothing_of_what_was_set_aside() -> None:
    fleet = Fleet(1)
    leased, small = limit(Measure.PARALLEL, 1000), limit(Measure.REQUESTS, 1)
    first = await fleet.take(0, [leased, small])
    assert isinstance(first, Reservation)
    first.end(ANSWERED)

    for _ in range(100):
        assert isinstance(await fleet.take(0, [leased, small]), Refused)

    await fleet.wait(2.0)
    assert fleet.used(leased) == 0


async def test_a_slot_of_a_small_limit_is_free_at_once() -> None:
    fleet = Fleet(2)
    parallel = limit(Measure.PARALLEL, 1)
    for number in range(20):
        verdict = await fleet.take(number % 2, [parallel])
        assert isinstance(verdict, Reservation)
        assert isinstance(await fleet.take(0, [parallel]), Refused)
        verdict.end(ANSWERED)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_client_that_leaves_during_the_trip_takes_nothing() -> None:
    fleet = Fleet(1)
    limits = [limit(Measure.REQUESTS, 5), limit(Measure.PARALLEL, 5), limit(Measure.USD_DAY, 1000)]
    arrived, leave = asyncio.Event(), asyncio.Event()

    async def gate() -> None:
        arrived.set()
        await leave.wait()

    fleet.links[0].gate = gate
    asking = asyncio.ensure_future(fleet.take(0, limits))
    await arrived.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    leave.set()
    await fleet.processes[0].aclose()

    assert [fleet.used(counted) for counted in limits] == [0, 0, 0]


async def test_a_limit_that_was_changed_gives_back_what_was_leased_of_the_old_one() -> None:
    fleet = Fleet(1)
    old, new = limit(Measure.PARALLEL, 1000), limit(Measure.PARALLEL, 2000)
    first = await fleet.take(0, [old])
    second = await fleet.take(0, [new])
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)

    first.end(ANSWERED)
    second.end(ANSWERED)

    await fleet.wait(2.0)
    assert fleet.used(new) == 0


async def test_what_a_killed_process_held_is_free_when_the_supervisor_notices() -> None:
    fleet = Fleet(2)
    limits = [limit(Measure.PARALLEL, 2), limit(Measure.TOKENS_DAY, 1000)]
    await fleet.take(0, limits)
    await fleet.take(1, limits)

    fleet.server.forget("p0")

    assert [fleet.used(counted) for counted in limits] == [1, 100]


async def test_running_requests_hold_their_slots_for_as_long_as_they_run() -> None:
    fleet = Fleet(1)
    limits = [limit(Measure.PARALLEL, 2), limit(Measure.USD_DAY, 1000)]
    await fleet.take(0, limits)

    await fleet.wait(60)

    assert [fleet.used(counted) for counted in limits] == [1, 50]


@pytest.mark.parametrize("did", [False, True], ids=["it did nothing", "it did what it was asked"])
async def test_without_a_ledger_each_process_has_its_share_and_all_is_right_when_it_is_back(did: bool) -> None:
    fleet = Fleet(4)
    limits = [limit(Measure.REQUESTS, 40), limit(Measure.PARALLEL, 40), limit(Measure.USD_DAY, 4000)]
    running = await fleet.take(0, limits)
    ended = await fleet.take(0, limits)
    assert isinstance(running, Reservation)
    assert isinstance(ended, Reservation)
    link = fleet.links[0]
    link.failure, link.fails_after_it_did = LedgerUnavailable("timeout"), did

    verdicts = [await fleet.take(0, limits) for _ in range(15)]

    admitted = [verdict for verdict in verdicts if isinstance(verdict, Reservation)]
    assert len(admitted) == 10
    assert all(verdict.is_local for verdict in admitted)
    assert link.trips == 3  # nobody waits for a ledger that is known to be away
    assert fleet.modes == [True]
    ended.end(ANSWERED)
    for verdict in admitted:
        verdict.end(ANSWERED)
    await fleet.wait(3.0)
    assert fleet.errors == ["timeout"] * 4

    link.failure = None
    await fleet.wait(1.5)

    assert fleet.modes == [True, False]
    found = await fleet.take(0, limits)
    assert isinstance(found, Reservation)
    assert not found.is_local
    assert fleet.used(limits[1]) == 2
    running.end(ANSWERED)
    found.end(ANSWERED)
    await fleet.wait(0.25)
    assert fleet.used(limits[1]) == 0
    assert fleet.used(limits[2]) in (40, 60)  # what ended while nobody could tell is told, or may have been


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 1), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 50), st.sampled_from([ANSWERED, (1, 0, 0, 0, 0), (0, 0, 0, 0, 0)])),
        st.tuples(st.just("wait"), st.integers(1, 12), st.none()),
        st.tuples(st.just("lose"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("find"), st.integers(0, 1), st.none()),
    ),
    max_size=60,
)
CHOICES = (
    [limit(Measure.PARALLEL, 4), limit(Measure.REQUESTS, 8)],
    [limit(Measure.PARALLEL, 400, "key:b"), limit(Measure.REQUESTS, 900, "key:b"), limit(Measure.USD_DAY, 60_000)],
    [limit(Measure.PARALLEL, 4), limit(Measure.PARALLEL, 400, "key:b"), limit(Measure.TOKENS, 90_000)],
)


@settings(max_examples=60, deadline=None)
@given(script=steps)
def test_whatever_happens_nothing_is_held_once_all_have_ended(script: list[tuple[str, Any, Any]]) -> None:
    asyncio.run(play(script))


async def play(script: list[tuple[str, Any, Any]]) -> None:
    fleet = Fleet(2)
    running: list[Reservation] = []
    for step in script:
        await do(fleet, running, *step)
        for choice in CHOICES:
            assert fleet.used(choice[0]) <= choice[0].most

    for reservation in running:
        reservation.end(ANSWERED)
    await end(fleet)


async def do(fleet: Fleet, running: list[Reservation], what: str, number: int, how: Any) -> None:
    if what == "take":
        verdict = await fleet.take(number, CHOICES[how])
        if isinstance(verdict, Reservation):
            running.append(verdict)
    elif what == "end" and running:
        running.pop(number % len(running)).end(how)
    elif what == "wait":
        await fleet.wait(number / 4)
    elif what == "lose":
        fleet.links[number].failure = LedgerUnavailable("timeout", was_sent=how)
        fleet.links[number].fails_after_it_did = how
    elif what == "find":
        fleet.links[number].failure = None


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_however_trips_overlap_and_clients_leave_nothing_is_exceeded_or_lost(seed: int) -> None:
    asyncio.run(play_at_once(random.Random(seed)))


async def play_at_once(draw: random.Random) -> None:
    fleet = Fleet(2)
    clients: list[asyncio.Task[None]] = []

    async def turns(most: int) -> None:
        for _ in range(draw.randrange(most)):
            await asyncio.sleep(0)

    async def client() -> None:
        verdict = await fleet.take(draw.randrange(2), draw.choice(CHOICES))
        if isinstance(verdict, Reservation):
            try:
                await turns(6)
            finally:
                verdict.end(draw.choice([ANSWERED, (1, 0, 0, 0, 0), (0, 0, 0, 0, 0)]))

    for link in fleet.links:
        link.gate = lambda: turns(4)
    for _ in range(200):
        clients.append(asyncio.ensure_future(client()))
        await disturb(fleet, clients, draw)
        await asyncio.sleep(0)
        used = {counted: fleet.used(counted) for choice in CHOICES for counted in choice}
        assert {counted: amount for counted, amount in used.items() if amount > counted.most} == {}
    await asyncio.gather(*clients, return_exceptions=True)

    await end(fleet)


async def disturb(fleet: Fleet, clients: list[asyncio.Task[None]], draw: random.Random) -> None:
    if draw.random() < 0.2:
        draw.choice(clients).cancel()
    if draw.random() < 0.1:
        await fleet.wait(0.25)
    if draw.random() < 0.02:
        link = draw.choice(fleet.links)
        link.failure = LedgerUnavailable("timeout") if link.failure is None else None
        link.fails_after_it_did = draw.random() < 0.5


async def end(fleet: Fleet) -> None:
    """Once every request has ended and every ledger is back, nothing is held."""
    for link in fleet.links:
        link.failure = None
    await fleet.wait(20.0)

    held = {counted.counter: fleet.used(counted) for choice in CHOICES for counted in choice}
    assert {name: amount for name, amount in held.items() if amount and name.endswith("parallel")} == {}


async def test_slots_that_many_requests_left_are_there_for_another_process_at_once() -> None:
    fleet = Fleet(2)
    slots = [limit(Measure.PARALLEL, 400)]
    taken = [await fleet.take(0, slots) for _ in range(390)]
    for verdict in taken:
        assert isinstance(verdict, Reservation)
        verdict.end(ANSWERED)
    await fleet.wait(0.25)

    verdicts = [await fleet.take(1, slots) for _ in range(380)]

    assert sum(isinstance(verdict, Reservation) for verdict in verdicts) == 380


class TestBursts:
    async def test_of_a_burst_few_trips_are_under_way_at_once_and_few_are_made_in_vain(self) -> None:
        fleet = Fleet(1)
        limits = [limit(Measure.REQUESTS, 10)]
        under_way = most = 0

        async def gate() -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1

        fleet.links[0].gate = gate

        verdicts = await asyncio.gather(*(fleet.take(0, limits) for _ in range(500)))

        assert sum(isinstance(verdict, Reservation) for verdict in verdicts) == 10
        assert most <= 8
        assert fleet.links[0].trips <= 10 + most

    async def test_who_waits_for_a_turn_in_vain_decides_by_its_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.limits.leases._TURN_S", 0.01)
        fleet = Fleet(1)
        limits = [limit(Measure.REQUESTS, 10)]
        answered = asyncio.Event()
        fleet.links[0].gate = answered.wait
        trips = [asyncio.create_task(fleet.take(0, limits)) for _ in range(8)]
        await asyncio.sleep(0)

        late = await fleet.take(0, limits)

        assert isinstance(late, Reservation)
        assert late.is_local
        answered.set()
        await asyncio.gather(*trips)


async def test_what_is_told_while_a_message_fails_is_added_to_it() -> None:
    fleet = Fleet(1)
    budget = [limit(Measure.TOKENS_DAY, 1000)]
    limiter, link = fleet.processes[0], fleet.links[0]
    first, second = await fleet.take(0, budget), await fleet.take(0, budget)
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    send = link.post

    async def post(message: Post, *, surely: bool) -> None:
        second.end(ANSWERED)
        raise LedgerUnavailable("readonly", was_sent=False)

    link.post = post  # type: ignore[method-assign, assignment]
    first.end(ANSWERED)
    await limiter.tick()
    await until(lambda: limiter.is_local)
    link.post = send  # type: ignore[method-assign]
    fleet.clock.advance(2)
    await limiter.tick()

    assert not limiter.is_local
    assert fleet.server.ledger.used(budget[0], fleet.clock(), fleet.clock()) == 80


async def test_a_slot_whose_return_was_not_told_is_free_as_soon_as_the_ledger_is_back() -> None:
    fleet = Fleet(1)
    slots = [limit(Measure.PARALLEL, 1)]
    limiter, link = fleet.processes[0], fleet.links[0]
    taken = await fleet.take(0, slots)
    assert isinstance(taken, Reservation)
    fleet.clock.advance(6)  # so that holds are due to be renewed with the next message
    link.failure = LedgerUnavailable("timeout")
    taken.end(ANSWERED)
    await until(lambda: limiter.is_local)
    link.failure = None
    fleet.clock.advance(2)
    await limiter.tick()

    assert isinstance(await fleet.take(0, slots), Reservation)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)
