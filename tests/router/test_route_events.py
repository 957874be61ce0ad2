"""What frames do to the router's picture of a replica: `Router.apply` and its siblings."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import Router, RoutingSettings, Sync, Trust
from router.wire import Batch, Frame, Load
from tests.router.fleets import (
    batch,
    decide,
    foreign_fleet,
    hello,
    load,
    own_fleet,
    query,
    serve,
    spec,
    take_snapshot,
    tokens,
    view,
    why_not,
)


def test_a_gap_lowers_trust_until_a_snapshot_replaces_the_picture() -> None:
    router = own_fleet(1)
    prompt = query(tokens(1, 160)).names
    router.apply("r0", batch(1, prompt), 0.0)
    assert view(router).trust is Trust.EXACT

    assert router.apply("r0", batch(3, [1]), 0.0) is Sync.GAP
    assert view(router).trust is Trust.LEARNING
    assert view(router).confirmed_blocks == 10
    assert router.resume_point("r0") == ("e1", 1)

    frames: list[Frame] = [hello(seq=3), batch(3, prompt[:5]), batch(3, [5, 6]), load(3)]
    assert take_snapshot(router, frames) is Sync.OK
    assert view(router).trust is Trust.EXACT
    assert view(router).confirmed_blocks == 7
    assert router.resume_point("r0") == ("e1", 3)


def test_a_load_frame_shows_a_lost_batch_and_still_tells_the_load() -> None:
    router = own_fleet(1)

    assert router.apply("r0", load(1, tokens=800), 0.0) is Sync.GAP

    assert view(router).load == load(1, tokens=800)
    assert view(router).trust is Trust.LEARNING


def test_an_empty_snapshot_empties_the_picture() -> None:
    router = own_fleet(1)
    router.apply("r0", batch(1, [1, 2]), 0.0)
    router.apply("r0", batch(3), 0.0)

    assert take_snapshot(router, [hello(seq=3), load(3)]) is Sync.OK

    assert view(router).confirmed_blocks == 0
    assert view(router).trust is Trust.EXACT


@pytest.mark.parametrize("frames", [[], [load()], [batch(1, [1])]])
def test_what_is_no_snapshot_changes_nothing(frames: list[Frame]) -> None:
    router = own_fleet(1)
    router.apply("r0", batch(1, [1, 2]), 0.0)

    assert take_snapshot(router, frames) is Sync.GAP

    assert view(router).confirmed_blocks == 2
    assert view(router).trust is Trust.EXACT


def test_a_snapshot_of_another_epoch_forgets_what_was_sent_before_the_restart() -> None:
    router = own_fleet(1)
    serve(router, query(tokens(1, 160)))

    take_snapshot(router, [hello("e2", 3), batch(3, [1, 2])])

    assert (view(router).confirmed_blocks, view(router).expected_blocks) == (2, 0)
    assert router.resume_point("r0") == ("e2", 3)


def test_a_restart_forgets_everything_first() -> None:
    router = own_fleet(1)
    router.apply("r0", batch(1, query(tokens(1, 160)).names), 0.0)
    serve(router, query(tokens(2, 160)))

    assert router.apply("r0", hello("e2"), 1.0) is Sync.OK

    assert (view(router).confirmed_blocks, view(router).expected_blocks) == (0, 0)
    assert view(router).trust is Trust.EXACT


def test_a_clear_empties_the_picture_and_a_batch_is_applied_in_its_order() -> None:
    router = own_fleet(1)
    router.apply("r0", batch(1, [1, 2, 3]), 0.0)

    router.apply("r0", batch(2, stored=[2, 3], removed=[2], cleared=True), 0.0)

    assert view(router).confirmed_blocks == 2


def test_a_stream_that_was_cut_keeps_its_picture_for_a_while_and_resumes() -> None:
    router = own_fleet(1)
    prompt = query(tokens(1, 160))
    router.apply("r0", batch(1, prompt.names), 0.0)
    router.events_lost("r0", 10.0)
    assert view(router).trust is Trust.LEARNING
    assert view(router).confirmed_blocks == 10

    router.apply("r0", hello(seq=2), 20.0)
    router.apply("r0", batch(2, [1]), 20.0)
    assert view(router).trust is Trust.EXACT
    assert view(router).confirmed_blocks == 11

    router.events_lost("r0", 30.0)
    router.set_health("r0", True, 89.9)
    assert view(router).confirmed_blocks == 11
    router.events_lost("r0", 89.9)
    router.set_health("r0", True, 90.0)
    assert view(router).confirmed_blocks == 0
    assert router.resume_point("r0") == ("e1", 0)


def test_a_replica_that_claims_more_blocks_than_it_has_is_not_believed() -> None:
    router = own_fleet(1)
    router.apply("r0", hello("e2", capacity=10), 0.0)
    router.apply("r0", batch(1, range(10)), 0.0)
    assert view(router).confirmed_blocks == 10

    assert router.apply("r0", batch(2, [99]), 0.0) is Sync.GAP

    assert view(router).confirmed_blocks == 0
    assert view(router).trust is Trust.LEARNING
    assert take_snapshot(router, [hello("e2", 2, capacity=10), batch(2, range(11))]) is Sync.GAP
    assert view(router).confirmed_blocks == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "v2"},
        {"adapter": "lora"},
        {"hash": "sha256/1"},
        {"v": 2},
        {"capacity_blocks": 0},
        {"block_size": 32},
        {"tokenizer_digest": "other"},
    ],
)
def test_a_replica_that_does_not_fit_its_pool_is_refused_until_it_does(change: dict[str, object]) -> None:
    router = own_fleet(2)
    router.apply("r0", batch(1, [1, 2]), 0.0)

    assert router.apply("r0", msgspec.structs.replace(hello(), **change), 0.0) is Sync.MISMATCH
    assert router.apply("r0", batch(2, [3]), 0.0) is Sync.MISMATCH
    assert router.apply("r0", load(2), 0.0) is Sync.MISMATCH
    assert take_snapshot(router, [msgspec.structs.replace(hello(), **change)]) is Sync.MISMATCH

    refused = view(router)
    assert refused.mismatch
    assert (refused.trust, refused.confirmed_blocks) == (Trust.BLIND, 0)
    decision = decide(router, query(tokens(1, 64)))
    assert (decision.replica_id, decision.candidates[0].why_not) == ("r1", "mismatch")

    assert router.apply("r0", hello(), 0.0) is Sync.OK
    assert view(router).mismatch == ""


def test_a_replica_too_large_for_the_index_is_known_by_what_was_sent_there() -> None:
    """As the second one is here: all that the first can hold is taken into account, whether it holds it or not."""
    router = own_fleet(2, RoutingSettings(index_bytes=220 * 15_000))
    asked = query(tokens(1, 160))

    router.apply("r0", batch(1, asked.names), 0.0)
    router.apply("r1", batch(1, asked.names), 0.0)
    router.apply("r1", load(1, tokens=800), 0.0)

    assert (view(router, "r0").trust, view(router, "r0").confirmed_blocks) == (Trust.EXACT, 10)
    assert (view(router, "r1").trust, view(router, "r1").confirmed_blocks) == (Trust.LEARNING, 0)
    assert not view(router, "r1").indexed
    assert why_not(router) == {"r0": "", "r1": ""}

    router.remove("r0")
    assert serve(router, asked, 1.0) == "r1"
    assert decide(router, asked, 2.0).matched_tokens == 144

    router.apply("r1", hello("e2"), 3.0)
    assert view(router, "r1").trust is Trust.EXACT


def test_the_first_greeting_settles_block_size_and_tokenizer_of_the_pool() -> None:
    router = Router()
    router.add("r0", spec(), 5.0)
    router.add("r1", spec(), 6.0)
    before = router.pool("m")
    assert before is not None
    assert (before.key_space, before.block_size, before.tokenizer_digest, before.created) == ("tokens", 16, "", 5.0)

    router.apply("r1", msgspec.structs.replace(hello(), block_size=32), 7.0)

    pool = router.pool("m")
    assert pool is not None
    assert (pool.block_size, pool.tokenizer_digest, pool.created) == (32, "digest", 5.0)
    assert router.apply("r0", hello(), 7.0) is Sync.MISMATCH


@pytest.mark.parametrize("block_size", [0, -16, 1 << 20])
def test_a_block_size_that_cannot_be_is_refused(block_size: int) -> None:
    router = Router()
    router.add("r0", spec(), 0.0)

    assert router.apply("r0", msgspec.structs.replace(hello(), block_size=block_size), 0.0) is Sync.MISMATCH


def test_a_foreign_replica_has_no_event_stream() -> None:
    router = foreign_fleet(1)

    assert router.apply("r0", hello(), 0.0) is Sync.MISMATCH


class Worker:
    """The other end of the stream: keeps every batch, and can tell its whole cache."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.held: list[int] = []
        self.batches: list[Batch] = []

    def step(self) -> Batch:
        """A step that evicts from the end and then stores; now and then a reset."""
        cleared = self.generator.random() < 0.1
        if cleared:
            self.held = []
        keep = self.generator.randrange(len(self.held) + 1)
        removed, self.held = self.held[keep:], self.held[:keep]
        # Few names, so that what was removed comes again; never one that it holds, as an engine holds a block once.
        stored = sorted(set(self.generator.choices(range(40), k=self.generator.randrange(5))) - set(self.held))
        self.held += stored
        frame = batch(len(self.batches) + 1, stored, removed, cleared=cleared)
        self.batches.append(frame)
        return frame

    def hello(self) -> Frame:
        return hello(f"e{self.epoch}", len(self.batches))

    def load(self) -> Load:
        return load(len(self.batches))

    def open_stream(self, resume: tuple[str, int] | None, *, everything_kept: bool) -> list[Frame] | None:
        """None is 410: what was asked for is not kept any more."""
        epoch, after = resume or ("", 0)
        if epoch != f"e{self.epoch}":
            after = 0
        if after < len(self.batches) and not everything_kept:
            return None
        return [self.hello(), *self.batches[after:], self.load()]

    def snapshot(self) -> list[Frame]:
        middle = len(self.held) // 2
        parts = [batch(len(self.batches), part) for part in (self.held[:middle], self.held[middle:]) if part]
        return [self.hello(), *parts, self.load()]


