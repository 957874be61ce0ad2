"""`warmpath bench fleet`: the same load through each policy in turn, over a simulated fleet of replicas, and what came of it.

Every run has a fresh gateway and a fresh fleet, so no policy profits from what another one cached; runs of different policies
alternate, so that what else the machine does hits all of them. docs/routing.md tells how to read the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import click
import msgspec
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.openloop import Answer, answer_lags, send_all
from loadtest.summary import Run, median_run, summarize
from loadtest.system import MODEL, Knowledge, SystemFailure, running_system
from loadtest.workloads import WORKLOADS, Workload, make_workload

__all__ = ["fleet"]

POLICIES: Final = (
    "cost",
    "round_robin",
    "random",
    "least_load",
    "power_of_two",
    "consistent_hash",
    "prefix",
    "sticky_until_saturated",
)

_LAG_EVERY_S: Final = 0.05
_TIMEOUT_S: Final = 120.0
_WIDTH: Final = 150


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, so that it can be measured again."""

    workload: str
    load: float
    requests: int
    replicas: int
    speedup: float
    knowledge: str
    tokens_per_chunk: int
    kv_tokens: int
    seed: int
    runs: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    cpus: int
    system: str
    python: str
    load_average: float
    """Of the minute before: what others were doing."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    machine: Machine
    setup: Setup
    median: list[Run]
    all: list[Run]


def run_once(policy: str, workload: Workload, setup: Setup, port: int) -> Run:
    with running_system(
        policy,
        knowledge=cast(Knowledge, setup.knowledge),
        replicas=setup.replicas,
        speedup=setup.speedup,
        kv_tokens=setup.kv_tokens,
        tokens_per_chunk=setup.tokens_per_chunk,
        port=port,
    ) as system:
        gateway_s, fleet_s, began = system.gateway_cpu_s(), system.fleet_cpu_s(), time.monotonic()
        answers, lags = uvloop.run(_drive(workload, setup, system.port, system.replica_ports[0]))
        gateway_s, fleet_s = system.gateway_cpu_s() - gateway_s, system.fleet_cpu_s() - fleet_s
        elapsed_s = time.monotonic() - began
        computed = system.computed_tokens()
    return summarize(
        policy,
        workload.requests,
        answers,
        speedup=setup.speedup,
        computed_tokens=computed,
        gateway_cpu_s=gateway_s,
        fleet_cpu_s=fleet_s,
        elapsed_s=elapsed_s,
        fleet_lags_s=lags,
    )


async def _drive(workload: Workload, setup: Setup, port: int, replica_port: int) -> tuple[list[Answer], list[float]]:
    """The answers, and how long a replica took for nothing meanwhile."""
    lags: list[float] = []
    watching = asyncio.create_task(answer_lags(replica_port, "/health", _LAG_EVERY_S, lags))
    try:
        answers = await send_all(port, MODEL, workload.requests, setup.speedup, _TIMEOUT_S)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
            await watching
    return answers, lags


def table(setup: Setup, runs: Sequence[Run]) -> Table:
    title = f"{setup.workload} at {setup.load:g}×, {setup.replicas} replicas, {setup.knowledge}; simulated ms, p50 / p90 / p99"
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("policy", no_wrap=True)
    for name in ("hit of ideal", "TTFT", "TPOT", "end to end", "errors", "imbalance", "gateway CPU ms", "valid"):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        shown.add_row(
            run.policy,
            f"{run.hit_of_ideal:.3f}",
            *(
                f"{each.p50:,.0f} / {each.p90:,.0f} / {each.p99:,.0f}"
                for each in (run.ttft_ms, run.tpot_ms, run.e2e_ms)
            ),
            str(run.errors),
            f"{run.imbalance:.2f}",
            f"{run.gateway_cpu_ms:.2f}",
            run.invalid or "yes",
        )
    return shown


def _chosen(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    names = list(POLICIES) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(POLICIES)}")
    return names


@click.command(
    epilog="""\b
Examples:
  warmpath bench fleet                                           # our policy, the recorded trace, about a minute
  warmpath bench fleet --policies all --runs 3 --out results.json
  warmpath bench fleet --workload shared --policies cost,random --speedup 2
  warmpath bench fleet --knowledge plain --load 1.5
"""
)
@click.option("--workload", type=click.Choice(WORKLOADS), default="trace", show_default=True)
@click.option("--load", type=click.FloatRange(0.01, 10), default=1.0, show_default=True, help="Times the usual rate.")
@click.option("--policies", default="cost", show_default=True, callback=_chosen, help="Names, or 'all'.")
@click.option("--runs", type=click.IntRange(1, 20), default=1, show_default=True, help="Of each; the median is shown.")
@click.option("--replicas", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--speedup", type=click.FloatRange(0.1, 50), default=5.0, show_default=True, help="Of all time.")
@click.option(
    "--knowledge",
    type=click.Choice(["exact", "plain"]),
    default="exact",
    show_default=True,
    help="Replicas with events, or taken for foreign servers.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only so many requests.")
@click.option("--tokens-per-chunk", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--port", type=click.IntRange(1024, 65000), default=8600, show_default=True, help="The first of the ports."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here as JSON.")
def fleet(
    *,
    workload: str,
    load: float,
    policies: list[str],
    runs: int,
    replicas: int,
    speedup: float,
    knowledge: str,
    limit: int | None,
    tokens_per_chunk: int,
    seed: int,
    port: int,
    out: Path | None,
) -> None:
    """Compare routing policies over a simulated fleet."""
    console = Console(width=_WIDTH)
    work = make_workload(workload, load=load, seed=seed, limit=limit)
    setup = Setup(
        workload=workload,
        load=load,
        requests=len(work.requests),
        replicas=replicas,
        speedup=speedup,
        knowledge=knowledge,
        tokens_per_chunk=tokens_per_chunk,
        kv_tokens=work.kv_tokens,
        seed=seed,
        runs=runs,
    )
    machine = _machine()
    done: list[Run] = []
    for number in range(runs):
        for policy in policies:
            console.print(f"[dim]run {number + 1} of {runs}: {policy}[/]")
            try:
                done.append(run_once(policy, work, setup, port))
            except SystemFailure as error:
                raise click.ClickException(str(error)) from error
    median = [median_run([run for run in done if run.policy == policy]) for policy in policies]
    console.print(table(setup, median))
    if out is not None:
        report = Report(commit=_commit(), machine=machine, setup=setup, median=median, all=done)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if any(run.errors for run in done):
        sys.exit(1)


def _machine() -> Machine:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return Machine(
        cpu=names[0].partition(":")[2].strip() if names else platform.machine(),
        cpus=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load_average=round(os.getloadavg()[0], 2),
    )


def _commit() -> str:
    """Of the code that runs here; '' where that is no checkout."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip()


if __name__ == "__main__":
    fleet()
