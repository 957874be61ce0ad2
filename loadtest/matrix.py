"""`warmpath bench matrix`: every load of the comparison, ours in both modes and every peer that is installed, within a time.

It writes one JSON file for each load as soon as that is done, plots, and the tables of `loadtest.report`. What it will do, and
how long that takes, it says first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from loadtest.arms import Arm, Ours, Peer
from loadtest.compare import ORDERS, Report, Setup, compare, write_report
from loadtest.fleet import WIDTH, order_option, show
from loadtest.peers import BEST, PACKAGES, PINNED, known_peers
from loadtest.plots import draw_plots, require_matplotlib
from loadtest.processes import SystemFailure
from loadtest.report import markdown
from loadtest.summary import Limits
from loadtest.system import Order
from loadtest.targets import OURS, TARGETS, cell_name
from loadtest.workloads import SHARED_RATES, Workload, make_workload

__all__ = ["Cell", "Plan", "compared_arms", "make_plan", "matrix"]

_START_S: Final = 6.0
"""Of a router and its fleet, and their end."""
_MOST_RUNS: Final = 3
_SETTLED: Final = 0.995
"""Part of the answers, at least, when none of the others can change a percentile (`loadtest.openloop.is_settled`)."""
_TOKEN_S: Final = 0.06
"""How long a token of the last answers takes, simulated."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One load."""

    workload: str
    load: float
    speedup: float
    """The most that two cores keep up with, a third of them left: a request takes 11 ms of CPU in all with shared prefixes
    and 41 in the trace, on a busy machine.
    """

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.load:g}x" if self.workload == "trace" else self.workload

    @property
    def to_the_end(self) -> bool:
        """Half of a run of the trace is to wait for the last hundredth of its answers, eight times as long as the usual one."""
        return self.workload != "trace"

    @property
    def target_name(self) -> str:
        """Of `loadtest.targets`."""
        return cell_name(self.workload, self.load)

    def make(self, seed: int) -> Workload:
        return make_workload(self.workload, load=self.load, seed=seed, rates=SHARED_RATES)


CELLS: Final = (
    Cell("shared", 1.0, speedup=1.5),
    Cell("chats", 1.0, speedup=5.0),
    Cell("trace", 1.0, speedup=1.5),
    Cell("trace", 1.5, speedup=2.0),
    Cell("trace", 2.0, speedup=2.0),
)

_ESSENTIAL: Final = (Ours("cost"), Ours("cost", "plain"), Ours("random"), Ours("consistent_hash"))
_COMPARED: Final = tuple(
    Ours(policy) for policy in ("round_robin", "least_load", "power_of_two", "prefix", "sticky_until_saturated")
)
"""Our other policies: they explain, the targets do not need them."""


@dataclass(frozen=True, slots=True)
class Plan:
    arms: tuple[tuple[Arm, ...], ...]
    """Of each load."""
    runs: int
    seconds: float


def compared_arms(target_cell: str, peers: Sequence[Arm]) -> tuple[Arm, ...]:
    """Those that the targets of a load hold against each other: ours in both modes, each peer as it is best, and what one of
    the targets names besides.
    """
    names = {*OURS.values(), *BEST}
    for target in TARGETS:
        if target.cell == target_cell:
            names.update({"pinning": PINNED, "random": ("random",)}.get(target.against, ()))
    return tuple(arm for arm in (*_ESSENTIAL, *peers) if arm.name in names)


def make_plan(lengths_s: Sequence[float], peers: Sequence[Arm], budget_s: float) -> Plan | None:
    """The most that fits: 3 runs of all or fewer, and before one run less, without our other policies. None: nothing fits.

    `lengths_s`: real seconds of one run of each load.
    """
    every, fewer = (*_ESSENTIAL, *peers, *_COMPARED), (*_ESSENTIAL, *peers)
    for runs, arms in product(range(_MOST_RUNS, 0, -1), (every, fewer)):
        plan = _plan([arms] * len(lengths_s), lengths_s, runs)
        if plan.seconds <= budget_s:
            return plan
    return None


def _plan(arms: Sequence[Sequence[Arm]], lengths_s: Sequence[float], runs: int) -> Plan:
    seconds = runs * sum(length_s * len(each) for length_s, each in zip(lengths_s, arms, strict=True))
    return Plan(tuple(map(tuple, arms)), runs, seconds)


def run_length_s(workload: Workload, cell: Cell) -> float:
    """Real seconds: until the last one is due and answered; else until all are that have to be."""
    ends_s = sorted(request.at_s + request.max_tokens * _TOKEN_S for request in workload.requests)
    return _START_S + ends_s[-1 if cell.to_the_end else int(len(ends_s) * _SETTLED)] / cell.speedup


def _named(text: str, arms: Sequence[Arm]) -> list[Arm]:
    by_name = {arm.name: arm for arm in arms}
    if unknown := [name for name in text.split(",") if name not in by_name]:
        raise click.UsageError(f"{unknown[0]!r} is none of {', '.join(by_name)}")
    return [by_name[name] for name in text.split(",")]


