import pytest

from loadtest.compare import Report
from loadtest.targets import Check, check_targets
from tests.loadtest.runs import answer, report_of, run_of, timed_run


def check_of(report: Report, cell: str, metric: str, against: str) -> Check:
    (found,) = [
        check
        for check in check_targets([report])
        if (check.target.cell, check.target.metric, check.target.against) == (cell, metric, against)
    ]
    return found


def test_the_best_peer_is_chosen_for_each_metric() -> None:
    runs = [timed_run("cost", 40, 100), timed_run("a", 100, 300), timed_run("b", 120, 200)]
    report = report_of(runs, peers=("a", "b"))

    p50 = check_of(report, "trace 1×", "ttft_ms.p50", "best peer")
    p90 = check_of(report, "trace 1×", "ttft_ms.p90", "best peer")

    assert (p50.other, p50.measured, p50.reached) == ("a", 0.4, True)
    assert (p90.other, p90.measured, p90.reached) == ("b", 0.5, False)


def test_time_per_token_is_held_against_the_peer_that_is_best_at_the_first_token() -> None:
    runs = [timed_run("cost", 40, 100), timed_run("a", 1, 200, tpot_p90=25), timed_run("b", 1, 300, tpot_p90=5)]

    check = check_of(report_of(runs, peers=("a", "b")), "trace 1×", "tpot_ms.p90", "that peer")

    assert (check.other, check.measured, check.reached) == ("a", 2.0, False)


def test_pinning_may_be_ours_or_a_peers() -> None:
    runs = [timed_run("cost", 40, 100), timed_run("consistent_hash", 90, 400), timed_run("smg:pinned", 80, 500)]

    check = check_of(report_of(runs, load=2.0, peers=("smg:pinned",)), "trace 2×", "ttft_ms.p90", "pinning")

    assert (check.other, check.measured) == ("consistent_hash", 0.25)


def test_random_is_told_as_times_ours() -> None:
    runs = [timed_run("cost", 40, 100), timed_run("random", 900, 20_000)]

    check = check_of(report_of(runs, workload="shared"), "shared", "ttft_ms.p90", "random")

    assert (check.measured, check.reached) == (200.0, True)


def test_modes_have_limits_of_their_own() -> None:
    runs = [timed_run("cost", 1, 45), timed_run("cost (plain)", 1, 45), timed_run("a", 1, 100)]

    checks = [
        check
        for check in check_targets([report_of(runs, load=1.5, peers=("a",))])
        if check.target.against == "best peer"
    ]

    assert [(check.mode, check.wanted, check.reached) for check in checks] == [
        ("exact", 0.4, False),
        ("plain", 0.5, True),
    ]


def test_a_check_is_as_valid_as_the_runs_behind_it() -> None:
    runs = [timed_run("cost", 40, 100), timed_run("a", 100, 300, invalid="client late")]

    assert not check_of(report_of(runs, peers=("a",)), "trace 1×", "ttft_ms.p90", "best peer").valid
    assert check_of(report_of(runs, peers=("a",)), "trace 1×", "errors", "nobody").valid


@pytest.mark.parametrize("workload", ["shared", "chats"])
def test_hit_rates_need_no_other_router(workload: str) -> None:
    check = check_of(
        report_of([run_of([answer(), answer(cached=144)])], workload=workload), workload, "hit_of_ideal", "nobody"
    )

    assert check.reached


def test_without_ours_there_is_nothing_to_check() -> None:
    assert check_targets([report_of([timed_run("a", 1, 2)], peers=("a",))]) == []
