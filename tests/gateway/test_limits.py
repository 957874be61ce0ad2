import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import Admitted, Refused, RequestLimiter


def test_a_key_may_use_its_whole_minute_at_once_and_not_one_request_more() -> None:
    limiter = RequestLimiter()

    verdicts = [limiter.try_acquire("a", 3, now=10.0) for _ in range(4)]

    assert verdicts[:3] == [Admitted(3, remaining, reset_s=60.0) for remaining in (2, 1, 0)]
    assert verdicts[3] == Refused(3, retry_after_s=60.0, reset_s=60.0)


def test_a_refused_request_says_exactly_when_to_come_back() -> None:
    limiter = RequestLimiter()
    limiter.try_acquire("a", 2, now=0.0)
    limiter.try_acquire("a", 2, now=20.0)

    refused = limiter.try_acquire("a", 2, now=30.0)

    assert refused == Refused(2, retry_after_s=30.0, reset_s=50.0)
    assert isinstance(limiter.try_acquire("a", 2, now=59.9), Refused)
    assert isinstance(limiter.try_acquire("a", 2, now=60.0), Admitted)


def test_a_refused_request_costs_nothing() -> None:
    limiter = RequestLimiter()
    limiter.try_acquire("a", 1, now=0.0)
    for tick in range(1, 60):
        assert isinstance(limiter.try_acquire("a", 1, now=float(tick)), Refused)

    assert isinstance(limiter.try_acquire("a", 1, now=60.0), Admitted)


def test_keys_do_not_share_a_limit() -> None:
    limiter = RequestLimiter()
    limiter.try_acquire("a", 1, now=0.0)

    assert isinstance(limiter.try_acquire("b", 1, now=0.0), Admitted)


def test_a_key_without_a_limit_of_its_own_gets_the_default() -> None:
    limiter = RequestLimiter(default_rate=1)
    limiter.try_acquire("a", None, now=0.0)

    assert isinstance(limiter.try_acquire("a", None, now=0.0), Refused)
    assert isinstance(limiter.try_acquire("b", 5, now=0.0), Admitted)


def test_without_any_limit_nothing_is_counted_or_kept() -> None:
    limiter = RequestLimiter()

    assert limiter.try_acquire("a", None, now=0.0) is None
    assert len(limiter) == 0


def test_a_lowered_limit_waits_until_enough_requests_have_left_the_window() -> None:
    limiter = RequestLimiter()
    for second in range(5):
        limiter.try_acquire("a", 5, now=float(second))

    refused = limiter.try_acquire("a", 2, now=10.0)

    assert isinstance(refused, Refused)
    assert refused.retry_after_s == pytest.approx(3 + 60 - 10)
    assert isinstance(limiter.try_acquire("a", 2, now=10.0 + refused.retry_after_s), Admitted)


def test_idle_keys_are_forgotten() -> None:
    limiter = RequestLimiter()
    for number in range(100):
        limiter.try_acquire(f"key-{number}", 10, now=0.0)

    limiter.try_acquire("late", 10, now=121.0)

    assert len(limiter) == 1


@given(
    rate=st.integers(1, 8),
    steps_ms=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 70_000)), max_size=60),
    keys=st.data(),
)
def test_no_window_of_a_minute_ever_holds_more_than_the_rate(
    rate: int, steps_ms: list[int], keys: st.DataObject
) -> None:
    limiter = RequestLimiter()
    now_ms = 0
    admitted: dict[str, list[int]] = {"a": [], "b": []}

    for step_ms in steps_ms:
        now_ms += step_ms
        key = keys.draw(st.sampled_from(["a", "b"]))
        # Whole milliseconds as multiples of 1/1024 s: exact as floats, so the border of a window is tested exactly.
        verdict = limiter.try_acquire(key, rate, now_ms / 1024)
        within = [time for time in admitted[key] if time > now_ms - 60 * 1024]
        assert isinstance(verdict, Admitted) == (len(within) < rate)
        if isinstance(verdict, Admitted):
            admitted[key].append(now_ms)
            assert verdict.remaining == rate - len(within) - 1

    for times in admitted.values():
        for start in times:
            assert sum(start <= time < start + 60 * 1024 for time in times) <= rate


@given(rate=st.integers(1, 5), steps_ms=st.lists(st.integers(0, 30_000), max_size=40))
def test_whoever_waits_as_long_as_told_is_admitted(rate: int, steps_ms: list[int]) -> None:
    limiter = RequestLimiter()
    now = 0.0
    for step_ms in steps_ms:
        now += step_ms / 1024
        verdict = limiter.try_acquire("a", rate, now)
        if isinstance(verdict, Refused):
            now += verdict.retry_after_s
            assert isinstance(limiter.try_acquire("a", rate, now), Admitted)
