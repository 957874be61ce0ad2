"""The ledger behind each of its links, on a clock that a test moves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import redis

from gateway.limits.ledger import Ledger
from gateway.limits.link import LedgerLink, LedgerServer, RemoteLedger
from gateway.limits.redis_ledger import RedisLedger, ledger_script
from tests.redis_server import RedisServer

DAY_S = 86_400
NOON = 20_000.0 * DAY_S + DAY_S / 2
_NOW = "{warmpath/1}:now"


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class RedisClock(Clock):
    """Of a script whose one function of time reads a key instead of the server's clock."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self._client = redis.Redis.from_url(server.url)
        self._set()

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self._set()

    def close(self) -> None:
        self._client.close()

    def _set(self) -> None:
        seconds = int(self.now // 1)
        self._client.hset(_NOW, mapping={"s": seconds, "us": round((self.now - seconds) * 1e6)})


def supervised(clock: Clock, hold_s: float = 15.0) -> tuple[LedgerLink, LedgerServer]:
    server = LedgerServer(Ledger(hold_s), clock, clock)

    async def call(message: bytes) -> bytes:
        return server.handle("process", message)

    def post(message: bytes) -> None:
        server.handle("process", message)

    return RemoteLedger(call, post), server


@contextlib.asynccontextmanager
async def in_redis(server: RedisServer) -> AsyncIterator[tuple[LedgerLink, RedisClock]]:
    """Empty. The server may be shared: what was in it is gone."""
    server.call("FLUSHALL")
    clock = RedisClock(server)
    script = ledger_script()
    moved = script.replace("redis.call('TIME')", f"redis.call('HMGET', '{_NOW}', 's', 'us')")
    assert moved.count("'us'") == 1
    link = RedisLedger(server.url, deadline_s=5.0, script=moved)
    try:
        yield link, clock
    finally:
        await link.aclose()
        clock.close()
