"""What the limits of a request cost: `python -m tests.gateway.bench_limits`. CPU microseconds, the best of several rounds."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable

from gateway.limits import (
    LeasingLimiter,
    Ledger,
    LedgerServer,
    LocalLimiter,
    Quota,
    RemoteLedger,
    Reservation,
    Rules,
    limit_headers,
)

ROUNDS = 7
REQUESTS = 20_000
QUOTA = Quota(requests_per_minute=1_000_000, tokens_per_minute=1 << 40, parallel_requests=1_000_000)
DAILY = Quota(
    requests_per_minute=1_000_000,
    tokens_per_minute=1 << 40,
    parallel_requests=1_000_000,
    tokens_per_day=1 << 50,
    usd_per_day=1e9,
)


def best_us(run: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(REQUESTS):
            run()
        times.append(time.process_time() - begun)
    return 1e6 * min(times) / REQUESTS


def local(quota: Quota, *, headers: bool = False) -> Callable[[], None]:
    """All that a request pays: who it is, the early look, the reservation and its settlement."""
    rules = Rules(tenants={"blue": quota}, models={"model": quota})
    limiter = LocalLimiter(Ledger(hold_s=math.inf), time.monotonic, time.time)

    def run() -> None:
        caller = rules.caller("key", quota, "blue")
        assert limiter.look(caller.early) is None
        verdict = limiter.try_reserve(rules.limits(caller, "model"), rules.amounts("model", 1000, 200))
        assert isinstance(verdict, Reservation)
        if headers:
            limit_headers(verdict.limits, verdict.left)
        verdict.end(rules.used("model", 1000, 500, 100))

    return run


def leased(quota: Quota) -> Callable[[], None]:
    """The same where the ledger is the supervisor's and every limit has a lease, renewed once a second."""
    rules = Rules(tenants={"blue": quota}, models={"model": quota})
    server = LedgerServer(Ledger(), time.monotonic, time.time)

    async def call(message: bytes) -> bytes:
        return server.handle("bench", message)

    def post(message: bytes) -> None:
        server.handle("bench", message)

    fallback = LocalLimiter(Ledger(math.inf), time.monotonic, time.time)
    limiter = LeasingLimiter(RemoteLedger(call, post), fallback, time.monotonic, name="bench", processes=4)
    loop = asyncio.new_event_loop()
    counted = itertools.count(1)

    def run() -> None:
        caller = rules.caller("key", quota, "blue")
        assert limiter.look(caller.early) is None
        limits, amounts = rules.limits(caller, "model"), rules.amounts("model", 1000, 200)
        verdict = limiter.try_reserve(limits, amounts)
        if verdict is None:
            verdict = loop.run_until_complete(limiter.reserve(limits, amounts))
        assert isinstance(verdict, Reservation)
        verdict.end(rules.used("model", 1000, 500, 100))
        if next(counted) % 5000 == 0:
            loop.run_until_complete(limiter.tick())

    return run


def main() -> None:
    print(f"key + tenant + model, RPM + TPM + parallel each: {best_us(local(QUOTA)):.1f} us a request")
    print(f"the same with the headers:                       {best_us(local(QUOTA, headers=True)):.1f} us")
    print(f"with both daily budgets too:                     {best_us(local(DAILY)):.1f} us")
    print(f"nine limits of leases:                           {best_us(leased(QUOTA)):.1f} us")


if __name__ == "__main__":
    main()
