"""What the decision is worth, in virtual time: the same figures every run, so a change of them is a change of the router."""

from __future__ import annotations

from functools import cache
from typing import Final

import pytest

from loadtest.workloads import make_workload
from router import GateSettings, RoutingSettings
from router.settings import PolicyName
from tests.fleet.flood import flooded, quiet, ttft_of_quiet
from tests.fleet.several import Processes, several_gateways
from tests.fleet.virtual_time import Figures, VirtualFleet

PATIENCE: Final = RoutingSettings().patience


@cache
def figures(policy: PolicyName, load: float = 1.0, limit: int = 150, patience: float = 0.0) -> Figures:
    """With no `patience`, replicas compute first come, first served, so that policies differ by their decisions alone."""
    made = make_workload("trace", load=load, seed=1, limit=limit)
    return VirtualFleet(made, RoutingSettings(policy=policy, patience=patience)).run()


@pytest.mark.parametrize("other", ["round_robin", "least_load", "prefix"])
def test_seconds_beat_the_rules_that_count_requests(other: PolicyName) -> None:
    ours, theirs = figures("cost"), figures(other)

    assert ours.ttft_mean < 0.75 * theirs.ttft_mean
    assert ours.ttft_p90 < 0.75 * theirs.ttft_p90


def test_near_saturation_ours_is_not_worse_than_sticking_until_saturated() -> None:
    ours, sticky = figures("cost", load=1.5), figures("sticky_until_saturated", load=1.5)

    assert ours.ttft_mean < 1.03 * sticky.ttft_mean


def test_prompts_begin_sooner_where_short_ones_pass_long_ones_and_the_longest_little_later() -> None:
    in_order, short_first = figures("cost", load=1.5), figures("cost", load=1.5, patience=PATIENCE)

    assert short_first.ttft_p50 < 0.85 * in_order.ttft_p50
    assert short_first.ttft_mean < 0.9 * in_order.ttft_mean
    assert short_first.ttft_max < 1.25 * in_order.ttft_max


def test_a_run_gives_the_same_figures_again() -> None:
    assert figures("cost", limit=40) == figures.__wrapped__("cost", limit=40)


def test_an_overloaded_fleet_gets_as_much_done_through_the_queue_as_without_one() -> None:
    # The longest come last, so of a shorter run the end says little of how much was done before it.
    made = make_workload("trace", load=3, seed=1, limit=400)
    without, through = (VirtualFleet(made, RoutingSettings(), queue=queue).run() for queue in (None, GateSettings()))

    assert through.most_queued > 0
    assert through.last_first_s < 1.03 * without.last_first_s
    assert through.ttft_p90 < 1.05 * without.ttft_p90


def test_four_processes_route_as_one_does() -> None:
    alone = figures("cost", patience=PATIENCE)
    workload = make_workload("trace", load=1.0, seed=1, limit=150)

    together = VirtualFleet(workload, RoutingSettings(), router=Processes(4, RoutingSettings())).run()

    assert together.ttft_p90 < 1.15 * alone.ttft_p90
    assert together.hit_of_ideal > 0.97 * alone.hit_of_ideal


def test_a_tenant_that_floods_hardly_delays_another_one() -> None:
    """The short run of `tests.fleet.flood`, whose long ones are in docs/operating.md."""
    alone = quiet(1, limit=50)
    found, crowded = ttft_of_quiet(alone, 1), ttft_of_quiet(flooded(alone, 1), 1)

    assert crowded.most_queued > 100
    assert crowded.dropped == 0
    assert crowded.ttft_p90 < 1.2 * found.ttft_p90


def test_two_gateways_share_a_burst_out_better_than_if_each_were_alone() -> None:
    workload = make_workload("trace", load=1.0, seed=1, limit=150)

    alone, apart = (
        VirtualFleet(
            workload, RoutingSettings(), router=several_gateways(2, away_s), gateways=2, decide_s=0.001, frame_s=0.002
        ).run()
        for away_s in (0.0, RoutingSettings().away_s)
    )

    assert apart.ttft_p90 < 0.9 * alone.ttft_p90
