"""What several processes cost each request: CPU microseconds to tell the others, and to hear of one of theirs.

python -m tests.gateway.processes.bench_bus
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from gateway.processes.bus import Bus
from gateway.processes.messages import Batch
from gateway.processes.shared_router import SharedRouter
from router import BlockName, Decision, Outcome, Query, Router, RoutingSettings
from router.wire import ReplicaSpec

REQUESTS = 2000
BATCH = 8
"""Fewer than a queue of the kernel may hold."""
BLOCKS = 64
"""Of each prompt, all of them new."""


class Process:
    def __init__(self, folder: Path, number: int, others: range) -> None:
        self.bus = Bus(folder, number, hear=self._hear, what_is_open=list, open_numbers=list)
        self.router = SharedRouter(RoutingSettings(), self.bus.post, self.bus.post_now, self.bus.catch_up)
        self.router.set_processes(others, 0.0)
        self.bus.start()

    def _hear(self, batch: Batch) -> None:
        for message in batch.messages:
            self.router.hear(batch.process, message, time.monotonic())


def fill(router: Router) -> Router:
    for number in range(8):
        router.add(f"r{number}", ReplicaSpec(url="http://r", model="m", kind="openai"), 0.0)
        router.set_health(f"r{number}", True, 0.0)
    return router


async def work(router: Router, first_name: int, heard: list[Process]) -> tuple[float, float]:
    """CPU seconds a request: of who sends, of all who hear."""
    sending = hearing = 0.0
    for batch in range(0, REQUESTS, BATCH):
        queries = [
            Query("m", [BlockName(first_name + number * BLOCKS + block) for block in range(BLOCKS)], BLOCKS * 16)
            for number in range(batch, batch + BATCH)
        ]
        began = time.thread_time()  # a system call, and not a cheap one everywhere
        for number, query in enumerate(queries, batch):
            now = time.monotonic()
            decision = router.route(query, now, 0.5)
            assert isinstance(decision, Decision)
            reservation = router.begin(decision, query, f"req-{number:024x}", now)
            router.answered(reservation, now)
            router.finish(reservation, now, Outcome.OK, None)
        sent = time.thread_time()
        for process in heard:
            process.bus.catch_up()
        sending += sent - began
        hearing += time.thread_time() - sent
        await asyncio.sleep(0)
    return sending / REQUESTS, hearing / REQUESTS


async def main() -> None:
    alone, _ = await work(fill(Router(RoutingSettings())), 1 << 40, [])
    print(f"alone: {1e6 * alone:.0f} us a request to route, begin, answer and finish it, {BLOCKS} new blocks each")
    for count in (2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            processes = [Process(Path(folder), number, range(count + 1)) for number in range(count + 1)]
            for process in processes:
                fill(process.router)
                process.bus.set_peers(range(count + 1))
            await asyncio.sleep(0.05)
            told, heard = await work(processes[1].router, count << 48, processes[2:])
            for process in processes:
                process.bus.close()
        print(
            f"{count} processes: {1e6 * (told - alone):.0f} us more to tell {count - 1} others and the supervisor; "
            f"{1e6 * heard / (count - 1):.0f} us for each that hears of it"
        )


if __name__ == "__main__":
    asyncio.run(main())
