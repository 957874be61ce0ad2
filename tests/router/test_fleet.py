import math
from collections.abc import Sequence

import pytest

from router.breaker import Pass
from router.fleet import Outcome, Replica, Reservation, ReservationError
from router.index import Index
from router.settings import RoutingSettings
from router.trust import Trust
from router.wire import Hello, Load, ReplicaSpec

RATE = 1000.0
SETTINGS = RoutingSettings(prefill_tok_s=RATE, fixed_s=0.02, running_s=0.001)


def replica(settings: RoutingSettings = SETTINGS) -> Replica:
    return Replica("r", ReplicaSpec(url="http://h", model="m", credential="secret"), Index().join(), settings)


def reserve(
    subject: Replica,
    tokens: int,
    now: float = 0.0,
    *,
    request_id: str = "x",
    matched: int = 0,
    streamed: bool = True,
) -> Reservation:
    reservation = Reservation(
        replica=subject,
        request_id=request_id,
        names=(),
        stamp=now,
        matched_tokens=matched,
        uncached_tokens=tokens,
        streamed=streamed,
        begun_at=now,
        permit=Pass(0, trial=False),
    )
    subject.reserve(reservation)
    return reservation


def load(
    *,
    tokens: int = 0,
    running: int = 0,
    rate: float = RATE,
    step_ms: float = 0.0,
    admitted: Sequence[str] = (),
) -> Load:
    return Load(
        seq=0,
        ts=0.0,
        waiting=0,
        waiting_uncached_tokens=tokens,
        running=running,
        kv_used_blocks=0,
        prefill_tok_s=rate,
        step_ms=step_ms,
        admitted=list(admitted),
    )


def hello(max_num_seqs: int) -> Hello:
    return Hello(
        epoch="e",
        seq=0,
        model="m",
        block_size=16,
        tokenizer_digest="d",
        numerics="n",
        capacity_blocks=100,
        max_num_seqs=max_num_seqs,
        started_at=0.0,
    )


# -- wait


def test_without_load_frames_our_own_promises_are_the_wait() -> None:
    subject = replica()
    first = reserve(subject, 500)
    reserve(subject, 300)
    assert subject.wait_s(0.0, RATE) == pytest.approx(0.8)

    subject.answered(first, 0.5)

    assert subject.wait_s(0.5, RATE) == pytest.approx(0.3 + SETTINGS.running_s)


def test_what_the_first_prompt_has_done_by_now_is_no_wait_any_more() -> None:
    subject = replica()
    reserve(subject, 500)
    reserve(subject, 300)

    assert subject.wait_s(0.2, RATE) == pytest.approx(0.6)
    assert subject.wait_s(9.0, RATE) == pytest.approx(0.3)


def test_the_load_frame_is_the_truth_and_decays_at_the_prefill_rate() -> None:
    subject = replica()
    subject.take_load(load(tokens=800), 1.0)

    assert subject.wait_s(1.0, RATE) == pytest.approx(0.8)
    assert subject.wait_s(1.5, RATE) == pytest.approx(0.3)
    assert subject.wait_s(3.5, RATE) == 0.0


def test_a_promise_counts_beside_the_load_frame_until_the_replica_admitted_it() -> None:
    subject = replica()
    mine = reserve(subject, 500, request_id="mine")
    subject.take_load(load(tokens=200), 0.0)
    assert subject.wait_s(0.0, RATE) == pytest.approx(0.7)

    subject.take_load(load(tokens=700, admitted=["others", "mine"]), 0.0)
    assert subject.wait_s(0.0, RATE) == pytest.approx(0.7)

    subject.answered(mine, 0.0)
    assert subject.unadmitted_tokens == 0


def test_an_old_load_frame_is_no_truth_any_more() -> None:
    subject = replica()
    reserve(subject, 500, request_id="mine")
    subject.take_load(load(tokens=100_000, admitted=["mine"]), 0.0)
    assert subject.wait_s(1.0, RATE) == pytest.approx(99.0)

    assert subject.wait_s(SETTINGS.load_fresh_s, RATE) == pytest.approx(0.0)

    subject.take_load(load(tokens=100_000), 10.0)
    subject.lose_stream(10.0)
    assert subject.wait_s(10.0, RATE) == pytest.approx(0.0)


