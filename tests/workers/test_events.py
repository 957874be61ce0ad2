import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.wire import Batch, FrameDecoder, Load, Stored, encode_frame
from workers.events import (
    LOAD_MAX_INTERVAL_S,
    LOAD_MIN_INTERVAL_S,
    SNAPSHOT_BATCH_BYTES,
    BlockMirror,
    EventLog,
    LoadThrottle,
    snapshot_batches,
)
from workers.protocol import StepReport, StoredRun

ROOT = 1


def step(
    *,
    stored: list[StoredRun] | None = None,
    removed: list[int] | None = None,
    cleared: bool = False,
    admitted: list[str] | None = None,
    running: int = 0,
    prefill_tok_s: float = 1000.0,
) -> StepReport:
    return StepReport(
        stored=stored or [],
        removed=removed or [],
        cleared=cleared,
        admitted=admitted or [],
        waiting=0,
        waiting_uncached_tokens=0,
        running=running,
        kv_used_blocks=0,
        kv_cached_blocks=0,
        prefill_tok_s=prefill_tok_s,
        step_ms=1.0,
        prompt_tokens_total=0,
        cached_tokens_total=0,
        generated_tokens_total=0,
        preemptions_total=0,
    )


def batches(frames: list[bytes]) -> list[Batch]:
    decoded = list(FrameDecoder().feed(b"".join(frames)))
    assert all(isinstance(frame, Batch) for frame in decoded)
    return [frame for frame in decoded if isinstance(frame, Batch)]


def applied(frames: list[Batch]) -> dict[int, int]:
    """What a listener holds after these batches. A child before its parent is an error."""
    parents: dict[int, int] = {}
    for batch in frames:
        if batch.cleared:
            parents.clear()
        for name in batch.removed:
            del parents[name]
        for run in batch.stored:
            parent = run.parent
            for name in run.names:
                assert parent == ROOT or parent in parents
                parents[name] = parent
                parent = name
    return parents


