"""`warmpath bench fleet`: routing policies and other routers over the same simulated fleet (docs/routing.md)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import click
from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.arms import KNOWLEDGE, POLICIES, Arm, Knowledge, Ours, Peer, parse_peer
from loadtest.compare import Report, Setup, compare, write_report
from loadtest.plots import draw_plots, require_matplotlib
from loadtest.processes import SystemFailure
from loadtest.summary import Figures, Limits
from loadtest.system import MAX_GATEWAYS, ORDERS, Order
from loadtest.trace import TraceUnreadable, whole_trace_path
from loadtest.workloads import SHARED_RATES, WORKLOADS, make_workload

__all__ = ["WIDTH", "fleet", "order_option", "show"]

WIDTH: Final = 160


def show(console: Console, report: Report) -> None:
    """The median of each router as a table, and why not to believe some."""
    setup = report.setup
    title = f"{setup.workload} at {setup.load:g}×, {setup.replicas} replicas; simulated ms, p50 / p90 / p99"
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("router", no_wrap=True)
    for name in (
        "step",
        "hit of ideal",
        "TTFT",
        "TPOT",
        "end to end",
        "goodput",
        "errors",
        "imbalance",
        "CPU ms",
        "valid",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in report.median:
        of_run = (f"{run.imbalance:.2f}", f"{run.cpu_ms:.2f}", "no" if run.invalid else "yes")
        for figures in run.steps or [run.total]:
            shown.add_row(run.arm, *_cells(figures), *of_run)
    console.print(shown)
    for run in report.median:
        if run.invalid:
            console.print(f"[yellow]{run.arm}: {run.invalid}[/]")


def _cells(figures: Figures) -> list[str]:
    times = (figures.ttft_ms, figures.tpot_ms, figures.e2e_ms)
    return [
        figures.step,
        f"{figures.hit_of_ideal:.3f}",
        *(f"{each.p50:,.0f} / {each.p90:,.0f} / {each.p99:,.0f}" for each in times),
        f"{figures.goodput:.3f}",
        str(figures.errors),
    ]


def _policies(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    names = list(POLICIES) if text == "all" else text.split(",") if text != "none" else []
    if unknown := [name for name in names if name not in POLICIES]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(POLICIES)}")
    return names


def _knowledge(_: click.Context, __: click.Parameter, text: str) -> list[Knowledge]:
    found = text.split(",")
    if unknown := [each for each in found if each not in KNOWLEDGE]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(KNOWLEDGE)}")
    return cast(list[Knowledge], found)


def _counts(most: int) -> Callable[[click.Context, click.Parameter, str], list[int]]:
    def parse(_: click.Context, __: click.Parameter, text: str) -> list[int]:
        try:
            counts = [int(part) for part in text.split(",")]
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is no list of numbers") from error
        if not all(1 <= count <= most for count in counts):
            raise click.BadParameter(f"from 1 to {most}")
        return counts

    return parse


def _peers(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> list[Peer]:
    try:
        return [parse_peer(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _rates(_: click.Context, __: click.Parameter, text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of numbers") from error
    if not all(0 < rate <= 1000 for rate in rates) or len(set(rates)) != len(rates):
        raise click.BadParameter("rates are different numbers above 0, at most 1000")
    return rates


def _trace(_: click.Context, __: click.Parameter, text: str | None) -> Path | None:
    return whole_trace_path() if text == "whole" else Path(text) if text else None


def _plots(_: click.Context, __: click.Parameter, folder: Path | None) -> Path | None:
    if folder is not None:
        require_matplotlib()
    return folder


order_option = click.option(
    "--order",
    type=click.Choice(list(ORDERS)),
    default="asked",
    show_default=True,
    help="In which replicas compute prompts: as their router asks for, as they come, or short ones first by "
    "themselves.",
)


@click.command(
    epilog="""\b
Examples:
  warmpath bench fleet                                           # our policy, the recorded trace, about a minute
  warmpath bench fleet --policies all --runs 3 --out results.json --plots plots
  warmpath bench fleet --workload shared --policies cost,random --knowledge exact,plain
  warmpath bench fleet --gateway-processes 1,4 --gateways 1,2 --runs 3
  warmpath bench fleet --policies none --peer 'nginx=./start-nginx.sh {port} {workers}'
  warmpath bench fleet --peer 'sglang=sglang-router launch --port {port} --worker-urls {workers}'
