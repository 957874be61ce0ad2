"""`warmpath bench streams`: many streams open at once, each at the pace of somebody who reads along.

The stub numbers the chunks of each stream, so what is lost, doubled or out of order is seen. How late the gateway's event loop
is comes from the gateway itself, from a timer every 50 ms, as the difference of two scrapes: from outside, the load generator's
own lateness could not be told from it. CPU is the gateway's alone, by the scheduler's account.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, cast

import click
import msgspec
import uvloop
from rich.console import Console

from loadtest.compare import Machine, this_commit, this_machine
from loadtest.processes import SystemFailure
from loadtest.routers import Metrics, Router, start_ours, start_stubs, wait_answering
from loadtest.stub import MODEL

__all__ = ["Lag", "lag_between", "percentile_bound", "streams"]

_REPLICAS: Final = 4
_OPENED_S: Final = 0.002
"""Between two openings: five hundred new users a second."""
_PATIENCE_S: Final = 120.0
_NUMBER: Final = re.compile(rb'"content":" (\d+)"')
_LAG: Final = re.compile(r'warmpath_event_loop_lag_seconds_bucket\{le="([^"]+)"\}')


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """Of the gateway's event loop: upper bounds, by its histogram's buckets; None is above the largest."""

    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    samples: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    machine: Machine
    streams: int
    chunks_each: int
    gap_ms: float
    measured_s: float
    chunks: int
    """Relayed while it was measured: all streams were open."""
    chunks_per_s: float
    wanted_per_s: float
    complete: int
    lost: int
    """Chunks that did not come, of all."""
    disordered: int
    """That came twice, or not in their turn."""
    failed: int
    """Streams without a good end."""
    cpu_us_per_chunk: float
    cpu_share: float
    """Of one core."""
    lag: Lag


class Reader(asyncio.Protocol):
    """One stream, read with as little work as finds every number in it."""

    def __init__(self, request: bytes, chunks: int) -> None:
        self._request = request
        self._chunks = chunks
        self._tail = b""
        self._next = 0
        self.received = 0
        """In their turn."""
        self.disordered = 0
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        end = 0
        for found in _NUMBER.finditer(data):
            number = int(found[1])
            if number == self._next:
                self.received += 1
            else:
                self.disordered += 1
            self._next = number + 1
            end = found.end()
        self._tail = data[end:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._finish(b"data: [DONE]" in self._tail)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(False)

    def _finish(self, good: bool) -> None:
        if not self.ended.done():
            self.ended.set_result(good)
            self._transport.close()

    @property
    def lost(self) -> int:
        return max(0, self._chunks - self.received - self.disordered)


def percentile_bound(buckets: Mapping[float, float], share: float) -> float | None:
    """Of a cumulative histogram: the smallest bound that holds this share of the samples; None where only infinity does."""
    everything = buckets[float("inf")]
    bound = next(bound for bound in sorted(buckets) if buckets[bound] >= share * everything)
    return None if bound == float("inf") else bound


def lag_between(before: Mapping[str, float], after: Mapping[str, float]) -> Lag:
    buckets = {float(found[1]): after[name] - before[name] for name in after if (found := _LAG.fullmatch(name))}
    p50, p99, most = (percentile_bound(buckets, share) for share in (0.5, 0.99, 1.0))
    in_ms = [None if bound is None else 1000 * bound for bound in (p50, p99, most)]
    return Lag(p50_ms=in_ms[0], p99_ms=in_ms[1], max_ms=in_ms[2], samples=int(buckets[float("inf")]))


async def measure(router: Router, count: int, chunks: int, gap_s: float) -> Result:
    """Open all streams, measure while all of them run, and wait for their ends. Raises SystemFailure."""
    loop = asyncio.get_running_loop()
    metrics = Metrics(router)
    readers: list[Reader] = []
    try:
        for number in range(count):
            _, reader = await loop.create_connection(
                partial(Reader, _request(router, f"user {number} asks"), chunks), "127.0.0.1", router.port
            )
            readers.append(reader)
            await asyncio.sleep(_OPENED_S)
        deadline = time.monotonic() + _PATIENCE_S
        while not all(reader.received or reader.ended.done() for reader in readers):
            if time.monotonic() > deadline:
                raise SystemFailure("not all streams have begun in time")
            await asyncio.sleep(0.05)
        if all(reader.ended.done() for reader in readers):
            raise SystemFailure("all streams ended before the last one began")
        before, had, cpu, began = await _look(metrics, readers, router)
        shortest = max(reader.received for reader in readers)
        await asyncio.sleep(max(1.0, (chunks - shortest) * gap_s - 1.0))
        after, has, cpu_after, ended = await _look(metrics, readers, router)
        async with asyncio.timeout(_PATIENCE_S + 2 * chunks * gap_s):
            good = await asyncio.gather(*(reader.ended for reader in readers))
    finally:
        for reader in readers:
            reader._finish(False)
        metrics.close()
    took_s, relayed = ended - began, has - had
    return Result(
        commit=this_commit(),
        machine=this_machine(),
        streams=count,
        chunks_each=chunks,
        gap_ms=1000 * gap_s,
        measured_s=took_s,
        chunks=relayed,
        chunks_per_s=relayed / took_s,
        wanted_per_s=count / gap_s,
        complete=sum(good),
        lost=sum(reader.lost for reader in readers),
        disordered=sum(reader.disordered for reader in readers),
        failed=count - sum(good),
        cpu_us_per_chunk=1e6 * (cpu_after - cpu) / relayed,
        cpu_share=(cpu_after - cpu) / took_s,
        lag=lag_between(before, after),
    )


async def _look(metrics: Metrics, readers: list[Reader], router: Router) -> tuple[dict[str, float], int, float, float]:
    seen = await asyncio.to_thread(metrics.read)
    return seen, sum(reader.received for reader in readers), router.process.usage().cpu_s, time.monotonic()


def _request(router: Router, text: str) -> bytes:
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {router.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _told(result: Result) -> str:
    bounds = (result.lag.p50_ms, result.lag.p99_ms, result.lag.max_ms)
    lag = " / ".join("> 1000" if bound is None else f"{bound:g}" for bound in bounds)
    return (
        f"{result.complete} of {result.streams} streams complete, "
        f"{result.lost} chunks lost, {result.disordered} doubled or disordered\n"
        f"{result.chunks_per_s:,.0f} chunks a second of {result.wanted_per_s:,.0f}, "
        f"{result.cpu_us_per_chunk:.1f} us of CPU each, {100 * result.cpu_share:.0f}% of a core\n"
        f"event loop late by at most {lag} ms (p50, p99, all of {result.lag.samples})"
    )


@click.command(
    epilog="""\b