class EngineCache(RuleBasedStateMachine):
    """Any history of an engine's cache: a name is stored under a held parent and removed before its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.log = EventLog(ring_batches=1_000_000)
        self.held: dict[int, int] = {}
        self.next_name = 100
        self.published: list[bytes] = []

    def publish(self, report: StepReport) -> None:
        frames = self.log.append(report, ts=0.0)
        assert frames
        self.published += frames

    @rule(data=st.data(), length=st.integers(1, 5))
    def store_a_run(self, data: st.DataObject, length: int) -> None:
        parent = data.draw(st.sampled_from([ROOT, *self.held]))
        names = list(range(self.next_name, self.next_name + length))
        self.next_name += length
        self.held |= dict(zip(names, [parent, *names], strict=False))
        self.publish(step(stored=[StoredRun(parent, names)]))

    @rule(data=st.data())
    def evict_a_leaf_and_store_it_again_elsewhere_later(self, data: st.DataObject) -> None:
        leaves = sorted(set(self.held) - set(self.held.values()))
        if not leaves:
            return
        name = data.draw(st.sampled_from(leaves))
        parent = self.held.pop(name)
        self.publish(step(removed=[name]))
        if data.draw(st.booleans()):
            self.held[name] = parent
            self.publish(step(stored=[StoredRun(parent, [name])]))

    @rule()
    def clear(self) -> None:
        self.held.clear()
        self.publish(step(cleared=True))

    @invariant()
    def every_way_to_learn_the_cache_gives_the_same(self) -> None:
        links = self.log.mirror.links()

        assert dict(links) == self.held
        assert applied(batches(self.published)) == self.held
        assert applied(list(snapshot_batches(links, self.log.seq, 0.0))) == self.held

    @invariant()
    def a_replay_is_the_tail_of_what_was_published(self) -> None:
        for after in range(self.log.seq + 1):
            assert self.log.replay(after) == self.published[after:]


TestEngineCache = EngineCache.TestCase


def test_batches_are_numbered_from_one_without_a_hole() -> None:
    log = EventLog()

    frames = [log.append(step(stored=[StoredRun(ROOT, [name])]), ts=0.0) for name in (5, 6, 7)]

    assert [batch.seq for batch in batches([frame for some in frames for frame in some])] == [1, 2, 3]


@pytest.mark.parametrize("run_length", [1, 50_000])
def test_a_step_that_changes_half_of_a_large_cache_fits_into_frames(run_length: int) -> None:
    """As one does that admits a prompt of 800,000 tokens; a gateway takes no longer frame."""
    log = EventLog()
    old, new = ([base | 1 << 63 for base in range(start, start + 50_000)] for start in (0, 1 << 20))
    log.append(step(stored=[StoredRun(ROOT, old)]), ts=0.0)
    runs = [StoredRun(ROOT, new[start : start + run_length]) for start in range(0, len(new), run_length)]

    frames = log.append(step(stored=runs, removed=old), ts=0.0)

    held = set(old)
    for batch in batches(frames):
        held.difference_update(batch.removed)
        held.update(name for run in batch.stored for name in run.names)
    assert held == set(new) == {name for name, _ in log.mirror.links()}
    assert batches(frames)[-1].seq == log.seq


def test_a_step_that_changes_no_block_takes_no_number() -> None:
    log = EventLog()

    assert log.append(step(running=3), ts=0.0) == []
    assert log.seq == 0


def test_a_fresh_log_replays_nothing_from_the_start() -> None:
    assert EventLog().replay(0) == []


def test_what_fell_out_of_the_ring_cannot_be_replayed() -> None:
    log = EventLog(ring_batches=3)
    for name in range(5):
        log.append(step(stored=[StoredRun(ROOT, [name])]), ts=0.0)

    assert log.replay(1) is None
    replay = log.replay(2)
    assert replay is not None
    assert [batch.seq for batch in batches(replay)] == [3, 4, 5]


def test_the_ring_is_bounded_in_bytes_too() -> None:
    log = EventLog(ring_bytes=10_000)
    for start in range(10):
        names = [start * 1000 + offset + (1 << 60) for offset in range(300)]
        log.append(step(stored=[StoredRun(ROOT, names)]), ts=0.0)

    assert log.replay(6) is None
    assert log.replay(8) is not None


def test_a_point_that_never_was_cannot_be_replayed() -> None:
    log = EventLog()
    log.append(step(stored=[StoredRun(ROOT, [5])]), ts=0.0)

    assert log.replay(2) is None
    assert log.replay(-1) is None


def test_removing_a_name_that_is_not_held_changes_nothing() -> None:
    mirror = BlockMirror()
    mirror.store([StoredRun(ROOT, [5])])

    mirror.remove([6])

    assert mirror.links() == [(5, ROOT)]


@given(lengths=st.lists(st.integers(1, 40), max_size=20), limit_bytes=st.integers(200, 600))
def test_snapshot_batches_stay_below_their_bound(lengths: list[int], limit_bytes: int) -> None:
    mirror = BlockMirror()
    first = 1 << 63
    for length in lengths:
        mirror.store([StoredRun(ROOT, list(range(first, first + length)))])
        first += length

    frames = list(snapshot_batches(mirror.links(), 9, 1e9, limit_bytes))

    assert all(len(encode_frame(batch)) <= limit_bytes for batch in frames)
    assert all(batch.seq == 9 for batch in frames)
    assert applied(frames) == dict(mirror.links())


def test_a_large_cache_is_sent_in_pieces() -> None:
    mirror = BlockMirror()
    mirror.store([StoredRun(ROOT, [name]) for name in range(1 << 63, (1 << 63) + 50_000)])

    frames = list(snapshot_batches(mirror.links(), 1, 0.0))

    assert len(frames) == 77
    assert all(len(encode_frame(batch)) <= SNAPSHOT_BATCH_BYTES for batch in frames)


def test_a_snapshot_is_not_touched_by_what_comes_after_it() -> None:
    log = EventLog()
    log.append(step(stored=[StoredRun(ROOT, [5, 6])]), ts=0.0)
    snapshot = snapshot_batches(log.mirror.links(), log.seq, 0.0)

    log.append(step(cleared=True), ts=0.0)

    assert [batch.stored for batch in snapshot] == [[Stored(ROOT, [5, 6])]]


def test_a_change_is_due_at_once_and_then_at_most_twenty_times_a_second() -> None:
    throttle = LoadThrottle(step())
    assert throttle.due_at() <= 10.0
    throttle.take(seq=0, now=10.0, ts=0.0)

    throttle.note(step(running=1))

    assert throttle.due_at() == 10.0 + LOAD_MIN_INTERVAL_S


def test_without_a_change_a_load_is_due_once_a_second() -> None:
    throttle = LoadThrottle(step())
    throttle.take(seq=0, now=10.0, ts=0.0)

    throttle.note(step())

    assert throttle.due_at() == 10.0 + LOAD_MAX_INTERVAL_S


def test_a_rate_that_moves_alone_is_no_change() -> None:
    throttle = LoadThrottle(step())
    throttle.take(seq=0, now=10.0, ts=0.0)

    throttle.note(step(prefill_tok_s=1234.5))

    assert throttle.due_at() == 10.0 + LOAD_MAX_INTERVAL_S
    assert throttle.take(seq=0, now=11.0, ts=0.0).prefill_tok_s == 1234.5


def test_every_admitted_id_is_told_once() -> None:
    throttle = LoadThrottle(step())
    throttle.note(step(admitted=["a", "b"]))
    throttle.note(step(admitted=["c"]))

    peeked = throttle.peek(seq=0, ts=0.0)
    first = throttle.take(seq=0, now=1.0, ts=0.0)
    second = throttle.take(seq=0, now=2.0, ts=0.0)

    assert peeked.admitted == []
    assert first.admitted == ["a", "b", "c"]
    assert second.admitted == []


def test_an_admitted_request_that_is_over_already_is_a_change() -> None:
    throttle = LoadThrottle(step())
    throttle.take(seq=0, now=10.0, ts=0.0)

    throttle.note(step(admitted=["quick"]))

    assert throttle.due_at() == 10.0 + LOAD_MIN_INTERVAL_S


def test_a_load_carries_the_latest_counts() -> None:
    throttle = LoadThrottle(step(running=1))
    throttle.note(step(running=2))

    load = throttle.take(seq=7, now=0.0, ts=5.0)

    assert isinstance(load, Load)
    assert (load.seq, load.ts, load.running) == (7, 5.0, 2)