def _plan_that_fits(arms: Sequence[Sequence[Arm]], lengths_s: Sequence[float], budget_s: float) -> Plan | None:
    """As many runs of just these as fit."""
    fitting = int(budget_s // _plan(arms, lengths_s, 1).seconds)
    return _plan(arms, lengths_s, min(_MOST_RUNS, fitting)) if fitting else None


def _cells(_: click.Context, __: click.Parameter, text: str) -> list[Cell]:
    by_name = {cell.name: cell for cell in CELLS}
    names = list(by_name) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in by_name]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(by_name)}")
    return [by_name[name] for name in names]


@click.command(
    "matrix",
    epilog="""\b
Examples:
  make bench-peers                                        # installs the peers, then all of it
  warmpath bench matrix --peers ~/.cache/warmpath/peers --dry-run
  make bench-peers BENCH_MINUTES=60 BENCH_ARGS=--only-targets    # what the targets need, once
  warmpath bench matrix --peers ~/.cache/warmpath/peers --loads trace-1x --budget-min 20 --out /tmp/results
""",
)
@click.option("--peers", "folder", type=click.Path(file_okay=False, path_type=Path), help="Where they are installed.")
@click.option("--loads", "cells", default="all", show_default=True, callback=_cells, help="Names with commas between.")
@click.option(
    "--budget-min", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Minutes it may take."
)
@click.option(
    "--routers", default="", help="Only these, names with commas between.  [default: what fits into the time]"
)
@click.option(
    "--only-targets",
    is_flag=True,
    help="Under each load only the routers that its targets compare, peers at their best.",
)
@click.option("--speedup", type=click.FloatRange(0.1, 50), help="Of all time.  [default: each load has its own]")
@order_option
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--port", type=click.IntRange(1024, 65000), default=8600, show_default=True)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("loadtest/results"), show_default=True
)
@click.option("--dry-run", is_flag=True, help="Only say what it would do.")
def matrix(
    *,
    folder: Path | None,
    cells: list[Cell],
    budget_min: float,
    routers: str,
    only_targets: bool,
    speedup: float | None,
    order: Order,
    seed: int,
    port: int,
    out: Path,
    dry_run: bool,
) -> None:
    """Measure everything that docs/routing.md has tables of."""
    require_matplotlib()
    console = Console(width=WIDTH)
    peers = known_peers(folder) if folder is not None else []
    missing = [name for name in PACKAGES if not any(peer.name.startswith(name) for peer in peers)]
    if folder is not None and missing:
        raise click.ClickException(f"{', '.join(missing)} not found under {folder}; `make bench-peers` installs them")
    if speedup is not None:
        cells = [replace(cell, speedup=speedup) for cell in cells]
    workloads = [cell.make(seed) for cell in cells]
    lengths_s = [run_length_s(workload, cell) for cell, workload in zip(cells, workloads, strict=True)]
    if routers and only_targets:
        raise click.UsageError("--routers and --only-targets are two answers to one question")
    if only_targets:
        plan = _plan_that_fits([compared_arms(cell.target_name, peers) for cell in cells], lengths_s, budget_min * 60)
    elif routers:
        named = _named(routers, [*_ESSENTIAL, *_COMPARED, *peers])
        plan = _plan_that_fits([named] * len(cells), lengths_s, budget_min * 60)
    else:
        plan = make_plan(lengths_s, peers, budget_min * 60)
    if plan is None:
        raise click.ClickException(
            "one run of each takes longer: raise --budget-min, or name fewer --loads or --routers"
        )
    console.print(f"{plan.runs} runs under {len(cells)} loads: {plan.seconds / 60:.0f} minutes")
    for cell, length_s, arms in zip(cells, lengths_s, plan.arms, strict=True):
        console.print(f"  {cell.name} at {cell.speedup:g} times the speed: {length_s:.0f} s a run")
        console.print(f"    of {', '.join(arm.name for arm in arms)}")
    if dry_run:
        return
    out.mkdir(parents=True, exist_ok=True)
    reports = [
        _measure(_setup(cell, workload, arms, plan.runs, order, seed), arms, workload, port, out, console)
        for cell, workload, arms in zip(cells, workloads, plan.arms, strict=True)
    ]
    text = markdown(reports)
    (out / f"tables{ORDERS[order][0]}.md").write_text(text)
    click.echo(text, nl=False)
    if any(run.total.errors for each in reports for run in each.all):
        sys.exit(1)


def _setup(cell: Cell, workload: Workload, arms: Sequence[Arm], runs: int, order: Order, seed: int) -> Setup:
    return Setup(
        workload=cell.workload,
        load=cell.load,
        requests=len(workload.requests),
        replicas=8,
        processes=4,
        speedup=cell.speedup,
        tokens_per_chunk=16,
        kv_tokens=workload.kv_tokens,
        order=order,
        seed=seed,
        runs=runs,
        limits=Limits(),
        to_the_end=cell.to_the_end,
        peers={arm.name: " ".join(arm.words) for arm in arms if isinstance(arm, Peer)},
    )


def _measure(setup: Setup, arms: Sequence[Arm], workload: Workload, port: int, out: Path, console: Console) -> Report:
    try:
        report = compare(arms, workload, setup, port, lambda text: console.print(f"[dim]{setup.file_name}: {text}[/]"))
    except SystemFailure as error:
        raise click.ClickException(str(error)) from error
    show(console, report)
    write_report(report, out / f"{setup.file_name}.json")
    draw_plots(report, out)
    return report