\b
A peer's command gets {port}, {spare_port} and {workers}: alone as a word, the replicas' URLs as words of their
own; within a word, joined by commas. It is ready when it answers a completion, and ends when told to (SIGTERM).
"""
)
@click.option("--workload", type=click.Choice(WORKLOADS), default="trace", show_default=True)
@click.option("--load", type=click.FloatRange(0.01, 10), default=1.0, show_default=True, help="Times the usual rate.")
@click.option(
    "--rates",
    default=",".join(f"{rate:g}" for rate in SHARED_RATES),
    show_default=True,
    callback=_rates,
    help="Of the workload shared: requests a second, 20 s each.",
)
@click.option(
    "--trace", metavar="FILE|whole", callback=_trace, help="Other rows than the first 1,000; see `bench data`."
)
@click.option("--policies", default="cost", show_default=True, callback=_policies, help="Names, 'all' or 'none'.")
@click.option(
    "--knowledge",
    default="exact",
    show_default=True,
    callback=_knowledge,
    help="exact: replicas with events; plain: taken for foreign servers; or both, with a comma.",
)
@click.option(
    "--peer", "peers", multiple=True, metavar="NAME=COMMAND", callback=_peers, help="Another router; repeatable."
)
@click.option("--runs", type=click.IntRange(1, 20), default=1, show_default=True, help="Of each; the median is shown.")
@click.option("--replicas", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--processes", type=click.IntRange(1, 64), default=4, show_default=True, help="That the replicas share.")
@click.option(
    "--gateway-processes",
    default="1",
    show_default=True,
    callback=_counts(64),
    help="Of our gateway; several by commas.",
)
@click.option(
    "--gateways",
    default="1",
    show_default=True,
    callback=_counts(MAX_GATEWAYS),
    help="In front of one fleet; the same.",
)
@click.option("--speedup", type=click.FloatRange(0.1, 50), default=3.0, show_default=True, help="Of all time.")
@order_option
@click.option("--limit", type=click.IntRange(min=1), help="Only so many requests.")
@click.option("--tokens-per-chunk", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--ttft-limit-ms", type=click.FloatRange(min=0), default=2000.0, show_default=True, help="For goodput.")
@click.option("--tpot-limit-ms", type=click.FloatRange(min=0), default=100.0, show_default=True, help="For goodput.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--port", type=click.IntRange(1024, 65000), default=8600, show_default=True, help="The first of the ports."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here as JSON.")
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    callback=_plots,
    help="Draw here (needs the extra bench).",
)
def fleet(
    *,
    workload: str,
    load: float,
    rates: list[float],
    trace: Path | None,
    policies: list[str],
    knowledge: list[Knowledge],
    peers: list[Peer],
    runs: int,
    replicas: int,
    processes: int,
    gateway_processes: list[int],
    gateways: list[int],
    speedup: float,
    order: Order,
    limit: int | None,
    tokens_per_chunk: int,
    ttft_limit_ms: float,
    tpot_limit_ms: float,
    seed: int,
    port: int,
    out: Path | None,
    plots: Path | None,
) -> None:
    """Compare routing policies and routers over a simulated fleet."""
    ours = itertools.product(policies, knowledge, gateway_processes, gateways)
    arms: list[Arm] = [Ours(*each) for each in ours]
    arms += peers
    if not arms:
        raise click.UsageError("nothing to measure: name --policies or --peer")
    if len({arm.name for arm in arms}) != len(arms):
        raise click.UsageError("two routers have the same name")
    console = Console(width=WIDTH)
    try:
        work = make_workload(workload, load=load, seed=seed, limit=limit, rates=rates, trace=trace)
    except TraceUnreadable as error:
        raise click.ClickException(f"{error}; `warmpath bench data` brings the whole trace") from error
    if all(request.warm for request in work.requests):
        raise click.UsageError(f"--limit {limit} leaves nothing but warming up")
    setup = Setup(
        workload=workload,
        load=load,
        requests=len(work.requests),
        replicas=replicas,
        processes=min(processes, replicas),
        speedup=speedup,
        tokens_per_chunk=tokens_per_chunk,
        kv_tokens=work.kv_tokens,
        order=order,
        seed=seed,
        runs=runs,
        limits=Limits(ttft_ms=ttft_limit_ms, tpot_ms=tpot_limit_ms),
        peers={peer.name: " ".join(peer.words) for peer in peers},
    )
    try:
        report = compare(arms, work, setup, port, lambda text: console.print(f"[dim]{text}[/]"))
    except SystemFailure as error:
        raise click.ClickException(str(error)) from error
    show(console, report)
    if out is not None:
        write_report(report, out)
    if plots is not None:
        draw_plots(report, plots)
    if any(run.total.errors for run in report.all):
        sys.exit(1)


if __name__ == "__main__":
    fleet()
