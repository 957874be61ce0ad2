"""Answers and samples → the numbers of a report. Times are milliseconds of the simulated world; CPU is real.

A run whose client or fleet fell behind measured this machine, not the router: it is marked invalid and says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from loadtest.openloop import Answer
from loadtest.probe import Sample
from loadtest.processes import Usage
from loadtest.workloads import Request

__all__ = ["Figures", "Limits", "Measured", "Percentiles", "Run", "median_run", "summarize"]

MOST_LAG_MS: Final = 100.0
"""Of the simulated world, at the 99th percentile: a tenth of the waits that policies differ by."""

MOST_STARVED: Final = 0.2
"""Share of the time: a router that others take the cores from shows their work, not its own. At 0.9 of it, requests waited
half a minute (simulated) for a router that had used 0.15 of a core.
"""

CURVE_POINTS: Final = 201


class Percentiles(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float


class Limits(msgspec.Struct, frozen=True):
    """What an answer must keep to count as good."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests of one step, or of all."""

    step: str
    """'' for all."""
    requests: int
    errors: int
    unfinished: int = 0
    """That were not waited for: they count as long as they had lasted, and nothing is known of their tokens."""
    hit_rate: float
    """Cached prompt tokens over all of them."""
    hit_of_ideal: float
    """Cached prompt tokens over those that one unlimited cache would have had."""
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    goodput: float
    """Share of all requests that were answered within both limits."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One router under one load."""

    arm: str
    total: Figures
    steps: list[Figures]
    """In the order of time; empty where the load has no parts."""
    imbalance: float
    """Prompt tokens computed by the replica that computed most, over the mean, while it counted."""
    cpu_ms: float
    """Real, of the router and its children, for a request."""
    cpu_share: float
    fleet_cpu_share: float
    starved_share: float
    """Of the time the router had work and no core, its threads together."""
    client_lag_ms: Percentiles
    fleet_lag_ms: Percentiles
    invalid: str = ""
    """Why not to believe it."""
    ttft_curve_ms: list[float] = []
    """TTFT at equal steps from the least to the most, for plots; of the last step where there are several."""
    inflight: list[list[tuple[float, int]]] = []
    """For each replica: (simulated seconds, requests running and waiting)."""

    def at(self, step: str) -> Figures:
        """Raises KeyError."""
        for figures in (self.total, *self.steps):
            if figures.step == step:
                return figures
        raise KeyError(step)

    def without_plots(self) -> Run:
        return msgspec.structs.replace(self, ttft_curve_ms=[], inflight=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of sending a workload once. Real seconds."""

    answers: Sequence[Answer]
    samples: Sequence[Sample]
    """In the order of time, the last ones after the load's end."""
    router: Usage
    fleet: Usage
    elapsed_s: float


_Row = tuple[Request, Answer, int]


def summarize(
    arm: str, requests: Sequence[Request], ideal: Sequence[int], measured: Measured, *, speedup: float, limits: Limits
) -> Run:
    """`ideal`: of each request, the tokens that one unlimited cache would have."""
    rows = [row for row in zip(requests, measured.answers, ideal, strict=True) if not row[0].warm]
    steps = list(dict.fromkeys(request.step for request, _, _ in rows if request.step))
    scale = 1000 * speedup
    client_lag = _percentiles([answer.sent_s * scale for answer in measured.answers])
    fleet_lag = _percentiles([sample.took_s * scale for sample in measured.samples])
    starved_share = round(measured.router.waited_s / measured.elapsed_s, 3)
    plotted = [row for row in rows if not steps or row[0].step == steps[-1]]
    return Run(
        arm=arm,
        total=_figures("", rows, scale, limits),
        steps=[_figures(step, [row for row in rows if row[0].step == step], scale, limits) for step in steps],
        imbalance=_imbalance(measured.samples, rows[0][0].at_s / speedup),
        cpu_ms=round(measured.router.cpu_s * 1000 / len(measured.answers), 3),
        cpu_share=round(measured.router.cpu_s / measured.elapsed_s, 3),
        fleet_cpu_share=round(measured.fleet.cpu_s / measured.elapsed_s, 3),
        starved_share=starved_share,
        client_lag_ms=client_lag,
        fleet_lag_ms=fleet_lag,
        invalid=_fault(client_lag.p99, fleet_lag.p99, starved_share),
        ttft_curve_ms=_curve([answer.first_s * scale for _, answer, _ in plotted if not answer.error]),
        inflight=_inflight(measured.samples, speedup),
    )


def _fault(client_lag_ms: float, fleet_lag_ms: float, starved_share: float) -> str:
    late = {"client": client_lag_ms, "fleet": fleet_lag_ms}
    faults = [f"{who} {lag:.0f} ms late" for who, lag in late.items() if lag > MOST_LAG_MS]
    if starved_share > MOST_STARVED:
        faults.append(f"router without a core for {starved_share:.0%} of the time")
    return ", ".join(faults)


def median_run(runs: Sequence[Run]) -> Run:
    """The one whose TTFT p90 is the median: a run that happened, so its numbers belong together. Valid ones first."""
    valid = [run for run in runs if not run.invalid] or list(runs)
    return sorted(valid, key=lambda run: run.total.ttft_ms.p90)[(len(valid) - 1) // 2]


def _figures(step: str, rows: Sequence[_Row], scale: float, limits: Limits) -> Figures:
    good = [row for row in rows if not row[1].error]
    ended = [row for row in good if not row[1].unfinished]
    cached = sum(answer.cached_tokens for _, answer, _ in ended)
    ideal = sum(ideal for _, _, ideal in ended)
    within = [
        answer.first_s * scale <= limits.ttft_ms and (answer.unfinished or _tpot_s(answer) * scale <= limits.tpot_ms)
        for _, answer, _ in good
    ]
    return Figures(
        step=step,
        requests=len(rows),
        errors=len(rows) - len(good),
        unfinished=len(good) - len(ended),
        hit_rate=round(cached / max(sum(request.prompt_tokens for request, _, _ in ended), 1), 4),
        hit_of_ideal=round(cached / ideal, 4) if ideal else 1.0,
        ttft_ms=_percentiles([answer.first_s * scale for _, answer, _ in good]),
        tpot_ms=_percentiles([_tpot_s(answer) * scale for _, answer, _ in good if answer.completion_tokens > 1]),
        e2e_ms=_percentiles([answer.last_s * scale for _, answer, _ in good]),
        goodput=round(sum(within) / max(len(rows), 1), 4),
    )


def _tpot_s(answer: Answer) -> float:
    """Between two tokens, on average."""
    return (answer.last_s - answer.first_s) / max(answer.completion_tokens - 1, 1)


def _percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles(0.0, 0.0, 0.0)
    ordered = sorted(values)
    return Percentiles(*(round(_quantile(ordered, part), 2) for part in (0.5, 0.9, 0.99)))


def _curve(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [round(_quantile(ordered, number / (CURVE_POINTS - 1)), 1) for number in range(CURVE_POINTS) if ordered]


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


def _imbalance(samples: Sequence[Sample], since_s: float) -> float:
    """From each replica's last sample before `since_s` to its last one."""
    before: dict[int, int] = {}
    computed: dict[int, int] = {}
    for sample in samples:
        if sample.at_s < since_s:
            before[sample.replica] = sample.computed_tokens
        computed[sample.replica] = sample.computed_tokens - before.get(sample.replica, 0)
    counts = list(computed.values()) or [0]
    return round(max(counts) / max(statistics.mean(counts), 1), 3)


def _inflight(samples: Sequence[Sample], speedup: float) -> list[list[tuple[float, int]]]:
    series: list[list[tuple[float, int]]] = [[] for _ in range(1 + max((each.replica for each in samples), default=-1))]
    for sample in samples:
        series[sample.replica].append((round(sample.at_s * speedup, 1), sample.inflight))
    return series
