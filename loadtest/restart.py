"""`warmpath bench restart`: a gateway is killed in the middle of its work and started again, in front of full caches.

Replicas are filled through the gateway with talks, each another text, until each holds so many blocks. Then talks are continued
at a steady rate, each of them once: where a talk's past lies can be known only from what replicas tell, not be learned from
the requests before. In the middle the gateway is killed and started at once on the same port. Its replicas register again. Each
leaves one event out, as if it had forgotten the oldest, so the gateway takes a snapshot of each, while requests come as before.

What must hold: within two seconds of the first request that it accepts, talks find their past as often as before, and nothing
holds its event loop longer than 20 ms. Holds are the computing of its thread between two turns of a timer (`loadtest.holds`);
other work on the machine is not in them, as it is in the gateway's own metric of lateness, which stands beside. The two seconds
are by the clock: on a machine without a core for the gateway they tell of that, and the result says how much.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import httpx
import msgspec
import uvloop
from rich.console import Console

from loadtest.arms import Ours
from loadtest.compare import Machine, this_commit, this_machine
from loadtest.connection import Connections, Lost
from loadtest.holds import longest_ms, read_holds
from loadtest.openloop import encode_request, send_all
from loadtest.probe import scrape
from loadtest.processes import Process, SystemFailure, Usage
from loadtest.recovery import Recovery, judge_recovery
from loadtest.routers import Metrics, Router, total
from loadtest.streams import Lag, lag_between
from loadtest.summary import MOST_STARVED
from loadtest.system import MODEL, FleetShape, System, running_system
from loadtest.workloads import BLOCK_TOKENS, Request, make_text

__all__ = ["HELD_MS", "restart"]

_BACK_WITHIN_S: Final = 2.0
HELD_MS: Final = 20.0

_ROOM: Final = 1.25
"""Each replica has more than it is filled with, so that nothing of a talk is dropped."""
_FILL_AT_ONCE: Final = 2
"""Talks for each replica."""
_MOST_EXTRA: Final = 1.15
"""Of the talks that would fill all replicas if they fell evenly."""
_QUESTION_TOKENS: Final = 48
_ANSWER_TOKENS: Final = 4
_FILL_S: Final = 600.0
_LOOK_S: Final = 0.1
_LEAD_S: Final = 0.1
_TIMEOUT_S: Final = 30.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    machine: Machine
    seed: int
    replicas: int
    blocks_least: int
    """That a replica held when the gateway was killed,"""
    blocks_most: int
    requests_per_s: float
    speedup: float
    recovery: Recovery
    held_ms: float
    """The longest that the restarted gateway computed without a turn for others, since its first answer; 0.0: less than 5."""
    held_before_ms: float
    """The same of the one before it, under the same load."""
    holds: list[tuple[float, float]]
    """(seconds after the kill, milliseconds) of each hold, those before the first answer included: nobody was served then."""
    snapshots: int
    """That the restarted gateway took."""
    starved_share: float
    """Of the time from the kill until it was back, the gateway had work and no core."""
    cpu_s: float
    """That it used in that time, its start included."""
    lag: Lag
    """By the clock, of the restarted one."""
    rss_before_mb: float
    rss_after_mb: float

    @property
    def late_by_others(self) -> bool:
        """Whether its seconds tell of the machine and not of the gateway."""
        return self.starved_share > MOST_STARVED

    @property
    def is_good(self) -> bool:
        back_s = self.recovery.back_s
        in_time = back_s is not None and (back_s <= _BACK_WITHIN_S or self.late_by_others)
        return in_time and self.held_ms <= HELD_MS


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one run; real seconds."""

    replicas: int
    processes: int
    blocks: int
    """That each replica is filled with, at least."""
    talk_blocks: int
    rate: float
    before_s: float
    after_s: float
    speedup: float
    seed: int
    replay: bool
    """Whether replicas still have all their events."""

    @property
    def talk_tokens(self) -> int:
        return self.talk_blocks * BLOCK_TOKENS

    @property
    def least_talks(self) -> int:
        return self.replicas * math.ceil(self.blocks / self.talk_blocks)

    @property
    def requests(self) -> int:
        return round(self.rate * (self.before_s + self.after_s))

    def shape(self) -> FleetShape:
        return FleetShape(
            replicas=self.replicas,
            processes=min(self.processes, self.replicas),
            speedup=self.speedup,
            kv_tokens=round(self.blocks * _ROOM) * BLOCK_TOKENS,
            tokens_per_chunk=_ANSWER_TOKENS,
        )