def heal(router: Router, worker: Worker) -> None:
    """As the gateway does after a gap: replay, else a snapshot and then the stream again."""
    for _ in range(2):
        everything_kept = worker.generator.random() < 0.5
        frames = worker.open_stream(router.resume_point("r0"), everything_kept=everything_kept)
        if frames is not None:
            assert [router.apply("r0", frame, 0.0) for frame in frames] == [Sync.OK] * len(frames)
            return
        assert take_snapshot(router, worker.snapshot()) is Sync.OK


def frames_on_a_bad_line(worker: Worker, late: list[Frame]) -> list[Frame]:
    """What arrives of the worker's next frame: it may be lost or doubled, or come late, and a restart loses all before it."""
    chance = worker.generator.random
    if chance() < 0.05:
        worker.restart()
        late.clear()
        return [worker.hello()]
    if chance() < 0.4:
        return [worker.load()]
    frame, fate = worker.step(), chance()
    if 0.7 < fate < 0.85:
        late.append(frame)
    arrived: list[Frame] = [frame] if fate < 0.8 else []
    if late and chance() < 0.3:
        arrived.append(late.pop(worker.generator.randrange(len(late))))
    return arrived


@given(st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_frames_lost_doubled_and_reordered_never_make_a_wrong_picture_look_exact(generator: random.Random) -> None:
    router, worker = own_fleet(1), Worker(generator)
    router.apply("r0", worker.hello(), 0.0)
    late: list[Frame] = []
    for _ in range(60):
        if generator.random() < 0.05:
            router.events_lost("r0", 0.0)
            late.clear()
            heal(router, worker)
        for frame in frames_on_a_bad_line(worker, late):
            sync = router.apply("r0", frame, 0.0)
            if sync is Sync.GAP and generator.random() < 0.5:
                heal(router, worker)
        applied_all = router.resume_point("r0") == (f"e{worker.epoch}", len(worker.batches))
        if view(router).trust is Trust.EXACT and applied_all:
            assert holdings(router) == set(worker.held)

    heal(router, worker)
    heal(router, worker)
    assert view(router).trust is Trust.EXACT
    assert holdings(router) == set(worker.held)


def holdings(router: Router) -> set[int]:
    return set(router._replicas["r0"].holding._confirmed)  # type: ignore[union-attr]


names = st.lists(st.integers(-(2**63), 2**64 - 1) | st.integers(0, 9), max_size=12)
numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-1, 4)
frames = st.one_of(
    st.builds(hello, st.sampled_from(["e1", "e2", ""]), numbers, capacity=st.integers(0, 20)),
    st.builds(batch, numbers, names, names, cleared=st.booleans()),
    st.builds(
        load, numbers, tokens=numbers, running=numbers, rate=st.floats(), admitted=st.lists(st.text(), max_size=3)
    ),
)


@given(st.lists(frames | st.lists(frames, max_size=4), max_size=30))
@settings(max_examples=300, deadline=None)
def test_hostile_frames_never_raise_and_never_hold_more_than_the_capacity(story: list[Frame | list[Frame]]) -> None:
    router = own_fleet(2, RoutingSettings(max_blocks=20), capacity=20)
    for now, said in enumerate(story):
        if isinstance(said, list):
            take_snapshot(router, said)
        else:
            router.apply("r0", said, float(now))
        assert view(router).confirmed_blocks <= 20
        decision = decide(router, query(tokens(1, 200)), float(now))
        assert all(candidate.cost_s > 0 for candidate in decision.candidates)

    router.remove("r0")
    router.remove("r1")
    assert router.models() == []
