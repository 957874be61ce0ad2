"""`warmpath bench soak`: a long run of everything at once, and whether anything is left of it.

Requests are streams and whole answers, small and large; some are wrong; replicas fail now and then, so the gateway tries again;
and a share of the clients leaves at any moment: before the request is sent whole, while it waits, in the middle of its answer.
Meanwhile the gateway's memory, descriptors, tasks, connections and promises are sampled. What must hold: memory is flat once it
is warm, and when the last client is gone, all the rest is back where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec
import uvloop
from rich.console import Console

from loadtest.compare import Machine, this_commit, this_machine
from loadtest.processes import SystemFailure
from loadtest.routers import Metrics, Router, start_ours, start_stubs, total, wait_answering
from loadtest.stub import MODEL

__all__ = ["Sample", "judge", "soak"]

_REPLICAS: Final = 4
_CHUNKS: Final = 6
_STUB: Final = ("--chunks", str(_CHUNKS), "--gap-ms", "3", "--fail", "0.01", "--cut", "0.01")
_SETTINGS: Final = {"WARMPATH_ROUTING__INDEX_BYTES": str(16 << 20)}
"""The index grows with every new text, and all are new here, to its bound, 1 GiB by default. So it is full when it is warm."""
_CONCURRENCY: Final = 32
_WARM_UP: Final = 0.25
"""Of the run: tables and pools grow to their sizes, the index fills."""
_MAX_SLOPE_MB: Final = 1.0
_SAMPLES: Final = 200
_SETTLE_S: Final = 30.0
"""After the last request: idle connections to replicas are kept for 4 s, and the sweeper comes as often."""
_ANSWER_S: Final = 60.0
_LONGEST_WAIT_S: Final = 0.03
"""Until a client that leaves does so: longer than the longest answer."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway at one moment."""

    requests: int
    """Begun so far."""
    rss_mb: float
    descriptors: int
    tasks: int
    clients: int
    """Connections of clients."""
    in_use: int
    """Connections to replicas with a request on them."""
    in_flight: int
    reserved: int
    """Requests that the router counts at replicas."""
    promised_tokens: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    rss_slope_mb: float
    """Growth over 10,000 requests, after the warm-up."""
    left: dict[str, int]
    """What there was more of at the end than before, by name. Empty is good."""
    flat: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    machine: Machine
    requests: int
    abort: float
    seed: int
    took_s: float
    aborted: int
    endings: dict[str, int]
    """Statuses of whole answers, `broken` for streams that ended with an error event, `lost` where the connection broke."""
    retries: int
    verdict: Verdict
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class _Call:
    head: bytes
    body: bytes
    leaves_after_s: float | None
    """None stays."""
    sends: int
    """Bytes of the body before it leaves or waits for the answer."""


class _Calls:
    """Draws what the next client does. Texts are cut out of one long one, since to write new ones would take longer."""

    def __init__(self, seed: int, abort: float, key: str) -> None:
        self._draw = random.Random(seed)
        self._abort = abort
        self._key = key
        letters = "abcdefghijklmnopqrstuvwxyz    "
        self._text = "".join(self._draw.choices(letters, k=2_000_000))

    def next(self) -> _Call:
        draw = self._draw
        size = 1_000 if draw.random() < 0.8 else 32_000
        at = draw.randrange(len(self._text) - size)
        chance = draw.random()
        model = "missing" if chance < 0.02 else MODEL
        messages = [{"role": "user", "content": self._text[at : at + size]}]
        body = msgspec.json.encode({"model": model, "messages": messages, "stream": draw.random() < 0.5})
        if 0.02 <= chance < 0.04:
            body = body[:-1]
        key = "wrong" if 0.04 <= chance < 0.05 else self._key
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        leaves = draw.uniform(0, _LONGEST_WAIT_S) if draw.random() < self._abort else None
        sends = draw.randrange(len(body)) if leaves is not None and draw.random() < 0.25 else len(body)
        return _Call(head.encode(), body, leaves, sends)


