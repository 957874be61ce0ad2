from collections import Counter

from router.policies import Candidate, Turn, cost, random, round_robin
from router.trust import Trust


def candidate(replica: str, cost_s: float = 1.0, matched_tokens: int = 0, wait_s: float = 0.0) -> Candidate:
    return Candidate(replica, True, "", matched_tokens, 100, wait_s, cost_s - wait_s, cost_s, Trust.EXACT)


def turn(draw: float = 0.0, number: int = 0) -> Turn:
    return Turn(draw=draw, number=number, tie_ratio=0.05)


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
