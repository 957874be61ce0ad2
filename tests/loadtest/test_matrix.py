from pathlib import Path

from loadtest.arms import Ours, Peer
from loadtest.matrix import CELLS, Cell, compared_arms, make_plan, run_length_s
from loadtest.peers import PACKAGES, known_peers
from loadtest.targets import CELLS as TARGET_CELLS
from loadtest.targets import TARGETS, check_targets
from loadtest.workloads import Request, Workload
from tests.loadtest.runs import report_of, timed_run

PEERS = [Peer("a", ("a",)), Peer("b", ("b",))]


def test_a_plan_fits_its_budget_and_uses_it() -> None:
    lengths = [20.0, 30.0]
    plans = [make_plan(lengths, PEERS, minutes * 60) for minutes in range(1, 60)]

    seen = [plan for plan in plans if plan is not None]
    assert {plan.runs for plan in seen} == {1, 2, 3}
    for minutes, plan in enumerate(plans, start=1):
        assert plan is None or plan.seconds <= minutes * 60
    assert [(plan.runs, len(plan.arms[0])) for plan in seen] == sorted((plan.runs, len(plan.arms[0])) for plan in seen)


def test_targets_and_every_peer_are_measured_even_in_the_shortest_plan() -> None:
    shortest = next(plan for plan in (make_plan([50.0], PEERS, float(budget)) for budget in range(1000)) if plan)

    assert {"cost", "cost (plain)", "random", "consistent_hash", "a", "b"} <= {arm.name for arm in shortest.arms[0]}
    assert Ours("prefix") not in shortest.arms[0]


def test_what_is_compared_is_enough_for_every_target_of_its_load(tmp_path: Path) -> None:
    """As complete as a run of all: no target is without somebody to hold ours against, and the peers are at their best."""
    peers = installed_peers(tmp_path)
    for cell in CELLS:
        few = [arm.name for arm in compared_arms(cell.target_name, peers)]
        ran = report_of(
            [timed_run(name, 100.0, 200.0) for name in few],
            workload=cell.workload,
            load=cell.load,
            peers=tuple(name for name in few if name in {peer.name for peer in peers}),
        )

        wanted = {(target.metric, target.against) for target in TARGETS if target.cell == cell.target_name}
        checks = check_targets([ran])
        assert {(check.target.metric, check.target.against) for check in checks} == wanted
        assert {check.mode for check in checks} == {"exact", "plain"}
        assert {"sglang-router", "vllm-router", "smg"} <= {name.partition(":")[0] for name in few}
        assert len(few) <= 8


def installed_peers(folder: Path) -> list[Peer]:
    for package in PACKAGES:
        (folder / package / "bin").mkdir(parents=True)
        (folder / package / "bin" / package).touch()
    return known_peers(folder)


def test_a_run_lasts_until_its_last_answer() -> None:
    long_answer, last = Request(0.0, "a", 1000), Request(10.0, "a", 1)

    chats = Cell("chats", 1.0, speedup=5.0)
    alone, both = (run_length_s(Workload(requests, 1), chats) for requests in ((last,), (long_answer, last)))

    assert both > alone + 5


def test_every_load_that_has_a_target_is_in_it() -> None:
    assert tuple(cell.target_name for cell in CELLS) == TARGET_CELLS
    assert Cell("trace", 1.5, 2.0).name == "trace-1.5x"
