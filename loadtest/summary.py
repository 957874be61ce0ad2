"""Answers → the numbers of a report. Times are milliseconds of the simulated world; CPU is real.

A run whose client or fleet fell behind measured this machine, not the router: it is marked invalid and says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from loadtest.openloop import Answer
from loadtest.workloads import Request, ideal_cached_tokens

__all__ = ["Percentiles", "Run", "median_run", "summarize"]

MOST_LAG_MS: Final = 100.0
"""Of the simulated world, at the 99th percentile: a tenth of the waits that policies differ by."""


class Percentiles(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under one load."""

    policy: str
    requests: int
    errors: int
    hit_rate: float
    """Cached prompt tokens over all of them."""
    hit_of_ideal: float
    """Cached prompt tokens over those that one unlimited cache would have had."""
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    imbalance: float
    """Prompt tokens computed by the replica that computed most, over the mean."""
    gateway_cpu_ms: float
    """Real, for a request."""
    gateway_cpu_share: float
    fleet_cpu_share: float
    client_lag_ms: Percentiles
    fleet_lag_ms: Percentiles
    invalid: str = ""
    """Why not to believe it."""


def summarize(
    policy: str,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    *,
    speedup: float,
    computed_tokens: Sequence[int],
    gateway_cpu_s: float,
    fleet_cpu_s: float,
    elapsed_s: float,
    fleet_lags_s: Sequence[float],
) -> Run:
    rows = [row for row in zip(requests, answers, ideal_cached_tokens(requests), strict=True) if not row[0].warm]
    good = [row for row in rows if not row[1].error]
    cached = sum(answer.cached_tokens for _, answer, _ in good)
    ideal = sum(ideal for _, _, ideal in good)
    scale = 1000 * speedup
    client_lag = _percentiles([answer.sent_s * scale for answer in answers])
    fleet_lag = _percentiles([lag * scale for lag in fleet_lags_s])
    late = {"client": client_lag.p99, "fleet": fleet_lag.p99}
    return Run(
        policy=policy,
        requests=len(rows),
        errors=len(rows) - len(good),
        hit_rate=round(cached / max(sum(request.prompt_tokens for request, _, _ in good), 1), 4),
        hit_of_ideal=round(cached / ideal, 4) if ideal else 1.0,
        ttft_ms=_percentiles([answer.first_s * scale for _, answer, _ in good]),
        tpot_ms=_percentiles(
            [
                (answer.last_s - answer.first_s) / (answer.completion_tokens - 1) * scale
                for _, answer, _ in good
                if answer.completion_tokens > 1
            ]
        ),
        e2e_ms=_percentiles([answer.last_s * scale for _, answer, _ in good]),
        imbalance=round(max(computed_tokens) / max(statistics.mean(computed_tokens), 1), 3),
        gateway_cpu_ms=round(gateway_cpu_s * 1000 / len(answers), 3),
        gateway_cpu_share=round(gateway_cpu_s / elapsed_s, 3),
        fleet_cpu_share=round(fleet_cpu_s / elapsed_s, 3),
        client_lag_ms=client_lag,
        fleet_lag_ms=fleet_lag,
        invalid=", ".join(f"{who} {lag:.0f} ms late" for who, lag in late.items() if lag > MOST_LAG_MS),
    )


def median_run(runs: Sequence[Run]) -> Run:
    """The one whose TTFT p90 is the median: a run that happened, so its numbers belong together. Valid ones first."""
    valid = [run for run in runs if not run.invalid] or list(runs)
    return sorted(valid, key=lambda run: run.ttft_ms.p90)[(len(valid) - 1) // 2]


def _percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles(0.0, 0.0, 0.0)
    ordered = sorted(values)
    return Percentiles(
        *(round(ordered[min(int(len(ordered) * part), len(ordered) - 1)], 2) for part in (0.5, 0.9, 0.99))
    )
