from collections import Counter
from typing import get_args

import msgspec

from router.policies import (
    POLICIES,
    Candidate,
    Turn,
    consistent_hash,
    cost,
    least_load,
    power_of_two,
    prefix,
    random,
    round_robin,
    sticky_until_saturated,
)
from router.settings import PolicyName
from router.trust import Trust


def candidate(
    replica: str, cost_s: float = 1.0, matched_tokens: int = 0, wait_s: float = 0.0, inflight: int = 0
) -> Candidate:
    """A prompt of 100 tokens there."""
    uncached = 100 - matched_tokens
    own_s = cost_s - wait_s
    return Candidate(replica, True, "", matched_tokens, uncached, wait_s, own_s, cost_s, Trust.EXACT, inflight)


def turn(draw: float = 0.0, number: int = 0, key: int = 1) -> Turn:
    return Turn(draw=draw, number=number, tie_ratio=0.05, key=key, saturated_s=18.0)


def test_cost_takes_the_least_seconds() -> None:
    chosen, reason = cost([candidate("a", 2.0), candidate("b", 1.0), candidate("c", 3.0)], turn())

    assert (chosen.replica, reason) == ("b", "no_prefix")


def test_cost_breaks_ties_by_the_draw_evenly() -> None:
    choices = [candidate(name) for name in "abcd"]

    counts = Counter(cost(choices, turn(draw / 100))[0].replica for draw in range(100))

    assert counts == {"a": 25, "b": 25, "c": 25, "d": 25}


def test_cost_does_not_follow_the_noise_of_measured_rates() -> None:
    choices = [candidate("a", 1.03), candidate("b", 1.0), candidate("c", 1.2)]

    assert {cost(choices, turn(draw))[0].replica for draw in (0.0, 0.6)} == {"a", "b"}


def test_cost_prefers_the_longest_match_among_equals() -> None:
    chosen, reason = cost([candidate("a", 1.04, 32), candidate("b", 1.0, 16)], turn(0.9))

    assert (chosen.replica, reason) == ("a", "longest_prefix")


def test_among_equals_cost_leaves_to_another_gateway_what_that_one_chooses_first() -> None:
    elsewhere = msgspec.structs.replace(candidate("a", 10.0), away_s=0.3)

    assert {cost([elsewhere, candidate("b", 10.0)], turn(draw))[0].replica for draw in (0.0, 0.9)} == {"b"}


def test_cost_prefers_the_least_wait_among_equal_matches() -> None:
    chosen, _ = cost([candidate("a", wait_s=0.02), candidate("b", 1.01, wait_s=0.01)], turn())

    assert chosen.replica == "b"


def test_cost_tells_when_the_longest_match_was_too_busy() -> None:
    chosen, reason = cost([candidate("a", 2.0, 64), candidate("b", 1.0)], turn())

    assert (chosen.replica, reason) == ("b", "prefix_busy")


def test_cost_tells_when_there_was_no_choice() -> None:
    assert cost([candidate("a")], turn())[1] == "only_replica"


def test_round_robin_goes_in_turn() -> None:
    choices = [candidate(name) for name in "abc"]

    assert [round_robin(choices, turn(number=number))[0].replica for number in range(4)] == ["a", "b", "c", "a"]


def test_random_follows_the_draw() -> None:
    choices = [candidate(name) for name in "ab"]

    assert [random(choices, turn(draw))[0].replica for draw in (0.0, 0.49, 0.5, 0.99)] == ["a", "a", "b", "b"]


def test_every_name_has_its_policy() -> None:
    assert set(POLICIES) == set(get_args(PolicyName))


def test_least_load_counts_requests_and_no_work() -> None:
    choices = [candidate("a", 9.0, inflight=1), candidate("b", 0.1, 96, inflight=2), candidate("c", inflight=1)]

    assert [least_load(choices, turn(draw))[0].replica for draw in (0.0, 0.6)] == ["a", "c"]


def test_power_of_two_draws_every_pair_alike_and_takes_the_emptier_one() -> None:
    choices = [candidate(name, inflight=count) for count, name in enumerate("abcd")]

    counts = Counter(power_of_two(choices, turn(draw / 120))[0].replica for draw in range(120))

    assert counts == {"a": 60, "b": 40, "c": 20}, "each is in half of the pairs, and the fullest one wins none"


def test_power_of_two_can_do_with_one() -> None:
    assert power_of_two([candidate("a")], turn(0.9))[0].replica == "a"


def test_consistent_hash_keeps_a_conversation_in_its_place_and_spreads_conversations() -> None:
    choices = [candidate(name) for name in "abcd"]

    places = [consistent_hash(choices, turn(key=key))[0].replica for key in range(400)]

    assert places == [consistent_hash(choices[::-1], turn(0.7, 5, key))[0].replica for key in range(400)]
    assert all(70 < count < 130 for count in Counter(places).values())


def test_consistent_hash_moves_only_the_conversations_of_a_replica_that_left() -> None:
    choices = [candidate(name) for name in "abcd"]

    for key in range(100):
        before = consistent_hash(choices, turn(key=key))[0].replica
        after = consistent_hash(choices[:3], turn(key=key))[0].replica
        assert after == before or before == "d"


def test_consistent_hash_bounds_the_load_of_a_popular_place() -> None:
    counts = Counter[str]()
    for _ in range(40):
        choices = [candidate(name, inflight=counts[name]) for name in "abcd"]
        counts[consistent_hash(choices, turn(key=7))[0].replica] += 1

    assert sum(counts.values()) == 40
    assert max(counts.values()) <= 13, "a quarter over the mean, rounded up"


def test_prefix_takes_the_longest_match_when_it_is_most_of_the_prompt() -> None:
    choices = [candidate("a", matched_tokens=64, inflight=30), candidate("b", matched_tokens=48), candidate("c")]

    assert (prefix(choices, turn())[0].replica, prefix(choices, turn())[1]) == ("a", "longest_prefix")


def test_prefix_takes_the_fewest_requests_when_half_or_less_matches() -> None:
    choices = [candidate("a", matched_tokens=50, inflight=3), candidate("b", inflight=2)]

    assert prefix(choices, turn()) == (choices[1], "no_prefix")


def test_prefix_forgets_the_cache_when_requests_are_uneven() -> None:
    choices = [candidate("a", matched_tokens=96, inflight=33), candidate("b")]

    assert prefix(choices, turn()) == (choices[1], "imbalance")


def test_sticky_stays_with_the_cache_however_unequal_the_waits_below_saturation() -> None:
    choices = [candidate("a", 18.0, 80, 17.9), candidate("b", 0.1), candidate("c", 1.0, 79, 0.5)]

    assert sticky_until_saturated(choices, turn()) == (choices[0], "longest_prefix")


def test_sticky_leaves_a_saturated_cache_for_the_least_wait() -> None:
    choices = [candidate("a", 20.0, 96, 19.9), candidate("b", 1.0, 0, 0.2), candidate("c", 1.0, 48, 0.3)]

    assert sticky_until_saturated(choices, turn()) == (choices[1], "prefix_busy")


def test_sticky_takes_the_least_wait_for_a_new_prompt() -> None:
    choices = [candidate("a", 1.0, 48, 0.5), candidate("b", 1.4, 0, 0.4)]

    assert sticky_until_saturated(choices, turn()) == (choices[1], "no_prefix")