# --- one run


async def _fill(system: System, plan: Plan, draw: random.Random) -> tuple[list[str], list[int]]:
    """All talks that were begun, and the blocks that each replica holds. Raises SystemFailure."""
    talks: list[str] = []
    while True:
        blocks = [sample.computed_tokens // BLOCK_TOKENS for sample in await scrape(system.replica_ports, 0.0)]
        if min(blocks) >= plan.blocks:
            return talks, blocks
        if len(talks) > plan.least_talks * _MOST_EXTRA:
            raise SystemFailure(f"the replicas cannot be filled evenly: they hold {blocks} blocks")
        lacking = sum(max(plan.blocks - each, 0) for each in blocks)
        new = [make_text(draw, plan.talk_tokens) for _ in range(math.ceil(lacking / plan.talk_blocks))]
        await _begin(system, plan, new)
        talks += new


async def _begin(system: System, plan: Plan, talks: Sequence[str]) -> None:
    """Each as soon as there is a place for it."""
    waiting = iter(talks)
    connections = Connections(system.ports[0])

    async def one_after_the_other() -> None:
        for talk in waiting:
            answer = await connections.ask(encode_request(MODEL, Request(0.0, talk, 1)))
            if answer.status != 200:
                raise SystemFailure(f"a replica could not be filled: {answer.status}")

    try:
        async with asyncio.timeout(_FILL_S):
            await asyncio.gather(*(one_after_the_other() for _ in range(plan.replicas * _FILL_AT_ONCE)))
    finally:
        connections.close()


async def _run(system: System, plan: Plan, holds: Path) -> Result:
    """Raises SystemFailure, OSError."""
    draw = random.Random(plan.seed)
    talks, blocks = await _fill(system, plan, draw)
    asked = draw.sample(talks, plan.requests)
    requests = [
        Request(number / plan.rate, talk + make_text(draw, _QUESTION_TOKENS), _ANSWER_TOKENS)
        for number, talk in enumerate(asked)
    ]
    (gateway,) = system.routers
    start = time.monotonic() + _LEAD_S
    sending = asyncio.create_task(send_all(system.ports, MODEL, requests, 1.0, _TIMEOUT_S, start))
    await asyncio.sleep(start + plan.before_s - time.monotonic())
    rss_before_mb = gateway.memory_mb()
    killed_at = time.monotonic()
    gateway.kill()
    if not plan.replay:
        await _lose_an_event(system)
    gateway.start_again()
    looks: list[tuple[float, Usage]] = []
    watching = asyncio.create_task(_watch_usage(gateway, killed_at, looks))
    try:
        answers = await sending
    finally:
        watching.cancel()
    system.check()
    recovery = judge_recovery(requests, answers, plan.talk_tokens, killed_at - start)
    until_s = recovery.until_s or plan.after_s
    used = _used_until(until_s, looks)
    found, seen = read_holds(holds), await asyncio.to_thread(_metrics, system)
    return Result(
        commit=this_commit(),
        machine=this_machine(),
        seed=plan.seed,
        replicas=plan.replicas,
        blocks_least=min(blocks),
        blocks_most=max(blocks),
        requests_per_s=plan.rate,
        speedup=plan.speedup,
        recovery=recovery,
        held_ms=longest_ms(found, killed_at + (recovery.served_s or 0.0)),
        held_before_ms=longest_ms([hold for hold in found if hold[0] < killed_at], start),
        holds=[(round(at - killed_at, 3), ms) for at, ms in found if at > killed_at],
        snapshots=int(total(seen, "warmpath_replica_event_snapshots_total")),
        starved_share=round(used.waited_s / until_s, 3),
        cpu_s=round(used.cpu_s, 3),
        lag=lag_between(dict.fromkeys(seen, 0.0), seen),
        rss_before_mb=round(rss_before_mb, 1),
        rss_after_mb=round(gateway.memory_mb(), 1),
    )


async def _lose_an_event(system: System) -> None:
    """The next stream of each replica lacks its first batch. Raises SystemFailure."""
    headers = {"authorization": f"Bearer {system.credential}"}
    async with httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S, trust_env=False) as http:
        for port in system.replica_ports:
            answer = await http.put(f"http://127.0.0.1:{port}/simulate/faults", json={"faults": ["drop-events:1"]})
            if not answer.is_success:
                raise SystemFailure(f"a replica cannot be made to lose an event: {answer.status_code}")


