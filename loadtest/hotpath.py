"""`warmpath bench gateway`: what a gateway costs per request and per relayed chunk, ours and other routers in one run.

Replicas are stubs (`loadtest.stub`), texts are never repeated, and ours runs as it is deployed: keys, a limit, metrics, traces
at the default ratio, an access log. `--bare` adds ours *unobserved*, without metrics, traces and log, which shows what those
cost, and *bare*, without keys and limits as well. CPU time is that of the router with all its children, by the scheduler's
account; routers take turns within each row, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.arms import Peer, parse_peer
from loadtest.compare import Machine, this_commit, this_machine
from loadtest.connection import Connections
from loadtest.peers import known_peers
from loadtest.processes import SystemFailure, running_process
from loadtest.routers import UNOBSERVED, Router, start_ours, start_stubs, wait_answering
from loadtest.stub import MODEL

__all__ = ["gateway"]

REPLICAS: Final = 4
CHUNKS: Final = 100
_WORDS: Final = 2000


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure."""

    name: str
    unit: str
    kilobytes: int
    concurrency: int
    requests: int
    stream: bool = False


ROWS: Final = (
    Row(name="CPU a request, 1 KB", unit="us", kilobytes=1, concurrency=32, requests=2000),
    Row(name="CPU a request, 32 KB", unit="us", kilobytes=32, concurrency=32, requests=800),
    Row(name="CPU a request, 256 KB", unit="us", kilobytes=256, concurrency=32, requests=160),
    Row(name="CPU a chunk, 64 streams", unit="us", kilobytes=1, concurrency=64, requests=128, stream=True),
    Row(name="added p50, 1 KB", unit="ms", kilobytes=1, concurrency=1, requests=400),
    Row(name="added p50, 32 KB", unit="ms", kilobytes=32, concurrency=1, requests=200),
    Row(name="added p50, 256 KB", unit="ms", kilobytes=256, concurrency=1, requests=60),
    Row(name="memory, 256 × 256 KB", unit="MB", kilobytes=256, concurrency=256, requests=512),
)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    router: str
    row: str
    unit: str
    median: float
    values: list[float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    machine: Machine
    rounds: int
    cells: list[Cell]


class _Texts:
    """Chats that nobody has seen before."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self._draw.choices(letters, k=self._draw.randint(2, 9))) for _ in range(_WORDS)]

    def payload(self, row: Row, key: str) -> bytes:
        size = row.kilobytes * 1000
        text = " ".join(self._draw.choices(self._words, k=size // 6))[:size]
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 64}
        data = msgspec.json.encode({**body, "stream": True} if row.stream else body)
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"{authorization}content-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


async def _drive(port: int, payloads: list[bytes], concurrency: int) -> list[float]:
    """Seconds that each took, in order of their ends; `concurrency` under way at any time."""
    connections = Connections(port)
    taken: list[float] = []

    async def one_after_the_other() -> None:
        while payloads:
            payload = payloads.pop()
            began = time.monotonic()
            exchange = await connections.ask(payload)
            taken.append(time.monotonic() - began)
            if exchange.status != 200:
                raise SystemFailure(f"the router on port {port} answered {exchange.status}: {exchange.tail[-300:]!r}")

    try:
        async with asyncio.timeout(300):
            await asyncio.gather(*[one_after_the_other() for _ in range(concurrency)])
    finally:
        connections.close()
    return taken


def measure(row: Row, router: Router, texts: _Texts, direct_port: int) -> float:
    warm = [texts.payload(row, router.key) for _ in range(min(row.concurrency, 32))]
    uvloop.run(_drive(router.port, warm, len(warm)))
    payloads = [texts.payload(row, router.key) for _ in range(row.requests)]
    if row.unit == "MB":
        router.forget_peak()
        uvloop.run(_drive(router.port, payloads, row.concurrency))
        return router.peak_mb()
    if row.unit == "ms":
        direct = [texts.payload(row, "") for _ in range(row.requests)]
        alone = statistics.median(uvloop.run(_drive(direct_port, direct, 1)))
        return 1000 * (statistics.median(uvloop.run(_drive(router.port, payloads, 1))) - alone)
    before = router.process.usage()
    uvloop.run(_drive(router.port, payloads, row.concurrency))
    cpu_s = (router.process.usage() - before).cpu_s
    return 1e6 * cpu_s / (row.requests * (CHUNKS if row.stream else 1))


@contextlib.contextmanager
def running_routers(peers: Sequence[Peer], port: int, *, bare: bool) -> Iterator[tuple[list[Router], int]]:
    """Ours and the peers over the same stubs, and a stub's own port."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        urls = start_stubs(stack, folder, port, REPLICAS, ["--chunks", str(CHUNKS)])
        routers = [start_ours(stack, folder, urls, port + 10)]
        if bare:
            routers.append(start_ours(stack, folder, urls, port + 12, UNOBSERVED, name="unobserved"))
            routers.append(_start_bare(stack, folder, urls, port + 14))
        for number, peer in enumerate(peers):
            place = port + 20 + 10 * number
            words = peer.command(place, place + 1, urls)
            process = stack.enter_context(running_process(words, folder / f"{number}.log"))
            routers.append(Router(peer.name, place, process))
        for router in routers:
            wait_answering(router)
        yield routers, port


def _start_bare(stack: contextlib.ExitStack, folder: Path, urls: Sequence[str], port: int) -> Router:
    command = [sys.executable, "-m", "gateway", "serve", "--open", "--port", str(port), "--admin-port", str(port + 1)]
    command += ["--replicas", ",".join(urls), "--state-dir", str(folder / "bare")]
    process = stack.enter_context(running_process(command, folder / "bare.log", UNOBSERVED))
    return Router("bare", port, process)


def table(cells: Sequence[Cell], routers: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    for name in routers:
        shown.add_column(name, justify="right")
    for row in ROWS:
        found = {cell.router: cell for cell in cells if cell.row == row.name}
        if found:
            values = [
                f"{found[name].median:,.2f}" if row.unit == "ms" else f"{found[name].median:,.0f}" for name in routers
            ]
            shown.add_row(f"{row.name}, {row.unit}", *values)
    return shown


def _peers(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> list[Peer]:
    try:
        return [parse_peer(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(
    epilog="""\b
Examples:
  warmpath bench gateway                                    # ours alone, a minute
  warmpath bench gateway --bare --rounds 9                  # what metrics, traces and log cost, and keys and limits
  warmpath bench gateway --peers ~/.cache/warmpath/peers --rounds 5 --out gateway.json
  warmpath bench gateway --peer 'nginx=nginx -c {port}.conf -g "# {workers}"' --rows '1 KB'
"""
)
@click.option(
    "--peers", type=click.Path(file_okay=False, path_type=Path), help="Where `make bench-peers` installs them."
)
@click.option("--peer", "more", multiple=True, callback=_peers, help="NAME=COMMAND with {port} and {workers}.")
@click.option(
    "--bare", is_flag=True, help="Also ours without metrics, traces and log, and without keys and limits as well."
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="The median is shown.")
@click.option("--rows", default="", help="Only rows whose name holds this.")
@click.option(
    "--scale",
    type=click.FloatRange(0.001, 100),
    default=1.0,
    show_default=True,
    help="Times the usual number of requests.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--port", type=click.IntRange(1024, 65000), default=8700, show_default=True, help="The first of the ports."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here as JSON.")
def gateway(
    *,
    peers: Path | None,
    more: list[Peer],
    bare: bool,
    rounds: int,
    rows: str,
    scale: float,
    seed: int,
    port: int,
    out: Path | None,
) -> None:
    """Measure what a gateway costs per request and per chunk."""
    chosen = [
        msgspec.structs.replace(row, requests=max(row.concurrency, round(scale * row.requests)))
        for row in ROWS
        if rows in row.name
    ]
    if not chosen:
        raise click.UsageError(f"no row is called {rows!r}; there are: {', '.join(row.name for row in ROWS)}")
    console = Console(width=120)
    texts = _Texts(seed * 1000 + os.getpid())  # routers remember texts, so another run has others
    known = [peer for peer in known_peers(peers) if ":" not in peer.name] if peers is not None else []
    values: dict[tuple[str, str], list[float]] = {}
    try:
        with running_routers([*known, *more], port, bare=bare) as (routers, direct_port):
            for number in range(rounds):
                for row in chosen:
                    console.print(f"[dim]round {number + 1} of {rounds}: {row.name}[/]")
                    for router in routers:
                        value = measure(row, router, texts, direct_port)
                        values.setdefault((router.name, row.name), []).append(value)
            names = [router.name for router in routers]
    except SystemFailure as error:
        raise click.ClickException(str(error)) from error
    units = {row.name: row.unit for row in chosen}
    cells = [
        Cell(router=router, row=row, unit=units[row], median=statistics.median(found), values=found)
        for (router, row), found in values.items()
    ]
    console.print(table(cells, names))
    if out is not None:
        report = Report(commit=this_commit(), machine=this_machine(), rounds=rounds, cells=cells)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
