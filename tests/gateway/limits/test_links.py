"""A ledger that is somewhere else keeps the promises of `test_ledger`, whichever it is; and both say the same."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.limits.ledger import Change, Granted, Limit, Measure, Refused
from gateway.limits.link import LedgerLink, Post
from gateway.limits.redis_ledger import counter_key
from tests.gateway.limits.ledgers import DAY_S, Clock, in_redis, supervised
from tests.redis_server import RedisServer

Found = tuple[LedgerLink, Clock]


def limit(measure: Measure, most: int, name: str = "key:a") -> Limit:
    return Limit(f"{name}:{measure.name.lower()}", measure, most)


async def take(link: LedgerLink, wanted: dict[Limit, int], holder: str = "p", extra: int = 0) -> Granted | Refused:
    return await link.acquire(holder, list(wanted), list(wanted.values()), [extra] * len(wanted))


async def used(link: LedgerLink, counted: Limit) -> int:
    """Asked without taking: more than all that is left is refused."""
    verdict = await link.acquire("observer", [counted], [counted.most + 1], [0])
    assert isinstance(verdict, Refused)
    return counted.most - verdict.left


async def test_a_window_admits_its_limit_and_says_when_to_come_back(ledger: Found) -> None:
    link, clock = ledger
    two = limit(Measure.REQUESTS, 2)
    assert isinstance(await take(link, {two: 1}), Granted)
    clock.advance(20.25)
    assert isinstance(await take(link, {two: 1}), Granted)
    clock.advance(9.75)

    refused = await take(link, {two: 1})

    assert refused == Refused(two, wait_s=30.5, reset_s=50.5, left=0)
    clock.advance(30.25)
    assert isinstance(await take(link, {two: 1}), Refused)
    clock.advance(0.25)
    assert isinstance(await take(link, {two: 1}), Granted)


async def test_refused_by_one_limit_takes_from_none(ledger: Found) -> None:
    link, _ = ledger
    many, few = limit(Measure.TOKENS, 1 << 40), limit(Measure.PARALLEL, 1)
    await take(link, {many: 1000, few: 1})

    refused = await take(link, {many: 1000, few: 1})

    assert isinstance(refused, Refused)
    assert refused.limit == few
    assert await used(link, many) == 1000


async def test_large_numbers_are_exact(ledger: Found) -> None:
    link, _ = ledger
    tokens = limit(Measure.TOKENS_DAY, 1 << 50)

    await take(link, {tokens: (1 << 50) - 3})

    assert isinstance(await take(link, {tokens: 4}), Refused)
    assert isinstance(await take(link, {tokens: 3}), Granted)


async def test_a_settlement_frees_what_was_not_used(ledger: Found) -> None:
    link, _ = ledger
    tokens, parallel, budget = limit(Measure.TOKENS, 100), limit(Measure.PARALLEL, 1), limit(Measure.USD_DAY, 100)
    verdict = await take(link, {tokens: 90, parallel: 1, budget: 90})
    assert isinstance(verdict, Granted)

    changes = [
        Change(tokens.counter, tokens.measure, spent=-60, bucket=verdict.bucket),
        Change(parallel.counter, parallel.measure, held=-1),
        Change(budget.counter, budget.measure, held=-90, spent=30),
    ]
    await link.post(Post("p", changes, [], []), surely=True)

    assert [await used(link, counted) for counted in (tokens, parallel, budget)] == [30, 0, 30]


async def test_what_a_silent_holder_held_is_free_after_its_time(ledger: Found) -> None:
    link, clock = ledger
    parallel = limit(Measure.PARALLEL, 3)
    await take(link, {parallel: 1}, holder="dead")
    await take(link, {parallel: 1}, holder="alive")
    clock.advance(10.0)
    await link.post(Post("alive", [], [Change(parallel.counter, parallel.measure, held=1)], []), surely=True)

    clock.advance(5.0)

    assert await used(link, parallel) == 1
    clock.advance(10.0)
    assert await used(link, parallel) == 0


async def test_a_process_that_comes_back_holds_under_its_new_name_only(ledger: Found) -> None:
    link, _ = ledger
    parallel = limit(Measure.PARALLEL, 9)
    await take(link, {parallel: 4}, holder="p.0")

    for _ in range(2):
        await link.post(Post("p.1", [], [Change(parallel.counter, parallel.measure, held=3)], ["p.0"]), surely=True)

    assert await used(link, parallel) == 3


async def test_a_day_ends_at_midnight(ledger: Found) -> None:
    link, clock = ledger
    budget = limit(Measure.TOKENS_DAY, 10)
    await take(link, {budget: 10})
    await link.post(Post("p", [Change(budget.counter, budget.measure, held=-10, spent=10)], [], []), surely=True)

    refused = await take(link, {budget: 1})

    assert isinstance(refused, Refused)
    assert refused.wait_s == DAY_S / 2
    clock.advance(DAY_S / 2)
    assert isinstance(await take(link, {budget: 1}), Granted)


async def test_a_clock_that_steps_back_locks_nobody_out_for_longer_than_a_window(server: RedisServer) -> None:
    requests, parallel = limit(Measure.REQUESTS, 3), limit(Measure.PARALLEL, 3)
    async with in_redis(server) as (link, clock):
        await take(link, {requests: 3, parallel: 3})

        clock.advance(-3600)

        refused = await take(link, {requests: 1})
        assert isinstance(refused, Refused)
        assert refused.wait_s is not None
        assert refused.wait_s <= 60.5
        assert await used(link, parallel) == 3
        clock.advance(60.5)
        assert isinstance(await take(link, {requests: 1, parallel: 3}), Granted)


async def test_redis_gets_no_names_and_forgets_by_itself(server: RedisServer) -> None:
    limits = [limit(measure, 9, "key:wp-abc") for measure in Measure]
    async with in_redis(server) as (link, _):
        await take(link, dict.fromkeys(limits, 1))

        keys = [key for key in server.call("KEYS", "*") if key != b"{warmpath/1}:now"]

        assert sorted(keys) == sorted(counter_key(counted.counter).encode() for counted in limits)
        for key in keys:
            assert 0 < server.call("TTL", key.decode()) <= 2 * DAY_S
            assert b"abc" not in b"".join([key, *server.call("HGETALL", key.decode())])


LIMITS = (
    limit(Measure.REQUESTS, 4),
    limit(Measure.TOKENS, 100),
    limit(Measure.PARALLEL, 3),
    limit(Measure.TOKENS_DAY, 400),
    limit(Measure.REQUESTS, 6, "tenant:t"),
)
holders = st.sampled_from(["a", "b"])
steps = st.one_of(
    st.tuples(st.just("wait"), st.one_of(st.integers(0, 8), st.integers(0, 300)).map(lambda quarters: quarters / 4)),
    st.tuples(
        st.just("take"),
        holders,
        st.lists(st.tuples(st.sampled_from(LIMITS), st.integers(0, 110), st.integers(0, 5)), min_size=1, max_size=4),
    ),
    st.tuples(
        st.just("post"),
        holders,
        st.lists(st.tuples(st.sampled_from(LIMITS), st.integers(-3, 0), st.integers(-20, 20)), max_size=3),
        st.lists(st.tuples(st.sampled_from(LIMITS[2:4]), st.integers(0, 3)), max_size=2),
        st.lists(holders, max_size=1),
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(steps, max_size=25))
def test_redis_decides_as_the_ledger_does(server: RedisServer, script: list[tuple[Any, ...]]) -> None:
    async def compare() -> None:
        async with in_redis(server) as (theirs, clock):
            our_clock = Clock()
            ours, _ = supervised(our_clock)
            buckets = [int(our_clock.now * 2)]
            for step in script:
                if step[0] == "wait":
                    clock.advance(step[1])
                    our_clock.advance(step[1])
                elif step[0] == "take":
                    wanted = {counted: (amount, extra) for counted, amount, extra in step[2]}
                    amounts, extras = zip(*wanted.values(), strict=True)
                    verdict = await theirs.acquire(step[1], list(wanted), amounts, extras)
                    assert verdict == await ours.acquire(step[1], list(wanted), amounts, extras), step
                    buckets.append(int(our_clock.now * 2))
                else:
                    _, holder, changed, held, dead = step
                    changes = [
                        Change(counted.counter, counted.measure, more, spent, buckets[-1])
                        for counted, more, spent in changed
                    ]
                    holds = [Change(counted.counter, counted.measure, held=amount) for counted, amount in held]
                    for link in (theirs, ours):
                        await link.post(Post(holder, changes, holds, dead), surely=True)
                for counted in LIMITS:
                    assert await used(theirs, counted) == await used(ours, counted), (step, counted)

    asyncio.run(compare())


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x91\xa3ask", b"\x92\xa4post\x01"])
def test_the_supervisor_takes_nothing_but_its_messages(message: bytes) -> None:
    _, server = supervised(Clock())

    with pytest.raises(msgspec.MsgspecError):
        server.handle("process", message)