async def _watch_usage(gateway: Process, began: float, found: list[tuple[float, Usage]]) -> None:
    """Until cancelled: what it has used so far, with the seconds since `began`."""
    while True:
        found.append((time.monotonic() - began, gateway.usage()))
        await asyncio.sleep(_LOOK_S)


def _used_until(until_s: float, found: Sequence[tuple[float, Usage]]) -> Usage:
    return next((usage for at_s, usage in found if at_s >= until_s), found[-1][1])


def _metrics(system: System) -> dict[str, float]:
    (port,), (gateway,) = system.ports, system.routers
    with contextlib.closing(Metrics(Router("ours", port, gateway, "", port + 1, system.admin_key))) as metrics:
        return metrics.read()


def _told(result: Result) -> str:
    recovery = result.recovery
    back = "never" if recovery.back_s is None else f"within {recovery.back_s:g} s"
    down = "not" if recovery.down_s is None else f"after {recovery.down_s:.1f} s"
    rates = " ".join(f"{window.hit_of_ideal:.2f}" for window in recovery.windows[:8])
    late = result.lag.max_ms
    return (
        f"{result.replicas} replicas with {result.blocks_least:,} to {result.blocks_most:,} blocks, "
        f"{result.requests_per_s:g} requests a second\n"
        f"killed, up again {down}: {recovery.cut} requests cut, {recovery.refused} refused, {recovery.failed} failed later\n"
        f"hit rate {recovery.hit_of_ideal_before:.3f} of the ideal before, back {back} of the first accepted request "
        f"(by half seconds: {rates} …), {result.snapshots} snapshots, "
        f"{result.cpu_s:.1f} s of CPU with the start, no core for {result.starved_share:.0%} of the time"
        f"{', so the seconds are no verdict' if result.late_by_others else ''}\n"
        f"loop held for {result.held_ms:.1f} ms of computing at most ({result.held_before_ms:.1f} before the kill), "
        f"late by at most {'more than 1000' if late is None else f'{late:g}'} ms by the clock\n"
        f"memory {result.rss_before_mb:.0f} MB before, {result.rss_after_mb:.0f} MB after"
    )


@click.command(
    epilog="""\b
Examples:
  warmpath bench restart                                    # 8 replicas of 65,000 blocks, about a minute
  warmpath bench restart --blocks 10000 --out restart.json  # fails unless it is back in 2 s and held for at most 20 ms
"""
)
@click.option("--replicas", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--processes", type=click.IntRange(1, 64), default=4, show_default=True, help="That the replicas share.")
@click.option("--blocks", type=click.IntRange(100, 100_000), default=65_000, show_default=True, help="Of each replica.")
@click.option(
    "--talk-blocks", type=click.IntRange(1, 4000), default=250, show_default=True, help="Of each talk, 16 tokens each."
)
@click.option("--rate", type=click.FloatRange(1, 1000), default=40.0, show_default=True, help="Requests a second.")
@click.option("--before-s", type=click.FloatRange(1, 600), default=5.0, show_default=True, help="Load before the kill,")
@click.option("--after-s", type=click.FloatRange(3, 600), default=15.0, show_default=True, help="and from then on.")
@click.option("--speedup", type=click.FloatRange(0.1, 100), default=20.0, show_default=True, help="Of the replicas.")
@click.option("--replay", is_flag=True, help="Replicas still have all their events: no snapshots.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--port", type=click.IntRange(1024, 65000), default=8700, show_default=True, help="The first of the ports."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here as JSON.")
def restart(
    *,
    replicas: int,
    processes: int,
    blocks: int,
    talk_blocks: int,
    rate: float,
    before_s: float,
    after_s: float,
    speedup: float,
    replay: bool,
    seed: int,
    port: int,
    out: Path | None,
) -> None:
    """Kill the gateway in front of full caches, and see how soon it knows them again."""
    plan = Plan(replicas, processes, blocks, talk_blocks, rate, before_s, after_s, speedup, seed, replay)
    if plan.requests > plan.least_talks:
        raise click.UsageError(f"{plan.requests} requests need as many talks; {plan.least_talks} fill the replicas")
    console = Console(width=120)
    try:
        with tempfile.TemporaryDirectory(prefix="warmpath-restart-") as folder:
            holds = Path(folder) / "holds"
            with running_system(Ours("cost"), plan.shape(), port, holds=holds) as system:
                result = uvloop.run(_run(system, plan, holds))
    except (SystemFailure, OSError, Lost) as error:
        raise click.ClickException(str(error) or type(error).__name__) from error
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    console.print(_told(result), highlight=False)
    if not result.is_good:
        sys.exit(1)
