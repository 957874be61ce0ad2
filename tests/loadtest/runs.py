"""Runs and reports with figures of one's choice."""

from __future__ import annotations

import msgspec

from loadtest.compare import Machine, Report, Setup
from loadtest.openloop import Answer
from loadtest.probe import Sample
from loadtest.processes import Usage
from loadtest.summary import Limits, Measured, Percentiles, Run, summarize
from loadtest.system import Order
from loadtest.workloads import Request, ideal_cached_tokens


def run_of(
    answers: list[Answer],
    requests: list[Request] | None = None,
    *,
    arm: str = "cost",
    samples: list[Sample] | None = None,
    starved_s: float = 0.0,
) -> Run:
    """At twice the speed of time."""
    requests = requests or [Request(0.0, "a" * 640, 11)] * len(answers)
    measured = Measured(
        answers=answers,
        samples=samples if samples is not None else [sample(0, computed_tokens=300), sample(1, computed_tokens=100)],
        router=Usage(0.5, starved_s),
        fleet=Usage(0.5, 0.0),
        elapsed_s=10.0,
    )
    return summarize(arm, requests, ideal_cached_tokens(requests), measured, speedup=2.0, limits=Limits(1000.0, 100.0))


def answer(first_s: float = 0.1, *, sent_s: float = 0.0, cached: int = 0, error: str = "") -> Answer:
    return Answer(sent_s, first_s, first_s + 0.4, cached, 11, error)


def sample(
    replica: int, *, at_s: float = 5.0, took_s: float = 0.001, inflight: int = 0, computed_tokens: int = 0
) -> Sample:
    return Sample(at_s=at_s, replica=replica, took_s=took_s, inflight=inflight, computed_tokens=computed_tokens)


def timed_run(arm: str, p50: float, p90: float, *, tpot_p90: float = 50.0, invalid: str = "") -> Run:
    """With the TTFT percentiles given, in ms."""
    run = run_of([answer()], arm=arm)
    total = msgspec.structs.replace(
        run.total, ttft_ms=Percentiles(p50, p90, p90), tpot_ms=Percentiles(40.0, tpot_p90, tpot_p90)
    )
    return msgspec.structs.replace(run, total=total, invalid=invalid)


def report_of(
    runs: list[Run],
    *,
    workload: str = "trace",
    load: float = 1.0,
    peers: tuple[str, ...] = (),
    order: Order = "asked",
) -> Report:
    setup = Setup(
        workload=workload,
        load=load,
        requests=len(runs),
        replicas=2,
        processes=1,
        speedup=2.0,
        tokens_per_chunk=16,
        kv_tokens=1000,
        order=order,
        seed=1,
        runs=1,
        limits=Limits(),
        peers=dict.fromkeys(peers, "a command"),
    )
    machine = Machine(cpu="a CPU", cpus=2, system="Linux", python="3.11", load_average=0.0)
    return Report(commit="abc", machine=machine, setup=setup, median=runs, all=[run.without_plots() for run in runs])
