"""`python -m loadtest.report RESULT.json…`: what `warmpath bench` wrote, as tables for docs/routing.md, and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import click

from loadtest.compare import Report, ReportUnreadable, read_report
from loadtest.plots import draw_plots, require_matplotlib
from loadtest.summary import Figures, Percentiles, Run
from loadtest.targets import Check, cell_name, check_targets

__all__ = ["markdown", "report"]

_METRICS: Final = {
    "hit_of_ideal": "hit rate, of the ideal",
    "ttft_ms.p50": "TTFT p50",
    "ttft_ms.p90": "TTFT p90",
    "tpot_ms.p90": "TPOT p90",
    "e2e_ms.p90": "end to end p90",
    "errors": "errors",
}

_COLUMNS: Final = (
    "router",
    "hit of ideal",
    "TTFT p50 / p90 / p99 ms",
    "TPOT p50 / p90 / p99 ms",
    "end to end p50 / p90 / p99 s",
    "goodput",
    "errors",
    "imbalance",
    "CPU ms a request",
)


def markdown(reports: Sequence[Report]) -> str:
    """Targets first, for each order in which replicas compute; then one table for each report."""
    parts = []
    for order in dict.fromkeys(each.setup.order_in_words for each in reports):
        if checks := check_targets(each for each in reports if each.setup.order_in_words == order):
            parts += [f"Replicas {order}.", "\n".join(_targets(checks))]
    parts += ["\n".join(_runs(each)) for each in reports]
    return "\n\n".join(parts) + "\n"


def _targets(checks: Iterable[Check]) -> list[str]:
    lines = ["| load | ours | measured | target | reached |", "|---|---|---|---|---|"]
    for check in checks:
        target = check.target
        sign = "≥" if target.at_least else "≤"
        metric = _METRICS[target.metric]
        what = {"nobody": metric, "random": f"{check.other}'s {metric} over ours"}.get(
            target.against, f"{metric} over {target.against}'s ({check.other})"
        )
        reached = ("yes" if check.reached else "**no**") + ("" if check.valid else ", from an invalid run")
        lines.append(
            f"| {target.cell}: {what} | {check.mode} | {_short(check.measured)} | {sign} {_short(check.wanted)} | {reached} |"
        )
    return lines


def _runs(each: Report) -> list[str]:
    setup, machine = each.setup, each.machine
    shape = f"{setup.requests} requests, {setup.replicas} replicas, speedup {setup.speedup:g}, median of {setup.runs}"
    shape += f", replicas {setup.order_in_words}"
    if not setup.to_the_end:
        shape += ", the last answers not waited for"
    where = f"seed {setup.seed}, commit {each.commit}, {machine.cpus} × {machine.cpu}"
    lines = [
        f"**{cell_name(setup.workload, setup.load)}**: {shape}, {where}",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
    ]
    lines += [_row(run, figures) for run in each.median for figures in run.steps or [run.total]]
    invalid = [f"`{run.arm}` ({run.invalid})" for run in each.median if run.invalid]
    if invalid:
        lines += ["", f"Invalid: {', '.join(invalid)}."]
    return lines


def _row(run: Run, figures: Figures) -> str:
    name = f"`{run.arm}`" + (f" {figures.step}" if figures.step else "") + (" (invalid)" if run.invalid else "")
    cells = [
        name,
        f"{figures.hit_of_ideal:.3f}",
        _times(figures.ttft_ms),
        _times(figures.tpot_ms),
        _times(figures.e2e_ms, unit_ms=1000),
        f"{figures.goodput:.3f}",
        str(figures.errors),
        f"{run.imbalance:.2f}",
        f"{run.cpu_ms:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _times(times: Percentiles, unit_ms: int = 1) -> str:
    digits = 0 if unit_ms == 1 else 1
    return " / ".join(f"{value / unit_ms:,.{digits}f}" for value in (times.p50, times.p90, times.p99))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


@click.command(
    epilog="""\b
Examples:
  python -m loadtest.report loadtest/results/*.json
  python -m loadtest.report loadtest/results/*.json --plots loadtest/results
"""
)
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Draw here (needs the extra bench).")
def report(results: tuple[Path, ...], plots: Path | None) -> None:
    """Print results of `warmpath bench` as Markdown."""
    try:
        reports = [read_report(path) for path in results]
    except ReportUnreadable as error:
        raise click.ClickException(str(error)) from error
    click.echo(markdown(reports), nl=False)
    if plots is not None:
        require_matplotlib()
        for each in reports:
            draw_plots(each, plots)


if __name__ == "__main__":
    report()
