from loadtest.arms import Ours, Peer
from loadtest.matrix import CELLS, Cell, make_plan, run_length_s
from loadtest.targets import CELLS as TARGET_CELLS
from loadtest.workloads import Request, Workload

PEERS = [Peer("a", ("a",)), Peer("b", ("b",))]


def test_a_plan_fits_its_budget_and_uses_it() -> None:
    lengths = [20.0, 30.0]
    plans = [make_plan(lengths, PEERS, minutes * 60) for minutes in range(1, 60)]

    seen = [plan for plan in plans if plan is not None]
    assert {plan.runs for plan in seen} == {1, 2, 3}
    for minutes, plan in enumerate(plans, start=1):
        assert plan is None or plan.seconds <= minutes * 60
    assert [(plan.runs, len(plan.arms)) for plan in seen] == sorted((plan.runs, len(plan.arms)) for plan in seen)


def test_targets_and_every_peer_are_measured_even_in_the_shortest_plan() -> None:
    shortest = next(plan for plan in (make_plan([50.0], PEERS, float(budget)) for budget in range(1000)) if plan)

    assert {"cost", "cost (plain)", "random", "consistent_hash", "a", "b"} <= {arm.name for arm in shortest.arms}
    assert Ours("prefix") not in shortest.arms


def test_a_run_lasts_until_its_last_answer() -> None:
    long_answer, last = Request(0.0, "a", 1000), Request(10.0, "a", 1)

    alone, both = (run_length_s(Workload(requests, 1), 5.0) for requests in ((last,), (long_answer, last)))

    assert both > alone + 5


def test_every_load_that_has_a_target_is_in_it() -> None:
    names = [f"trace {cell.load:g}×" if cell.workload == "trace" else cell.workload for cell in CELLS]

    assert tuple(names) == TARGET_CELLS
    assert Cell("trace", 1.5, 2.0).name == "trace-1.5x"
