"""A real Redis that is silent, killed, read-only, full, busy, emptied or wrong; and four processes that share one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import uvloop

from gateway.limits.leases import LeasingLimiter
from gateway.limits.ledger import Change, Granted, Ledger, Limit, Measure, Refused
from gateway.limits.limiter import LocalLimiter
from gateway.limits.link import LedgerUnavailable, Post
from gateway.limits.redis_ledger import RedisLedger, counter_key
from gateway.limits.reservation import Reservation
from gateway.limits.rules import Amounts
from tests.gateway.stub import gateway, says, stub
from tests.redis_server import RedisServer, redis_server

ONE: Amounts = (1, 100, 1, 100, 0)
REQUESTS = Limit("key:a:requests", Measure.REQUESTS, 40)
PARALLEL = Limit("key:a:parallel", Measure.PARALLEL, 40)
LIMITS = [REQUESTS, PARALLEL]


@pytest.fixture
def fresh() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Watched:
    """A limiter over Redis, with what it told."""

    def __init__(self, url: str, processes: int = 4) -> None:
        self.modes: list[bool] = []
        self.errors: list[str] = []
        self.link = RedisLedger(url, deadline_s=0.5)  # ten times the default: a machine busy with tests is no outage
        self.limiter = LeasingLimiter(
            self.link,
            LocalLimiter(Ledger(math.inf), time.monotonic, time.time, share=processes, is_fallback=True),
            time.monotonic,
            name="test",
            processes=processes,
            on_mode=self.modes.append,
            on_error=self.errors.append,
        )

    async def take(self) -> Reservation | Refused:
        verdict = self.limiter.try_reserve(LIMITS, ONE)
        return verdict if verdict is not None else await self.limiter.reserve(LIMITS, ONE)

    async def until(self, is_local: bool) -> None:
        async with asyncio.timeout(30):
            while self.limiter.is_local is not is_local:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watched(server: RedisServer) -> AsyncIterator[Watched]:
    found = Watched(server.url)
    running = asyncio.create_task(found.limiter.run())
    try:
        yield found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await found.limiter.aclose()


def spin(server: RedisServer) -> None:
    """A script of somebody else's that does not end: who asks is told BUSY."""
    server.call("CONFIG", "SET", "lua-time-limit", "1")

    def run() -> None:
        with contextlib.suppress(redis.RedisError):
            server.call("EVAL", "while true do end", 0)

    threading.Thread(target=run).start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            server.call("PING")
        except redis.ResponseError:
            return
    raise AssertionError("the script did not run")


@dataclass(frozen=True)
class Fault:
    begin: Callable[[RedisServer], object]
    end: Callable[[RedisServer], object]
    kind: str


