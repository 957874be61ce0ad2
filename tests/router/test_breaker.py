from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import _NEXT, Breaker, BreakerState, Pass, Verdict, _Event


def breaker() -> Breaker:
    return Breaker(eject_after=5, eject_s=30.0, max_eject_s=300.0)


def fail(subject: Breaker, times: int, now: float) -> None:
    for _ in range(times):
        subject.end(subject.begin(now), Verdict.BAD, now)


def trial(subject: Breaker, verdict: Verdict, now: float) -> None:
    permit = subject.begin(now)
    assert permit.trial
    subject.end(permit, verdict, now)


def test_five_failures_in_a_row_eject_for_thirty_seconds() -> None:
    subject = breaker()
    fail(subject, 4, now=0.0)
    assert subject.admits(0.0)

    fail(subject, 1, now=1.0)

    assert subject.state is BreakerState.OPEN
    assert not subject.admits(30.9)
    assert subject.admits(31.0)


def test_a_success_between_failures_starts_the_count_anew() -> None:
    subject = breaker()
    fail(subject, 4, now=0.0)
    subject.end(subject.begin(0.0), Verdict.GOOD, 0.0)
    fail(subject, 4, now=0.0)

    assert subject.state is BreakerState.CLOSED


def test_answers_that_decide_nothing_neither_eject_nor_forgive() -> None:
    subject = breaker()
    for _ in range(1000):
        subject.end(subject.begin(0.0), Verdict.NOTHING, 0.0)
    assert subject.admits(0.0)

    fail(subject, 4, now=0.0)
    subject.end(subject.begin(0.0), Verdict.NOTHING, 0.0)
    fail(subject, 1, now=0.0)

    assert subject.state is BreakerState.OPEN


def test_a_first_byte_alone_does_not_forgive_failures() -> None:
    subject = breaker()
    for _ in range(5):
        permit = subject.begin(0.0)
        subject.first_byte(permit, 0.0)
        subject.end(permit, Verdict.BAD, 0.0)

    assert subject.state is BreakerState.OPEN


def test_after_the_ejection_one_request_is_let_through() -> None:
    subject = breaker()
    fail(subject, 5, now=0.0)

    permit = subject.begin(30.0)

    assert permit.trial
    assert subject.state is BreakerState.TRIAL
    assert not subject.admits(30.0)
    assert not subject.begin(30.0).trial


def test_the_first_byte_of_the_trial_closes_the_breaker() -> None:
    subject = breaker()
    fail(subject, 5, now=0.0)

    subject.first_byte(subject.begin(30.0), 31.0)

    assert subject.state is BreakerState.CLOSED
    assert subject.admits(31.0)


def test_each_failed_trial_ejects_for_longer_up_to_the_cap() -> None:
    subject = breaker()
    fail(subject, 5, now=0.0)
    lengths = []
    for _ in range(12):
        now = subject.until
        trial(subject, Verdict.BAD, now)
        lengths.append(subject.until - now)

    assert lengths == [60.0, 90.0, 120.0, 150.0, 180.0, 210.0, 240.0, 270.0, 300.0, 300.0, 300.0, 300.0]


def test_a_trial_that_shows_nothing_is_followed_by_another() -> None:
    subject = breaker()
    fail(subject, 5, now=0.0)

    trial(subject, Verdict.NOTHING, 30.0)

    assert subject.admits(30.0)
    trial(subject, Verdict.GOOD, 30.0)
    assert subject.state is BreakerState.CLOSED


def test_failing_again_soon_after_the_return_ejects_for_longer() -> None:
    subject = breaker()
    fail(subject, 5, now=0.0)
    trial(subject, Verdict.GOOD, 30.0)

    fail(subject, 5, now=40.0)

    assert subject.until == 40.0 + 60.0


def test_a_replica_that_was_well_for_long_starts_anew() -> None:
    subject = breaker()
    fail(subject, 5, now=0.0)
    trial(subject, Verdict.GOOD, 30.0)

    fail(subject, 5, now=60.0)

    assert subject.until == 60.0 + 30.0


def test_results_of_requests_begun_before_the_ejection_are_ignored() -> None:
    subject = breaker()
    early = [subject.begin(0.0) for _ in range(20)]
    for permit in early[:5]:
        subject.end(permit, Verdict.BAD, 1.0)
    assert subject.until == 31.0

    for permit in early[5:10]:
        subject.end(permit, Verdict.BAD, 2.0)
    subject.end(early[10], Verdict.GOOD, 2.0)

    assert not subject.admits(2.0)
    assert subject.until == 31.0

    trial(subject, Verdict.GOOD, 31.0)
    for permit in early[11:]:
        subject.end(permit, Verdict.BAD, 32.0)
    assert subject.state is BreakerState.CLOSED


def test_a_request_sent_although_ejected_can_bring_the_replica_back_but_not_prolong_its_ejection() -> None:
    subject = breaker()
    fail(subject, 5, now=0.0)

    fail(subject, 10, now=10.0)
    assert subject.until == 30.0

    subject.first_byte(subject.begin(11.0), 11.0)
    assert subject.state is BreakerState.CLOSED


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    subject = breaker()
    for state, event in product(BreakerState, _Event):
        if (state, event) not in _NEXT:
            subject.state = state
            with pytest.raises(KeyError):
                subject._move(event)
            assert subject.state is state


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "byte", *Verdict]), st.integers(0, 9), st.floats(0, 40)), max_size=60)
)
@settings(max_examples=200, deadline=None)
def test_no_order_of_results_raises_and_an_ejected_replica_is_always_tried_again(
    story: list[tuple[str | Verdict, int, float]],
) -> None:
    subject = breaker()
    now, permits = 0.0, list[Pass]()
    for event, which, passed_s in story:
        now += passed_s
        if event == "begin" or not permits:
            permits.append(subject.begin(now))
        elif isinstance(event, Verdict):
            subject.end(permits.pop(which % len(permits)), event, now)
        else:
            subject.first_byte(permits[which % len(permits)], now)
    for permit in permits:
        subject.end(permit, Verdict.NOTHING, now)

    assert subject.state is not BreakerState.TRIAL
    assert subject.until <= now + 300.0
    assert subject.admits(now + 300.0)