def test_running_decodes_add_up_to_one_step() -> None:
    subject = replica()
    subject.hello = hello(max_num_seqs=10)
    subject.take_load(load(running=5, step_ms=40.0), 0.0)

    assert subject.wait_s(0.0, RATE) == pytest.approx(0.02)


def test_a_prompt_that_comes_first_in_line_has_done_nothing_while_it_waited() -> None:
    subject = replica()
    first = reserve(subject, 500)
    reserve(subject, 300)
    cancelled = reserve(subject, 100)
    subject.finish(cancelled, 0.3, Outcome.CANCELLED, None)
    assert subject.wait_s(0.4, RATE) == pytest.approx(0.4)

    subject.finish(first, 0.4, Outcome.CANCELLED, None)

    assert subject.wait_s(0.4, RATE) == pytest.approx(0.3)
    assert subject.wait_s(0.5, RATE) == pytest.approx(0.2)


@pytest.mark.parametrize("number", [0, -1, -(2**63), 2**64 - 1])
@pytest.mark.parametrize("rate", [0.0, -5.0, math.nan, math.inf, 1e300])
def test_numbers_from_a_replica_never_make_the_wait_negative_or_nan(number: int, rate: float) -> None:
    subject = replica()
    subject.hello = hello(max_num_seqs=number)
    subject.take_load(load(tokens=number, running=number, rate=rate, step_ms=rate), 0.0)

    assert subject.rate is None
    assert subject.wait_s(0.5, RATE) >= 0.0


# -- promises


def test_a_reservation_is_released_exactly_once() -> None:
    subject = replica()
    reservation = reserve(subject, 500)
    subject.finish(reservation, 1.0, Outcome.CANCELLED, None)

    with pytest.raises(ReservationError):
        subject.finish(reservation, 1.0, Outcome.OK, None)
    with pytest.raises(ReservationError):
        subject.answered(reservation, 1.0)

    assert (subject.inflight, subject.unanswered_tokens, subject.unadmitted_tokens) == (0, 0, 0)


def test_a_first_byte_counts_once() -> None:
    subject = replica()
    reservation = reserve(subject, 500)
    reserve(subject, 300)
    subject.answered(reservation, 1.0)
    subject.answered(reservation, 2.0)

    assert subject.unanswered_tokens == 300
    assert subject.inflight == 2


def test_requests_with_the_same_id_are_told_apart_when_they_end() -> None:
    subject = replica()
    first, second = reserve(subject, 500, request_id="x"), reserve(subject, 300, request_id="x")
    subject.take_load(load(admitted=["x"]), 0.0)
    subject.finish(second, 1.0, Outcome.OK, None)
    subject.finish(first, 1.0, Outcome.OK, None)

    assert (subject.inflight, subject.unanswered_tokens, subject.unadmitted_tokens) == (0, 0, 0)


# -- what is learned


def answer(subject: Replica, tokens: int, true_rate: float, now: float) -> float:
    """One prompt alone on a replica of that rate; when it ended."""
    reservation = reserve(subject, tokens, now)
    now += SETTINGS.fixed_s + tokens / true_rate
    subject.answered(reservation, now)
    subject.finish(reservation, now, Outcome.OK, 0)
    return now


@pytest.mark.parametrize("wrong_by", [0.2, 5.0])
def test_the_rate_of_a_foreign_replica_is_learned_from_a_prior_five_times_wrong(wrong_by: float) -> None:
    subject = replica()
    now = 0.0
    for number in range(50):
        now = answer(subject, 200 + 37 * number, RATE * wrong_by, now)

    assert subject.rate == pytest.approx(RATE * wrong_by, rel=0.05)


def test_a_prompt_that_was_not_alone_teaches_no_rate() -> None:
    subject = replica()
    first = reserve(subject, 5000, 0.0)
    second = reserve(subject, 5000, 0.1)
    for reservation in (first, second):
        subject.answered(reservation, 60.0)
        subject.finish(reservation, 60.0, Outcome.OK, 0)

    assert subject.rate is None