FAULTS = {
    "silent": Fault(RedisServer.pause, RedisServer.resume, "timeout"),
    "killed": Fault(RedisServer.kill, RedisServer.start, "connection"),
    "read-only": Fault(
        lambda server: server.call("REPLICAOF", "127.0.0.1", 1),
        lambda server: server.call("REPLICAOF", "NO", "ONE"),
        "readonly",
    ),
    "full": Fault(
        lambda server: server.call("CONFIG", "SET", "maxmemory", 1),
        lambda server: server.call("CONFIG", "SET", "maxmemory", 0),
        "oom",
    ),
    "busy": Fault(spin, lambda server: server.call("SCRIPT", "KILL"), "busy"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_without_redis_a_process_has_its_share_and_comes_back(fresh: RedisServer, name: str) -> None:
    fault = FAULTS[name]
    async with watched(fresh) as found:
        before = await found.take()
        assert isinstance(before, Reservation)
        assert not before.is_local
        await asyncio.to_thread(fault.begin, fresh)

        first = await found.take()
        others = [await found.take() for _ in range(14)]

        admitted = [verdict for verdict in (first, *others) if isinstance(verdict, Reservation)]
        assert len(admitted) == 10
        assert all(verdict.is_local for verdict in admitted)
        assert found.errors[0] == fault.kind
        assert found.modes[0] is True
        await asyncio.to_thread(fault.end, fresh)
        await found.until(is_local=False)
        found.errors.clear()

        after = await found.take()
        assert isinstance(after, Reservation)
        assert not after.is_local
        for reservation in (before, after, *admitted):
            reservation.end((1, 40, 0, 40, 0))
        await found.limiter.tick()
        assert await held(found) == 0


async def held(found: Watched) -> int:
    verdict = await found.link.acquire("observer", [PARALLEL], [PARALLEL.most + 1], [0])
    assert isinstance(verdict, Refused)
    return PARALLEL.most - verdict.left


ODD = {
    "a string": ("SET", "x"),
    "a list": ("RPUSH", "x"),
    "words for numbers": ("HSET", "u", "many", "o", "1", "n", "1"),
    "a bucket of words": ("HSET", "u", "1", "o", "99999999999", "n", "99999999999", "99999999999", "x"),
    "half of it": ("HSET", "u", "5"),
}


@pytest.mark.parametrize("name", ODD)
async def test_what_is_no_counter_is_replaced_and_disturbs_no_other(server: RedisServer, name: str) -> None:
    command, *rest = ODD[name]
    key = counter_key(REQUESTS.counter)
    server.call("FLUSHALL")
    async with watched(server) as found:
        other = await found.link.acquire("other", [PARALLEL], [7], [0])
        assert isinstance(other, Granted)
        server.call(command, key, *rest)

        verdict = await found.take()

        assert isinstance(verdict, Reservation)
        assert not verdict.is_local
        assert found.errors == []
        assert verdict.left == [39, 32]
        assert server.call("TYPE", key) == b"hash"


def test_a_loop_that_is_slow_all_the_time_finds_its_answers(server: RedisServer) -> None:
    async def work() -> None:
        while True:
            time.sleep(0.015)  # noqa: ASYNC251 - what is tested
            await asyncio.sleep(0)

    async def ask() -> Granted | Refused:
        link = RedisLedger(server.url, deadline_s=0.005)
        working = asyncio.create_task(work())
        try:
            return await link.acquire("a", [REQUESTS], [1], [0])
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await link.aclose()

    server.call("FLUSHALL")
    assert isinstance(uvloop.run(ask()), Granted)


class _FailsAtTheSecond(RedisLedger):
    sent = 0

    async def _run(self, keys: list[str], arguments: list[str | int | float]) -> object:
        self.sent += 1
        if self.sent == 2:
            raise LedgerUnavailable("readonly", was_sent=False)
        return [1]


async def test_a_message_of_which_a_part_was_done_is_not_sent_again() -> None:
    link = _FailsAtTheSecond("redis://127.0.0.1:1")
    changes = [Change(f"key:{number}:tokens", Measure.TOKENS, 0, -1, 1) for number in range(300)]

    with pytest.raises(LedgerUnavailable) as told:
        await link.post(Post("a", changes, [], []), surely=False)

    assert told.value.was_sent


async def test_a_redis_that_forgot_its_scripts_is_told_again(server: RedisServer) -> None:
    async with watched(server) as found:
        await found.take()
        server.call("SCRIPT", "FLUSH")

        verdict = await found.take()

        assert isinstance(verdict, Reservation)
        assert not verdict.is_local
        assert found.errors == []


async def test_after_a_failover_without_data_what_runs_is_held_again(fresh: RedisServer) -> None:
    async with watched(fresh) as found:
        running = [await found.take() for _ in range(3)]
        assert all(isinstance(verdict, Reservation) for verdict in running)
        await asyncio.to_thread(fresh.kill)
        await found.take()
        await asyncio.to_thread(fresh.start)
        await found.until(is_local=False)

        assert await held(found) == 3


async def test_a_client_of_a_gateway_whose_redis_is_lost_sees_a_header_and_nothing_else(
    fresh: RedisServer, tmp_path: Path
) -> None:
    settings = {
        "redis": {"url": fresh.url, "deadline_s": 0.5},
        "limits": {"requests_per_minute": 100, "parallel_requests": 1},
    }
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, **settings) as running:
        assert "x-warmpath-limits" not in (await running.chat()).headers
        await asyncio.to_thread(fresh.kill)

        lost = [await running.chat() for _ in range(5)]

        assert [answer.status_code for answer in lost] == [200] * 5
        assert [answer.headers["x-warmpath-limits"] for answer in lost] == ["local"] * 5
        metrics = (await running.admin.get("/metrics")).text
        assert 'warmpath_limiter_mode{mode="local"} 1.0' in metrics
        assert 'warmpath_limiter_errors_total{kind="connection"}' in metrics
        await asyncio.to_thread(fresh.start)
        async with asyncio.timeout(30):
            while "x-warmpath-limits" in (await running.chat()).headers:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


# --- four processes


class Takers:
    """Four processes that ask for a limit, all at once and as often as told."""

    def __init__(self, server: RedisServer) -> None:
        command = [sys.executable, "-m", "tests.gateway.limits.taker", server.url]
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
        ]
        self._read()

    def take(self, measure: Measure, most: int, calls: int, amount: int = 1) -> int:
        """How often they were let through."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{measure.name} {most} {calls} {amount}\n")
            process.stdin.flush()
        return sum(int(line) for line in self._read())

    def _read(self) -> list[str]:
        return [process.stdout.readline() for process in self.processes if process.stdout is not None]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def test_four_processes_admit_a_limit_exactly_or_nearly_and_never_more(fresh: RedisServer) -> None:
    takers = Takers(fresh)
    try:
        small = takers.take(Measure.REQUESTS, most=60, calls=50)
        large = takers.take(Measure.REQUESTS, most=2000, calls=750)
        tokens = takers.take(Measure.TOKENS, most=100_500, calls=50, amount=1000)
    finally:
        takers.kill()

    assert small == 60
    assert 0.95 * 2000 <= large <= 2000
    assert 95 <= tokens <= 100


@pytest.mark.parametrize(
    "answer",
    [b":abc\r\n", b"+OK\r\n", b"*1\r\n:1\r\n", b"*-5\r\n", b"$-1\r\n", b"*5\r\n:0\r\n:9\r\n:1\r\n:1\r\n:1\r\n"],
)
async def test_what_is_no_redis_is_a_ledger_that_is_away(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while await reader.read(4096):
                writer.write(answer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = Watched(f"redis://127.0.0.1:{port}", processes=1)

        verdict = await found.take()

        assert isinstance(verdict, Reservation)
        assert verdict.is_local
        assert found.errors == ["other"]
        verdict.end_failed()
        await found.limiter.aclose()
