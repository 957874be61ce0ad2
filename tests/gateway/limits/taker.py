"""One process of several that share limits through a Redis: for each line it reads it asks for a limit as often as that says,
50 calls at once, and prints how often it was let through.

python -m tests.gateway.limits.taker URL        lines: MEASURE MOST CALLS AMOUNT
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time

from gateway.limits.leases import LeasingLimiter
from gateway.limits.ledger import Ledger, Limit, Measure
from gateway.limits.limiter import LocalLimiter
from gateway.limits.redis_ledger import RedisLedger
from gateway.limits.reservation import Reservation

AT_ONCE = 50


async def take(limiter: LeasingLimiter, limit: Limit, calls: int, amount: int) -> int:
    amounts = (amount, amount, 1, amount, amount)
    granted = 0
    for _ in range(calls // AT_ONCE):
        verdict = limiter.try_reserve([limit], amounts)
        if verdict is None:
            verdict = await limiter.reserve([limit], amounts)
        granted += isinstance(verdict, Reservation)
    return granted


async def main(url: str) -> None:
    limiter = LeasingLimiter(
        RedisLedger(url, deadline_s=20.0),  # a machine that is busy with other tests is no outage
        LocalLimiter(Ledger(math.inf), time.monotonic, time.time, share=4, is_fallback=True),
        time.monotonic,
        name=str(os.getpid()),
        processes=4,
    )
    await limiter.begin()
    running = asyncio.create_task(limiter.run())
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        measure, most, calls, amount = line.split()
        limit = Limit(f"key:a:{measure}:{most}", Measure[measure], int(most))
        granted = await asyncio.gather(*(take(limiter, limit, int(calls), int(amount)) for _ in range(AT_ONCE)))
        assert not limiter.is_local
        print(sum(granted), flush=True)
    running.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
