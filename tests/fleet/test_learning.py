"""What the router finds out of a foreign replica, from priors five times wrong and within fifty requests."""

from __future__ import annotations

import random

import pytest

from router import ReplicaView, RoutingSettings
from tests.fleet.foreign import ForeignFleet, ForeignReplica, prompt_of

WRONG = pytest.mark.parametrize("wrong_by", [0.2, 5.0])
REQUESTS = 50


def talk_to(fleet: ForeignFleet, *, seed: int, num_bytes: int = 24_000) -> None:
    """Fifty requests: twenty new ones, then two of three come back to a prompt of before, recent or not."""
    draw = random.Random(seed)
    asked: list[bytes] = []
    for number in range(REQUESTS):
        if number >= 20 and number % 3:
            prompt = draw.choice(asked)
        else:
            prompt = prompt_of(number, int(num_bytes * draw.uniform(0.5, 1.5)))
            asked.append(prompt)
        fleet.ask(prompt)


def found(fleet: ForeignFleet) -> ReplicaView:
    (view,) = fleet.router.replicas()
    return view


@WRONG
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_how_many_bytes_a_token_stands_for(wrong_by: float, seed: int) -> None:
    fleet = ForeignFleet(ForeignReplica(), RoutingSettings(bytes_per_token=4.0 * wrong_by))

    talk_to(fleet, seed=seed)

    pool = fleet.router.pool("m")
    assert pool is not None
    assert pool.bytes_per_token == pytest.approx(4.0, rel=0.05)


@WRONG
@pytest.mark.parametrize("reports_cached", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_its_prefill_rate_and_fixed_cost(wrong_by: float, reports_cached: bool, seed: int) -> None:
    replica = ForeignReplica(reports_cached=reports_cached, jitter=0.1)
    fleet = ForeignFleet(replica, RoutingSettings(prefill_tok_s=8000 * wrong_by))

    talk_to(fleet, seed=seed)

    assert found(fleet).prefill_tok_s == pytest.approx(8000, rel=0.2)


@WRONG
def test_its_fixed_cost_from_prompts_of_many_lengths(wrong_by: float) -> None:
    fleet = ForeignFleet(ForeignReplica(fixed_s=0.05), RoutingSettings(fixed_s=0.05 * wrong_by))
    draw = random.Random(1)

    for number in range(REQUESTS):
        fleet.ask(prompt_of(number, draw.choice([500, 1000, 4000, 20_000])))

    assert found(fleet).fixed_s == pytest.approx(0.05, rel=0.2)


@WRONG
@pytest.mark.parametrize("reports_cached", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_how_much_its_cache_holds(wrong_by: float, reports_cached: bool, seed: int) -> None:
    replica = ForeignReplica(kv_tokens=100_000, reports_cached=reports_cached)
    fleet = ForeignFleet(replica, RoutingSettings(learned_tokens=int(100_000 * wrong_by)))

    talk_to(fleet, seed=seed)

    view = found(fleet)
    assert view.capacity_learned
    assert view.capacity_tokens == pytest.approx(100_000, rel=0.2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_of_it_at_once(seed: int) -> None:
    """Rate five times too high, tokens five times too long, a cache five times too large."""
    settings = RoutingSettings(prefill_tok_s=40_000, bytes_per_token=20.0, learned_tokens=500_000)
    fleet = ForeignFleet(ForeignReplica(jitter=0.1), settings)

    talk_to(fleet, seed=seed)

    view = found(fleet)
    assert view.prefill_tok_s == pytest.approx(8000, rel=0.25)
    assert view.capacity_tokens == pytest.approx(100_000, rel=0.25)