class _Client:
    """One caller after the other on connections that are kept, as an SDK keeps them."""

    def __init__(self, port: int, calls: _Calls, endings: Counter[str]) -> None:
        self._port = port
        self._calls = calls
        self._endings = endings
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.aborted = 0

    async def call(self) -> None:
        """Raises TimeoutError for an answer that takes too long, whoever's fault it is."""
        made = self._calls.next()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(made.head + made.body[: made.sends])
        try:
            async with asyncio.timeout(_ANSWER_S if made.leaves_after_s is None else made.leaves_after_s) as limit:
                ending, keeps = await _read_answer(reader)
        except TimeoutError:
            if made.leaves_after_s is None or not limit.expired():
                raise
            self.aborted += 1
            self.close()
        except (ConnectionError, asyncio.IncompleteReadError):
            self._endings["lost"] += 1
            self.close()
        else:
            self._endings[ending] += 1
            if not keeps or made.sends < len(made.body):
                self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def _read_answer(reader: asyncio.StreamReader) -> tuple[str, bool]:
    """How it ended, and whether the connection can be used again."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    keeps = b"\r\nconnection: close" not in head
    status = head[9:12].decode()
    _, has_length, rest = head.partition(b"\r\ncontent-length: ")
    if has_length:
        await reader.readexactly(int(rest.partition(b"\r\n")[0]))
        return status, keeps
    last = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        last = (await reader.readexactly(size + 2))[-64:]
    await reader.readexactly(2)
    return status if b"[DONE]" in last else "broken", keeps


def judge(start: Sample, samples: Sequence[Sample], end: Sample) -> Verdict:
    """`start`: before the first request, `end`: when everything that will go has gone. Pure."""
    warm = [each for each in samples if each.requests >= _WARM_UP * samples[-1].requests]
    slope = 10_000 * _slope([(each.requests, each.rss_mb) for each in warm])
    names = ("descriptors", "tasks", "clients", "in_use", "in_flight", "reserved", "promised_tokens")
    grown = {name: getattr(end, name) - getattr(start, name) for name in names}
    left = {name: more for name, more in grown.items() if more > 0}
    return Verdict(rss_slope_mb=slope, left=left, flat=slope < _MAX_SLOPE_MB and not left)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line with the least squares; 0.0 where there is none."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def _sample(seen: Mapping[str, float], requests: int) -> Sample:
    return Sample(
        requests=requests,
        rss_mb=seen["process_resident_memory_bytes"] / 1e6,
        descriptors=int(seen["process_open_fds"]),
        tasks=int(seen["warmpath_tasks"]),
        clients=int(seen["warmpath_client_connections"]),
        in_use=int(seen['warmpath_upstream_connections{state="in_use"}']),
        in_flight=int(seen["warmpath_requests_in_flight"]),
        reserved=int(total(seen, "warmpath_replica_inflight_requests")),
        promised_tokens=int(total(seen, "warmpath_replica_promised_tokens")),
    )


async def run(router: Router, requests: int, abort: float, seed: int, every: int) -> Result:
    """Send them all, and look at the gateway each `every` requests, before and after. Raises SystemFailure."""
    metrics = Metrics(router)
    calls, endings = _Calls(seed, abort, router.key), Counter[str]()
    clients = [_Client(router.port, calls, endings) for _ in range(_CONCURRENCY)]
    begun, samples = 0, list[Sample]()

    async def look() -> Sample:
        return _sample(await asyncio.to_thread(metrics.read), begun)

    async def one_after_the_other(client: _Client) -> None:
        nonlocal begun
        while begun < requests:
            begun += 1
            if begun % every == 0:
                samples.append(await look())
            await client.call()

    try:
        start = await _settled(look, None)
        began = time.monotonic()
        await asyncio.gather(*map(one_after_the_other, clients))
        took_s = time.monotonic() - began
        for client in clients:
            client.close()
        end = await _settled(look, start)
        retries = total(await asyncio.to_thread(metrics.read), "warmpath_retries_total")
    except (OSError, TimeoutError) as error:
        router.process.check()
        raise router.process.failure(f"did not answer: {error!r}") from error
    finally:
        for client in clients:
            client.close()
        metrics.close()
    return Result(
        commit=this_commit(),
        machine=this_machine(),
        requests=requests,
        abort=abort,
        seed=seed,
        took_s=took_s,
        aborted=sum(client.aborted for client in clients),
        endings=dict(endings),
        retries=int(retries),
        verdict=judge(start, samples, end),
        samples=[start, *samples, end],
    )


async def _settled(look: Callable[[], Awaitable[Sample]], start: Sample | None) -> Sample:
    """When nothing of requests is left, or has not gone in time; with `start`, until all is where it was then."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        await asyncio.sleep(1.0)
        seen = await look()
        done = not (seen.in_use or seen.in_flight) if start is None else not judge(start, [start], seen).left
        if done or time.monotonic() > deadline:
            return seen


@click.command(
    epilog="""\b
Examples:
  warmpath bench soak                                       # 200,000 requests, 20% aborted
  warmpath bench soak --requests 20000 --out soak.json      # fails unless memory is flat and nothing is left
"""
)
@click.option("--requests", type=click.IntRange(100, 100_000_000), default=200_000, show_default=True)
@click.option(
    "--abort", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="Share of clients that leave."
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--port", type=click.IntRange(1024, 65000), default=8900, show_default=True, help="The first of the ports."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here as JSON.")
def soak(*, requests: int, abort: float, seed: int, port: int, out: Path | None) -> None:
    """Send everything at once for long, and see whether anything is left of it."""
    console = Console(width=120)
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-soak-")))
            urls = start_stubs(stack, folder, port, _REPLICAS, [*_STUB, "--seed", str(seed)])
            router = start_ours(stack, folder, urls, port + 10, _SETTINGS)
            wait_answering(router)
            result = uvloop.run(run(router, requests, abort, seed, every=max(1, requests // _SAMPLES)))
    except SystemFailure as error:
        raise click.ClickException(str(error)) from error
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    verdict = result.verdict
    endings = ", ".join(f"{name}: {count:,}" for name, count in sorted(result.endings.items()))
    console.print(
        f"{requests:,} requests in {result.took_s:,.0f} s, {result.aborted:,} aborted, "
        f"{result.retries:,} tried again; {endings}"
    )
    console.print(f"memory {verdict.rss_slope_mb:+.2f} MB in 10,000 requests; left over: {verdict.left or 'nothing'}")
    if not verdict.flat:
        raise click.ClickException("not flat")