Examples:
  warmpath bench streams                                 # 2,000 at 10 chunks a second, half a minute
  warmpath bench streams --streams 500 --seconds 10 --out streams.json
"""
)
@click.option(
    "--streams", "count", type=click.IntRange(1, 20000), default=2000, show_default=True, help="Open at once."
)
@click.option(
    "--rate", type=click.FloatRange(0.1, 1000), default=10.0, show_default=True, help="Chunks a second, each."
)
@click.option(
    "--seconds", type=click.FloatRange(1, 3600), default=20.0, show_default=True, help="With all of them open."
)
@click.option(
    "--port", type=click.IntRange(1024, 65000), default=8800, show_default=True, help="The first of the ports."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here as JSON.")
def streams(*, count: int, rate: float, seconds: float, port: int, out: Path | None) -> None:
    """Hold many streams open at once: do all flow, and how late is the gateway's event loop?"""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Opening takes longer than planned on a busy machine, and the first stream must still run when the last one is open.
    chunks = round(rate * (seconds + 6 * count * _OPENED_S + 2))
    options = ["--chunks", str(chunks), "--gap-ms", str(1000 / rate)]
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-streams-")))
            urls = start_stubs(stack, folder, port, _REPLICAS, options)
            router = start_ours(stack, folder, urls, port + 10)
            wait_answering(router)
            result = uvloop.run(measure(router, count, chunks, 1 / rate))
    except (SystemFailure, OSError, TimeoutError) as error:
        raise click.ClickException(str(error) or type(error).__name__) from error
    Console(width=120).print(_told(result))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
