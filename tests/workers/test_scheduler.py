"""The order of things: who runs, who waits, who gives way. That answers stay right meanwhile is `test_engine`'s part."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from router.blocks import root_name
from workers.block_pool import BlockPool
from workers.protocol import Sampling
from workers.scheduler import Scheduler
from workers.sequence import Seq

SIZE = 4


class Bench:
    """A scheduler and its pool, and a model that says one new id after the other."""

    def __init__(
        self, *, num_blocks: int = 64, max_num_seqs: int = 8, token_budget: int = 100, patience: float = 0.0
    ) -> None:
        """Computes a token in a second."""
        self.pool = BlockPool(num_blocks, SIZE, lambda salt: root_name(model="m", salt=salt))
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            prefill_s=float,
        )
        self.patience = patience
        self.seqs: list[Seq] = []
        self._next_id = 1_000_000

    def add(self, ids: Sequence[int], *, priority: int = 0, at: float = 0.0, interrupts: bool = True) -> Seq:
        seq = Seq(
            rid=len(self.seqs),
            root=self.pool.root(""),
            ids=array("I", ids),
            prompt_len=len(ids),
            sampling=Sampling(max_tokens=100),
            order=(priority, len(self.seqs)),
            arrived_at=at,
            patience=self.patience,
            interrupts=interrupts,
        )
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[int, int]]:
        """One step, as (rid, tokens) in the order of the batch."""
        slices = self.scheduler.schedule()
        for piece in slices:
            self.scheduler.advance(piece)
            if not piece.seq.num_uncomputed:
                self._next_id += 1
                piece.seq.ids.append(self._next_id)
        return [(piece.seq.rid, piece.num_tokens) for piece in slices]


def distinct(count: int, start: int) -> list[int]:
    return list(range(1000 * start, 1000 * start + count))


def test_generating_comes_first_then_ongoing_prefills_then_waiting_ones() -> None:
    bench = Bench(token_budget=10)
    bench.add(distinct(8, 0))
    assert bench.step() == [(0, 8)]
    bench.add(distinct(14, 1))
    bench.add(distinct(3, 2))

    assert bench.step() == [(0, 1), (1, 9)]
    assert bench.step() == [(0, 1), (1, 5), (2, 3)]
    assert bench.step() == [(0, 1), (1, 1), (2, 1)]


def test_an_urgent_prompt_goes_before_an_ongoing_prefill_of_lower_priority() -> None:
    bench = Bench(token_budget=10)
    bench.add(distinct(30, 0), priority=1)
    assert bench.step() == [(0, 10)]
    bench.add(distinct(14, 1), priority=0)
    bench.add(distinct(3, 2), priority=1)

    assert bench.step() == [(1, 9), (0, 1)]
    assert bench.step() == [(1, 5), (0, 5)]
    assert bench.step() == [(1, 1), (0, 9)]
    assert bench.step() == [(1, 1), (0, 5), (2, 3)]


def test_a_short_prompt_passes_a_long_one_that_has_begun() -> None:
    bench = Bench(token_budget=10, patience=1.0)
    bench.add(distinct(30, 0), at=0.0)
    assert bench.step() == [(0, 10)]
    bench.add(distinct(14, 1), at=1.0)
    bench.add(distinct(3, 2), at=2.0)

    assert bench.step() == [(2, 3), (1, 6), (0, 1)]
    assert bench.step() == [(2, 1), (1, 8), (0, 1)]
    assert bench.step() == [(2, 1), (1, 1), (0, 8)]


def test_one_that_does_not_interrupt_lets_what_has_begun_be_finished() -> None:
    bench = Bench(token_budget=10, patience=1.0)
    bench.add(distinct(25, 0), at=0.0)
    bench.step()
    bench.add(distinct(14, 1), at=1.0, interrupts=False)
    bench.add(distinct(3, 2), at=2.0, interrupts=False)

    assert bench.step() == [(0, 10)]
    assert bench.step() == [(0, 5), (2, 3), (1, 2)]


def test_a_long_prompt_lets_none_pass_that_come_after_its_patience() -> None:
    bench = Bench(token_budget=10, patience=1.0)
    bench.add(distinct(30, 0), at=0.0)
    bench.step()
    bench.add(distinct(3, 1), at=28.0)

    assert bench.step() == [(0, 10)]
    assert bench.step() == [(0, 10)]
    assert bench.step() == [(0, 1), (1, 3)]


def test_what_the_cache_has_does_not_make_a_prompt_long() -> None:
    bench = Bench(token_budget=40, patience=1.0)
    bench.add(distinct(33, 0))
    bench.step()
    bench.scheduler.remove(bench.seqs[0])
    bench.add(distinct(10, 1))
    bench.add(distinct(36, 0))

    assert bench.step() == [(2, 4), (1, 10)]


def test_patience_does_not_overrule_a_priority() -> None:
    bench = Bench(token_budget=10, patience=1.0)
    bench.add(distinct(30, 0), priority=0)
    bench.add(distinct(3, 1), priority=1)

    assert bench.step() == [(0, 10)]


def test_an_urgent_prefill_does_not_stop_those_who_generate() -> None:
    bench = Bench(token_budget=4)
    bench.add(distinct(4, 0), priority=5)
    bench.step()
    bench.add(distinct(9, 1), priority=0)

    assert bench.step() == [(0, 1), (1, 3)]


def test_no_more_run_at_once_than_there_are_tokens_in_the_budget() -> None:
    bench = Bench(token_budget=2)
    for start in range(3):
        bench.add(distinct(1, start))

    assert [bench.step() for _ in range(3)] == [[(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]]


def test_no_more_run_at_once_than_allowed() -> None:
    bench = Bench(max_num_seqs=2)
    for start in range(3):
        bench.add(distinct(5, start))

    assert bench.step() == [(0, 5), (1, 5)]
    bench.scheduler.remove(bench.seqs[0])
    assert bench.step() == [(1, 1), (2, 5)]


def test_a_prompt_is_admitted_only_when_all_of_it_and_one_id_more_fit() -> None:
    bench = Bench(num_blocks=4, token_budget=4)
    bench.add(distinct(7, 0))  # two blocks
    bench.add(distinct(8, 1))  # three blocks with the id to come
    bench.step()

    assert bench.step() == [(0, 3)]
    assert bench.scheduler.num_waiting == 1
    bench.scheduler.remove(bench.seqs[0])
    assert bench.step() == [(1, 4)]
    assert bench.pool.num_used == 3


def test_cached_blocks_that_a_prompt_will_use_are_not_counted_as_room_for_its_rest() -> None:
    bench = Bench(num_blocks=4)
    bench.add(distinct(9, 0))
    bench.step()
    bench.scheduler.remove(bench.seqs[0])  # two blocks stay in the cache
    bench.add(distinct(7, 1))  # takes the two others
    bench.step()
    bench.add(distinct(12, 0))  # would reuse both, and needs two more

    assert bench.step() == [(1, 1)]
    assert bench.pool.num_cached == 2


def test_nobody_overtakes_one_that_waits_for_memory() -> None:
    bench = Bench(num_blocks=4)
    bench.add(distinct(7, 0))
    bench.step()
    bench.add(distinct(12, 1))
    bench.add(distinct(2, 2))

    assert bench.step() == [(0, 1)]


def test_nobody_is_admitted_in_a_step_that_took_blocks_away() -> None:
    bench = Bench(num_blocks=4)
    bench.add(distinct(7, 0))
    bench.add(distinct(7, 1))
    bench.step()
    bench.step()
    bench.add(distinct(1, 2), priority=-1)  # would fit into the block that is left of the two given up

    assert bench.step() == [(0, 1)]
    assert bench.scheduler.num_preemptions == 1
    assert bench.step() == [(0, 1), (2, 1)]


def test_a_preempted_sequence_comes_back_before_later_ones_and_finds_what_is_left_of_its_own() -> None:
    bench = Bench(num_blocks=4)
    bench.add(distinct(7, 0))
    preempted = bench.add(distinct(7, 1))
    bench.step()
    bench.step()
    bench.add(distinct(7, 2))
    bench.step()
    assert preempted.blocks == []
    bench.scheduler.remove(bench.seqs[0])

    assert bench.step() == [(1, 5)]  # 9 ids by now, of two sealed blocks one was taken
    assert preempted.cached_tokens == 0


def test_the_newest_gives_way_to_itself_when_it_is_the_one_without_a_block() -> None:
    bench = Bench(num_blocks=5)
    bench.add(distinct(7, 0))
    newest = bench.add(distinct(8, 1))
    bench.step()
    bench.step()  # the older one still has room in its second block, so it is not the one that asks
    for _ in range(3):
        bench.step()

    assert newest.blocks == []
    assert bench.seqs[0].num_computed > 8


def test_a_request_is_held_only_for_a_block_that_the_cache_could_give_it() -> None:
    bench = Bench()
    bench.add(distinct(6, 0))
    bench.add(distinct(4, 0))  # its only full block holds its last id: nothing to wait for

    assert bench.step() == [(0, 6), (1, 4)]


def test_a_request_held_for_one_prefill_is_admitted_when_that_prefill_disappears() -> None:
    bench = Bench(token_budget=20)
    bench.add(distinct(18, 0))
    bench.add(distinct(18, 0))
    assert bench.step() == [(0, 18)]
    bench.add(distinct(40, 3))
    bench.add(distinct(40, 3))
    bench.step()
    bench.scheduler.remove(bench.seqs[2])

    assert [rid for rid, _ in bench.step()] == [0, 1, 3]


def test_only_so_many_held_requests_are_looked_at_in_a_step() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(40):
        bench.add(distinct(9, 0))
    other = bench.add(distinct(9, 1))

    assert bench.step() == [(0, 9)]
    assert other.blocks == []


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=10),
    num_blocks=st.integers(9, 20),
    token_budget=st.integers(1, 20),
    max_num_seqs=st.integers(1, 5),
    patience=st.sampled_from([0.0, 1.0]),
)
def test_every_step_runs_all_that_were_admitted_within_its_bounds(
    arrivals: list[tuple[int, int, int]], num_blocks: int, token_budget: int, max_num_seqs: int, patience: float
) -> None:
    bench = Bench(num_blocks=num_blocks, token_budget=token_budget, max_num_seqs=max_num_seqs, patience=patience)
    for number, (length, priority, _) in enumerate(arrivals):
        bench.add(distinct(length, number % 3), priority=priority)
    while bench.scheduler.has_work():
        ran = bench.step()
        assert ran
        assert sum(count for _, count in ran) <= token_budget
        assert all(count > 0 for _, count in ran)
        assert sorted(rid for rid, _ in ran) == [seq.rid for seq in bench.seqs if seq.blocks]
        unfinished = [seq.urgency for seq in bench.seqs if seq.prefilling]
        assert len(unfinished) == len(set(unfinished))
        assert bench.scheduler.num_running <= max_num_seqs
        for seq, (_, _, max_tokens) in zip(bench.seqs, arrivals, strict=True):
            if seq.blocks and len(seq.ids) > seq.prompt_len + max_tokens:
                bench.scheduler.remove(seq)

    assert bench.pool.num_used == 0


def distinct_pending(bench: Bench) -> int:
    """By the definition: different (prefix, block) pairs that nobody has computed, and everybody's own rests."""
    blocks: set[tuple[int, ...]] = set()
    rests = 0
    for seq in (*bench.scheduler._waiting, *(seq for seq in bench.scheduler._running if seq.prefilling)):
        ids = tuple(seq.ids)
        num_shareable = (len(ids) - 1) // SIZE
        cached = len(bench.pool.match(seq.root, seq.packed(0, num_shareable * SIZE)))
        had = max(cached * SIZE, seq.num_computed) if seq in bench.scheduler._running else seq.expected_cached
        blocks |= {ids[: SIZE * (i + 1)] for i in range(had // SIZE, num_shareable)}
        rests += len(ids) - max(num_shareable * SIZE, had) - (had % SIZE if had < num_shareable * SIZE else 0)
    return SIZE * len(blocks) + rests


def test_a_prefix_that_several_wait_for_is_pending_once() -> None:
    bench = Bench(token_budget=10)
    shared = distinct(16, 0)
    for number in range(1, 4):
        bench.add(shared + distinct(5, number))
    assert bench.scheduler.num_pending_tokens() == 16 + 3 * 5

    assert bench.step() == [(0, 10)]
    assert bench.scheduler.num_pending_tokens() == 6 + 3 * 5
    bench.scheduler.remove(bench.seqs[1])
    assert bench.scheduler.num_pending_tokens() == 6 + 2 * 5
    bench.scheduler.remove(bench.seqs[0])  # the one that computes it: 8 of the 16 are in the cache
    assert bench.step() == [(2, 10)]
    assert bench.scheduler.num_pending_tokens() == 3
    assert bench.step() == [(2, 3)]
    assert bench.scheduler.num_pending_tokens() == 0


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=8),
    removed=st.sets(st.integers(0, 7), max_size=3),
    num_blocks=st.integers(8, 30),
    token_budget=st.integers(1, 12),
)
def test_pending_tokens_are_what_is_left_to_compute(
    requests: list[tuple[int, int, int]], removed: set[int], num_blocks: int, token_budget: int
) -> None:
    bench = Bench(num_blocks=num_blocks, token_budget=token_budget, max_num_seqs=3)
    for family, length, steps in requests:
        bench.add(distinct(length, family))
        for _ in range(steps):
            bench.step()
            assert bench.scheduler.num_pending_tokens() >= 0
    for rid in removed:
        if rid < len(bench.seqs):
            bench.scheduler.remove(bench.seqs[rid])
    for seq in bench.scheduler._waiting:  # the cache may have dropped what it found when it last looked
        bench.scheduler._look(seq)

    assert bench.scheduler.num_pending_tokens() == distinct_pending(bench)
    for seq in bench.seqs:
        if seq.rid not in removed:
            bench.scheduler.remove(seq)
    assert bench.scheduler.num_pending_tokens() == 0
    assert not bench.scheduler._wanted._times
