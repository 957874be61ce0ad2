"""A report → pictures: how TTFT is distributed, and what each replica had in hand over time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

import click

from loadtest.compare import Report
from loadtest.summary import Run

__all__ = ["draw_plots", "require_matplotlib"]

_DPI: Final = 80
_LEAST_MS: Final = 10.0
"""Left end of the logarithmic axis."""


def require_matplotlib() -> None:
    """Before the measuring, not after it. Raises ClickException."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("plots need matplotlib: pip install matplotlib")


def draw_plots(report: Report, folder: Path) -> list[Path]:
    """Two PNG files, by the setup's name."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = report.setup
    paths = [folder / f"{setup.file_name}-ttft.png", folder / f"{setup.file_name}-load.png"]
    title = f"{setup.workload} at {setup.load:g}×, {setup.replicas} replicas that {setup.order_in_words}"
    _draw_ttft(report.median, title, paths[0])
    _draw_load(report.median, title, paths[1])
    return paths


def _draw_ttft(runs: list[Run], title: str, path: Path) -> None:
    """Which share of the requests had their first token after so long."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        curve = [max(value, _LEAST_MS) for value in run.ttft_curve_ms]
        shares = [position / max(len(curve) - 1, 1) for position in range(len(curve))]
        axes.plot(curve, shares, label=run.arm, color=f"C{number % 10}", linestyle=("-", "--", ":")[number // 10 % 3])
    step = next((f", {run.steps[-1].step}" for run in runs if run.steps), "")
    axes.set(xscale="log", xlabel="TTFT, simulated ms", ylabel="share of requests", title=title + step, ylim=(0, 1))
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=_DPI)


def _draw_load(runs: list[Run], title: str, path: Path) -> None:
    """Requests in hand of each replica, one panel a router, all on the same scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 1.1 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        for series in run.inflight:
            axes.plot([at_s for at_s, _ in series], [count for _, count in series], linewidth=0.8)
        axes.set_ylabel(run.arm, rotation=0, horizontalalignment="right", fontsize="small")
        axes.grid(visible=True, alpha=0.3)
    panels[-1].set_xlabel("simulated s")
    figure.suptitle(f"{title}: requests in hand of each replica", fontsize="medium")
    figure.savefig(path, dpi=_DPI)
