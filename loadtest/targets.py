"""What our router is meant to reach against others, as a table, and what reports say of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal

from loadtest.compare import Report
from loadtest.peers import PINNED
from loadtest.summary import Figures, Run

__all__ = ["CELLS", "OURS", "TARGETS", "Check", "Target", "cell_name", "check_targets"]

Against = Literal["nobody", "best peer", "that peer", "pinning", "random"]
"""best peer: the other program that has the least of the metric. that peer: the one with the least TTFT p90. pinning: the
best of those that keep a conversation where it began. random: our policy of that name; the ratio is how often ours fits in.
"""

CELLS: Final = ("shared", "chats", "trace 1×", "trace 1.5×", "trace 2×")

_STEP: Final = {"shared": "60/s"}
"""What counts of a load in steps."""

OURS: Final = {"exact": "cost", "plain": "cost (plain)"}


@dataclass(frozen=True, slots=True)
class Target:
    cell: str
    metric: str
    """Of `Figures`."""
    against: Against
    exact: float
    plain: float
    at_least: bool = False


TARGETS: Final = (
    Target("shared", "hit_of_ideal", "nobody", 0.98, 0.97, at_least=True),
    Target("chats", "hit_of_ideal", "nobody", 0.98, 0.97, at_least=True),
    Target("shared", "ttft_ms.p90", "best peer", 1.1, 1.15),
    Target("trace 1×", "ttft_ms.p50", "best peer", 0.45, 0.45),
    Target("trace 1×", "ttft_ms.p90", "best peer", 0.45, 0.45),
    Target("trace 1×", "ttft_ms.p50", "pinning", 0.6, 0.6),
    Target("trace 1×", "ttft_ms.p90", "pinning", 0.6, 0.6),
    Target("trace 1.5×", "ttft_ms.p90", "best peer", 0.4, 0.5),
    Target("trace 2×", "ttft_ms.p50", "pinning", 1.0, 1.0),
    Target("trace 2×", "ttft_ms.p90", "pinning", 1.0, 1.0),
    *(Target(cell, "tpot_ms.p90", "that peer", 1.05, 1.05) for cell in CELLS),
    *(Target(cell, "e2e_ms.p90", "that peer", 1.05, 1.05) for cell in CELLS),
    *(Target(cell, "errors", "nobody", 0, 0) for cell in CELLS),
    Target("shared", "ttft_ms.p90", "random", 100, 100, at_least=True),
)


@dataclass(frozen=True, slots=True)
class Check:
    target: Target
    mode: str
    other: str
    """The run that ours was held against; '' where none was."""
    measured: float
    valid: bool
    """Whether both runs were."""

    @property
    def wanted(self) -> float:
        return self.target.exact if self.mode == "exact" else self.target.plain

    @property
    def reached(self) -> bool:
        return self.measured >= self.wanted if self.target.at_least else self.measured <= self.wanted


def cell_name(workload: str, load: float) -> str:
    return f"trace {load:g}×" if workload == "trace" else workload


def check_targets(reports: Iterable[Report]) -> list[Check]:
    """In the order of `TARGETS`; only those that there are runs for."""
    by_cell = {cell_name(report.setup.workload, report.setup.load): report for report in reports}
    found = []
    for target in TARGETS:
        report = by_cell.get(target.cell)
        if report is None:
            continue
        runs = {run.arm: run for run in report.median}
        for mode, name in OURS.items():
            if name in runs and (check := _check(target, mode, runs[name], runs, report.setup.peers)) is not None:
                found.append(check)
    return found


def _check(target: Target, mode: str, ours: Run, runs: Mapping[str, Run], peers: Iterable[str]) -> Check | None:
    step = _STEP.get(target.cell, "")
    mine = _value(ours, target.metric, step)
    if target.against == "nobody":
        return Check(target, mode, "", mine, not ours.invalid)
    names = {"pinning": PINNED, "random": ("random",)}.get(target.against, peers)
    others = [runs[name] for name in names if name in runs]
    if not others:
        return None
    chosen_by = "ttft_ms.p90" if target.against == "that peer" else target.metric
    other = min(others, key=lambda run: _value(run, chosen_by, step))
    theirs = _value(other, target.metric, step)
    ratio = theirs / mine if target.against == "random" else mine / theirs
    return Check(target, mode, other.arm, ratio, not (ours.invalid or other.invalid))


def _value(run: Run, metric: str, step: str) -> float:
    """Of one step; where a run has no such, of all. Never 0 for times, so that ratios exist."""
    figures: Figures = next((each for each in run.steps if each.step == step), run.total)
    value: float = attrgetter(metric)(figures)
    return value if metric in ("errors", "hit_of_ideal") else max(value, 0.01)
