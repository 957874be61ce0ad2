from loadtest.openloop import Answer
from loadtest.summary import Run, median_run, summarize
from loadtest.workloads import Request


def run_of(answers: list[Answer], requests: list[Request] | None = None, fleet_lag_s: float = 0.0) -> Run:
    return summarize(
        "cost",
        requests or [Request(0.0, "a" * 640, 11)] * len(answers),
        answers,
        speedup=2.0,
        computed_tokens=[300, 100],
        gateway_cpu_s=0.5,
        fleet_cpu_s=0.5,
        elapsed_s=10.0,
        fleet_lags_s=[fleet_lag_s],
    )


def answer(first_s: float = 0.1, *, sent_s: float = 0.0, cached: int = 0, error: str = "") -> Answer:
    return Answer(sent_s, first_s, first_s + 0.4, cached, 11, error)


def test_times_are_of_the_simulated_world() -> None:
    run = run_of([answer(), answer(0.3)])

    assert (run.ttft_ms.p50, run.ttft_ms.p99) == (600.0, 600.0)
    assert run.tpot_ms.p50 == 80.0
    assert run.e2e_ms.p90 == 1400.0


def test_hits_are_told_against_one_unlimited_cache() -> None:
    run = run_of([answer(), answer(cached=72)])

    assert run.hit_rate == 72 / 320
    assert run.hit_of_ideal == 0.5


def test_warm_requests_and_errors_do_not_count() -> None:
    warm, counted = Request(0.0, "a" * 640, 11, warm=True), Request(0.0, "a" * 640, 11)

    run = run_of([answer(9.0), answer(9.0, error="503"), answer(cached=144)], [warm, counted, counted])

    assert (run.requests, run.errors, run.ttft_ms.p99) == (2, 1, 200.0)
    assert run.hit_of_ideal == 1.0, "what the warm one left was there"


def test_imbalance_is_the_most_over_the_mean() -> None:
    assert run_of([answer()]).imbalance == 1.5


def test_a_late_client_or_fleet_makes_a_run_invalid() -> None:
    assert run_of([answer()]).invalid == ""
    assert run_of([answer(sent_s=0.06)]).invalid == "client 120 ms late"
    assert run_of([answer()], fleet_lag_s=0.06).invalid == "fleet 120 ms late"


def test_the_median_is_a_run_and_a_valid_one() -> None:
    runs = [run_of([answer(first)]) for first in (0.1, 0.2, 0.3)]
    late = run_of([answer(0.01, sent_s=1.0)])

    assert median_run(runs[::-1]) == runs[1]
    assert median_run([late, runs[2]]) == runs[2]
    assert median_run([late]) == late
