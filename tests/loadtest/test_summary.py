from loadtest.openloop import Answer
from loadtest.summary import median_run
from loadtest.workloads import Request
from tests.loadtest.runs import answer, run_of, sample


def test_times_are_of_the_simulated_world() -> None:
    total = run_of([answer(), answer(0.3)]).total

    assert (total.ttft_ms.p50, total.ttft_ms.p99) == (600.0, 600.0)
    assert total.tpot_ms.p50 == 80.0
    assert total.e2e_ms.p90 == 1400.0


def test_hits_are_told_against_one_unlimited_cache() -> None:
    total = run_of([answer(), answer(cached=72)]).total

    assert total.hit_rate == 72 / 320
    assert total.hit_of_ideal == 0.5


def test_warm_requests_and_errors_do_not_count() -> None:
    warm, counted = Request(0.0, "a" * 640, 11, warm=True), Request(0.0, "a" * 640, 11)

    total = run_of([answer(9.0), answer(9.0, error="503"), answer(cached=144)], [warm, counted, counted]).total

    assert (total.requests, total.errors, total.ttft_ms.p99) == (2, 1, 200.0)
    assert total.hit_of_ideal == 1.0, "what the warm one left was there"


def test_goodput_is_the_share_of_all_that_kept_both_limits() -> None:
    slow_first, slow_tokens, failed = answer(0.51), answer(), answer(error="503")
    slow_tokens.last_s += 1.0

    assert run_of([answer(), slow_first, slow_tokens, failed]).total.goodput == 0.25


def test_each_step_of_a_load_has_its_own_figures() -> None:
    slow, quick = Request(0.0, "a" * 640, 11, step="20/s"), Request(1.0, "b" * 640, 11, step="60/s")

    run = run_of([answer(0.1), answer(0.3)], [slow, quick])

    assert [(step.step, step.requests, step.ttft_ms.p50) for step in run.steps] == [
        ("20/s", 1, 200.0),
        ("60/s", 1, 600.0),
    ]
    assert run.ttft_curve_ms[0] == run.ttft_curve_ms[-1] == 600.0, "the last step is what is plotted"


def test_imbalance_is_the_most_over_the_mean_of_what_was_computed_while_it_counted() -> None:
    warm, counted = Request(0.0, "a" * 640, 11, warm=True), Request(4.0, "a" * 640, 11)
    samples = [
        sample(0, at_s=1.9, computed_tokens=5000),
        sample(1, at_s=1.9, computed_tokens=10),
        sample(0, at_s=9.0, computed_tokens=5300),
        sample(1, at_s=9.0, computed_tokens=110),
    ]

    assert run_of([answer()]).imbalance == 1.5
    assert run_of([answer(), answer()], [warm, counted], samples=samples).imbalance == 1.5


def test_the_load_of_each_replica_is_kept_over_simulated_time() -> None:
    run = run_of([answer()], samples=[sample(0, at_s=1.0, inflight=3), sample(1, at_s=2.0, inflight=4)])

    assert run.inflight == [[(2.0, 3)], [(4.0, 4)]]


def test_a_late_client_or_fleet_or_a_router_without_a_core_makes_a_run_invalid() -> None:
    assert run_of([answer()]).invalid == ""
    assert run_of([answer(sent_s=0.06)]).invalid == "client 120 ms late"
    assert run_of([answer()], samples=[sample(0, took_s=0.06)]).invalid == "fleet 120 ms late"
    assert run_of([answer()], starved_s=2.5).invalid == "router without a core for 25% of the time"


def test_the_median_is_a_run_and_a_valid_one() -> None:
    runs = [run_of([answer(first)]) for first in (0.1, 0.2, 0.3)]
    late = run_of([answer(0.01, sent_s=1.0)])

    assert median_run(runs[::-1]) == runs[1]
    assert median_run([late, runs[2]]) == runs[2]
    assert median_run([late]) == late


def test_one_that_was_not_waited_for_counts_as_long_as_it_had_lasted() -> None:
    """In times and goodput; of its tokens nothing is known, so it has no part in TPOT and hit rate."""
    going = Answer(0.0, 0.1, 30.0, unfinished=True)

    total = run_of([answer(0.1, cached=144), answer(0.1, cached=144), going]).total

    alone = run_of([answer(0.1, cached=144), answer(0.1, cached=144)]).total
    assert (total.errors, total.unfinished, total.goodput) == (0, 1, 1.0)
    assert total.e2e_ms.p99 == 60_000
    assert (total.tpot_ms, total.hit_rate) == (alone.tpot_ms, alone.hit_rate)
