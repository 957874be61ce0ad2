import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.health import Answer, Health, ProbeRules

RULES = ProbeRules(every_s=5.0, rise=2, fall=3)
G, B, N = Answer.GOOD, Answer.BAD, Answer.NOBODY


@pytest.mark.parametrize(
    ("answers", "up"),
    [
        ([G], False),
        ([G, G], True),
        ([G, B, G], False),
        ([G, G, B, B], True),
        ([G, G, B, B, B], False),
        ([G, G, B, B, G, B, B], True),
        ([G, G, B, B, B, G], False),
        ([G, G, B, B, B, G, G], True),
        ([G, G, N], False),
        ([N, G], False),
        ([N, G, G], True),
    ],
)
def test_it_takes_several_answers_in_a_row_and_a_refused_connection_only_once(answers: list[Answer], up: bool) -> None:
    health = Health()

    assert [health.count(answer, RULES) for answer in answers][-1] is up


def test_a_new_replica_is_asked_quickly_one_in_doubt_soon_and_a_settled_one_rarely() -> None:
    health = Health()
    waits = []
    for answer in (G, G, B, B, B, G, G):
        health.count(answer, RULES)
        waits.append(health.wait_s(RULES, draw=0.5))

    assert waits == [0.1, 5.0, 1.0, 1.0, 1.0, 1.0, 5.0]


def test_a_fleet_is_asked_at_different_times_and_no_replica_later_than_a_fifth() -> None:
    health = Health()
    health.count(G, RULES)
    health.count(G, RULES)

    assert [health.wait_s(RULES, draw) for draw in (0.0, 0.5, 1.0)] == pytest.approx([4.0, 5.0, 6.0])


@given(
    answers=st.lists(st.sampled_from(Answer), max_size=60),
    rise=st.integers(1, 5),
    fall=st.integers(1, 5),
)
def test_a_verdict_changes_only_after_enough_answers_of_its_kind(answers: list[Answer], rise: int, fall: int) -> None:
    rules = ProbeRules(rise=rise, fall=fall)
    health = Health()
    up = False
    for number, answer in enumerate(answers, start=1):
        before, up = up, health.count(answer, rules)
        if up and not before:
            assert answers[number - rise : number] == [G] * rise
        if before and not up:
            assert answer is N or G not in answers[max(number - fall, 0) : number]
        if answers[max(number - rise, 0) : number] == [G] * rise:
            assert up