def test_prompts_without_work_disturb_no_sample() -> None:
    subject = replica()
    cached_before = reserve(subject, 16, -1.0, matched=5000)
    reservation = reserve(subject, 5000, 0.0)
    reserve(subject, 16, 0.1, matched=5000)
    subject.answered(reservation, SETTINGS.fixed_s + 10.0)
    subject.finish(reservation, 11.0, Outcome.OK, None)

    assert subject.rate == pytest.approx(RATE / 2, rel=0.1)
    subject.finish(cached_before, 12.0, Outcome.OK, None)
    assert subject.pace.samples == 1


def test_cached_tokens_that_are_never_reported_are_not_taken_for_none() -> None:
    """Only prompts that nothing was cached of teach the rate then, and 0 from a replica that never counted is no report."""
    subject = replica()
    for cached_tokens in (None, 0):
        reservation = reserve(subject, 200, 0.0, matched=9800)
        subject.answered(reservation, 0.1)
        subject.finish(reservation, 1.0, Outcome.OK, cached_tokens)

    assert subject.pace.samples == 0


def test_an_answer_that_came_as_a_whole_teaches_no_rate() -> None:
    subject = replica()
    reservation = reserve(subject, 5000, streamed=False)
    subject.finish(reservation, 60.0, Outcome.OK, 0)

    assert subject.rate is None


def test_a_cached_prompt_teaches_by_what_was_computed() -> None:
    subject = replica()
    reservation = reserve(subject, 10_000, 0.0)
    subject.answered(reservation, SETTINGS.fixed_s + 0.5)
    subject.finish(reservation, 1.0, Outcome.OK, 9_500)

    assert subject.rate == pytest.approx(RATE, rel=0.01)


def test_one_odd_sample_moves_the_rate_little() -> None:
    subject = replica()
    now = 0.0
    for _ in range(10):
        now = answer(subject, 1000, RATE, now)

    answer(subject, 100_000, 1e12, now)

    assert subject.rate == pytest.approx(RATE, rel=0.2)


def test_a_reported_rate_is_not_overruled_by_samples() -> None:
    subject = replica()
    subject.take_load(load(rate=4321.0), 0.0)
    answer(subject, 5000, 100.0, 0.0)
    subject.take_load(load(rate=0.0), 1.0)

    assert subject.rate == 4321.0


@pytest.mark.parametrize(("reported", "counted"), [(480, 480), (-5, 0), (10**12, 1000)])
def test_cached_tokens_are_counted_within_what_is_possible(reported: int, counted: int) -> None:
    subject = replica()
    reservation = reserve(subject, 200, matched=800)
    subject.finish(reservation, 1.0, Outcome.OK, reported)

    accuracy = subject.accuracy
    assert (accuracy.predicted, accuracy.reported, accuracy.agreed) == (800, counted, min(800, counted))


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.BUSY, Outcome.CLIENT_ERROR, Outcome.CANCELLED])
def test_only_good_answers_are_compared_with_the_prediction(outcome: Outcome) -> None:
    subject = replica()
    subject.finish(reserve(subject, 200, matched=800), 1.0, outcome, 0)

    assert subject.accuracy.predicted == 0


# -- may it be used?


def test_every_reason_has_its_word() -> None:
    subject = replica()
    assert subject.why_not(0.0) == "unhealthy"

    subject.healthy = True
    assert subject.why_not(0.0) == ""

    subject.finish(reserve(subject, 1), 0.0, Outcome.BUSY, None)
    assert subject.why_not(0.0) == "busy"
    assert subject.why_not(SETTINGS.busy_s) == ""

    for _ in range(SETTINGS.eject_after):
        subject.finish(reserve(subject, 1), 0.0, Outcome.FAILED, None)
    assert subject.why_not(0.0) == "ejected"

    subject.draining = True
    assert subject.why_not(0.0) == "draining"
    subject.cordoned = True
    assert subject.why_not(0.0) == "cordoned"
    subject.mismatch = "another model"
    assert subject.why_not(0.0) == "mismatch"


def test_the_view_does_not_show_the_credential() -> None:
    view = replica().view()

    assert view.spec.credential == ""
    assert "secret" not in repr(view)


def test_a_replica_without_events_is_blind_when_nothing_shall_be_learned() -> None:
    assert replica().trust is Trust.LEARNING
    assert replica(RoutingSettings(learned_tokens=0)).trust is Trust.BLIND
