from router.trust import Accuracy, EventStream, Step


def live_stream(epoch: str = "e1", applied: int = 3) -> EventStream:
    stream = EventStream()
    stream.hello(epoch, 0)
    for seq in range(1, applied + 1):
        stream.batch(seq)
    assert stream.exact
    return stream


def test_nothing_is_exact_before_a_greeting() -> None:
    stream = EventStream()

    assert stream.batch(1) is Step.GAP
    assert stream.load(0) is Step.GAP
    assert not stream.exact
    assert stream.resume_point is None


def test_a_greeting_of_a_replica_without_history_is_exact_at_once() -> None:
    stream = EventStream()

    assert stream.hello("e1", 0) is Step.RESTART
    assert stream.exact
    assert stream.load(0) is Step.APPLY


def test_a_greeting_with_history_is_exact_after_the_replay() -> None:
    stream = EventStream()
    stream.hello("e1", 2)
    assert not stream.exact

    assert stream.batch(1) is Step.APPLY
    assert not stream.exact
    assert stream.batch(2) is Step.APPLY
    assert stream.exact


def test_a_batch_seen_before_is_dropped() -> None:
    stream = live_stream(applied=3)

    assert stream.batch(3) is Step.DUPLICATE
    assert stream.batch(1) is Step.DUPLICATE
    assert stream.exact


def test_a_missing_batch_is_a_gap_until_it_is_here() -> None:
    stream = live_stream(applied=3)

    assert stream.batch(5) is Step.GAP
    assert not stream.exact
    assert stream.resume_point == ("e1", 3)

    assert stream.batch(4) is Step.APPLY
    assert not stream.exact
    assert stream.batch(5) is Step.APPLY
    assert stream.exact


def test_a_load_frame_shows_that_the_last_batch_was_lost() -> None:
    stream = live_stream(applied=3)

    assert stream.load(4) is Step.GAP
    assert not stream.exact


def test_a_new_epoch_is_a_restart() -> None:
    stream = live_stream(applied=3)

    assert stream.hello("e2", 0) is Step.RESTART
    assert stream.exact
    assert stream.resume_point == ("e2", 0)


def test_a_sequence_that_goes_backwards_is_a_restart() -> None:
    stream = live_stream(applied=3)

    assert stream.hello("e1", 1) is Step.RESTART
    assert not stream.exact
    assert stream.batch(1) is Step.APPLY
    assert stream.exact


def test_a_stream_that_comes_back_replays_what_it_missed() -> None:
    stream = live_stream(applied=3)
    stream.cut()
    assert not stream.exact
    assert stream.resume_point == ("e1", 3)

    assert stream.hello("e1", 4) is Step.APPLY
    assert not stream.exact
    assert stream.batch(4) is Step.APPLY
    assert stream.exact


def test_a_snapshot_closes_a_gap_and_older_frames_are_dropped() -> None:
    stream = live_stream(applied=3)
    stream.batch(9)

    stream.snapshot("e1", 10)

    assert stream.exact
    assert stream.batch(10) is Step.DUPLICATE
    assert stream.load(9) is Step.APPLY
    assert stream.batch(11) is Step.APPLY


def test_a_snapshot_older_than_what_was_lost_does_not_close_the_gap() -> None:
    stream = live_stream(applied=3)
    stream.batch(9)

    stream.snapshot("e1", 8)

    assert not stream.exact
    assert stream.batch(9) is Step.APPLY
    assert stream.exact


def test_a_snapshot_is_exact_only_with_a_stream_after_it() -> None:
    stream = EventStream()
    stream.snapshot("e1", 8)
    assert not stream.exact
    assert stream.resume_point == ("e1", 8)

    assert stream.hello("e1", 8) is Step.APPLY
    assert stream.exact


def test_a_disowned_picture_is_not_exact_and_is_replayed_from_the_start() -> None:
    stream = live_stream(applied=3)

    stream.disown()

    assert not stream.exact
    assert stream.resume_point == ("e1", 0)
    assert stream.batch(4) is Step.GAP
    assert EventStream().resume_point is None


def test_accuracy_is_unknown_before_the_first_answer() -> None:
    accuracy = Accuracy()

    assert accuracy.precision is None
    assert accuracy.recall is None


def test_accuracy_compares_sums_of_predicted_and_reported_tokens() -> None:
    accuracy = Accuracy()
    accuracy.count(100, 80)
    accuracy.count(0, 20)

    assert (accuracy.predicted, accuracy.reported, accuracy.agreed) == (100, 100, 80)
    assert accuracy.precision == 0.8
    assert accuracy.recall == 0.8
