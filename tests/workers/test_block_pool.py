"""The block pool against a plain record of what every physical block really contains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from router.blocks import BlockName, block_names, root_name
from router.wire import pack_ids
from workers.block_pool import Block, BlockPool, Root
from workers.protocol import StoredRun

SIZE = 2


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, SIZE, lambda salt: root_name(model="m", salt=salt))


def colliding_names(packed_ids: bytes, parent: BlockName, block_size: int) -> list[BlockName]:
    return [BlockName(7)] * (len(packed_ids) // (4 * block_size))


def fill(pool: BlockPool, ids: list[int], salt: str = "") -> list[Block]:
    """A prompt that runs alone, all of it: its blocks, still in use."""
    root = pool.root(salt)
    blocks = pool.match(root, pack_ids(ids))
    pool.acquire(blocks)
    blocks += pool.allocate(-(-len(ids) // SIZE) - len(blocks))
    for position in range(len(ids) // SIZE):
        block = blocks[position]
        if block.key is None:
            parent = blocks[position - 1] if position else root
            blocks[position] = pool.seal(block, parent, pack_ids(ids[position * SIZE : (position + 1) * SIZE]))
    return blocks


def names_of(runs: list[StoredRun]) -> list[int]:
    return [name for run in runs for name in run.names]


def test_a_released_prompt_is_found_again_up_to_its_last_full_block() -> None:
    pool = make_pool(8)
    blocks = fill(pool, [1, 2, 3, 4, 5])
    pool.release(blocks)

    assert pool.match(pool.root(""), pack_ids([1, 2, 3, 4, 5, 6])) == blocks[:2]
    assert pool.match(pool.root(""), pack_ids([1, 2, 9, 4])) == blocks[:1]
    assert pool.match(pool.root("other"), pack_ids([1, 2, 3, 4])) == []
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 6)


def test_match_changes_nothing() -> None:
    pool = make_pool(4)
    pool.release(fill(pool, [1, 2, 3, 4]))
    pool.release(fill(pool, [5, 6]))
    pool.match(pool.root(""), pack_ids([1, 2, 3, 4]))

    pool.release(pool.allocate(2))  # one was free, so one is dropped: the tail of what was released first

    assert len(pool.match(pool.root(""), pack_ids([1, 2, 3, 4]))) == 1


def test_the_least_recently_used_prompt_is_dropped_first_and_from_its_tail() -> None:
    pool = make_pool(4)
    pool.release(fill(pool, [1, 2, 3, 4]))
    pool.release(fill(pool, [5, 6, 7, 8]))
    pool.release(fill(pool, [1, 2, 3, 4]))  # used again: now the younger one

    pool.release(pool.allocate(1))

    assert len(pool.match(pool.root(""), pack_ids([1, 2, 3, 4]))) == 2
    assert len(pool.match(pool.root(""), pack_ids([5, 6, 7, 8]))) == 1


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = make_pool(4)
    pool.release(fill(pool, [1, 2]))
    pool.release(pool.allocate(1))

    taken = pool.allocate(3)

    assert pool.num_cached == 1
    assert len({block.index for block in taken}) == 3


def test_equal_content_filled_twice_is_kept_once() -> None:
    pool = make_pool(4)
    root = pool.root("")
    first, second = pool.allocate(2)

    kept = pool.seal(first, root, pack_ids([1, 2]))
    shared = pool.seal(second, root, pack_ids([1, 2]))

    assert kept is shared is first
    assert first.users == 2
    assert pool.num_used == 1


def test_a_child_is_not_found_under_a_parent_that_was_dropped_and_filled_anew() -> None:
    pool = make_pool(2)
    old_parent, old_child = fill(pool, [1, 2, 3, 4])
    pool.release([old_parent, old_child])
    pool.release(fill(pool, [5, 6, 7, 8]))  # drops both
    pool.release(fill(pool, [1, 2]))

    assert len(pool.match(pool.root(""), pack_ids([1, 2, 3, 4]))) == 1


def test_a_name_is_announced_after_its_block_was_filled_and_withdrawn_when_it_is_dropped() -> None:
    pool = make_pool(2)
    root = pool.root("salt")
    expected = block_names(pack_ids([1, 2, 3, 4]), root.name, SIZE)
    blocks = fill(pool, [1, 2, 3, 4], salt="salt")

    assert pool.take_delta() == ([StoredRun(root.name, [*expected])], [])
    pool.release(blocks)
    assert pool.take_delta() == ([], [])
    pool.allocate(2)
    assert pool.take_delta() == ([], [expected[1], expected[0]])


def test_what_came_and_went_between_two_reports_is_not_told() -> None:
    pool = make_pool(1)
    pool.release(fill(pool, [1, 2]))
    pool.release(pool.allocate(1))

    assert pool.take_delta() == ([], [])


def test_what_went_and_came_back_between_two_reports_is_not_told() -> None:
    pool = make_pool(1)
    pool.release(fill(pool, [1, 2]))
    pool.take_delta()
    pool.release(pool.allocate(1))
    pool.release(fill(pool, [1, 2]))

    assert pool.take_delta() == ([], [])


def test_a_snapshot_tells_parents_first_in_runs_as_long_as_possible() -> None:
    pool = make_pool(8)
    fill(pool, [1, 2, 3, 4])
    fill(pool, [9, 9])
    fill(pool, [1, 2, 5, 6, 7, 8])
    root = pool.root("").name
    long = block_names(pack_ids([1, 2, 3, 4]), root, SIZE)
    branch = block_names(pack_ids([1, 2, 5, 6, 7, 8]), root, SIZE)

    assert pool.snapshot() == [
        StoredRun(root, [*long]),
        StoredRun(root, [*block_names(pack_ids([9, 9]), root, SIZE)]),
        StoredRun(branch[0], [*branch[1:]]),
    ]


def test_a_pool_makes_a_block_only_when_it_is_needed() -> None:
    pool = BlockPool(1 << 40, SIZE, lambda salt: root_name(model="m", salt=salt))

    assert [block.index for block in pool.allocate(2)] == [0, 1]
    assert pool.num_free == (1 << 40) - 2


@dataclass(eq=False)
class Holder:
    """Somebody with a prompt, as the scheduler would be."""

    salt: str
    root: Root
    ids: list[int]
    blocks: list[Block]
    num_sealed: int


class PoolMachine(RuleBasedStateMachine):
    """Any order of starts, forward passes and ends.

    `content` says for each physical block which prefix was last written into it: what KV memory would hold.
    """

    holders = Bundle("holders")
    names: Callable[[bytes, BlockName, int], list[BlockName]] = staticmethod(block_names)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, SIZE, lambda salt: root_name(model="m", salt=salt), self.names)
        self.content: dict[int, tuple[str, list[int]]] = {}
        self.held: list[Holder] = []
        self.told: set[int] = set()

    @rule(target=holders, salt=st.sampled_from(["", "a"]), ids=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def start(self, salt: str, ids: list[int]) -> Holder:
        root = self.pool.root(salt)
        blocks = self.pool.match(root, pack_ids(ids))
        for position, block in enumerate(blocks):
            assert self.content[block.index] == (salt, ids[: (position + 1) * SIZE])
        self.pool.acquire(blocks)
        fresh = self.pool.allocate(min(-(-len(ids) // SIZE) - len(blocks), self.pool.num_available))
        in_use = {block.index for holder in self.held for block in holder.blocks} | {block.index for block in blocks}
        assert in_use.isdisjoint(block.index for block in fresh)
        holder = Holder(salt, root, ids, blocks + fresh, num_sealed=len(blocks))
        self.held.append(holder)
        return holder

    @rule(holder=holders)
    def run(self, holder: Holder) -> None:
        """A forward pass fills the next block."""
        position = holder.num_sealed
        end = (position + 1) * SIZE
        if position == len(holder.blocks) or end > len(holder.ids):
            return
        self.content[holder.blocks[position].index] = (holder.salt, holder.ids[:end])
        parent = holder.blocks[position - 1] if position else holder.root
        block = self.pool.seal(holder.blocks[position], parent, pack_ids(holder.ids[position * SIZE : end]))
        assert self.content[block.index] == (holder.salt, holder.ids[:end])
        holder.blocks[position] = block
        holder.num_sealed += 1

    @rule(holder=consumes(holders))
    def end(self, holder: Holder) -> None:
        self.pool.release(holder.blocks)
        self.held.remove(holder)

    @rule()
    def report(self) -> None:
        stored, removed = self.pool.take_delta()
        stored_names = names_of(stored)
        assert len(set(stored_names)) == len(stored_names)
        assert self.told.isdisjoint(stored_names)
        assert self.told.issuperset(removed)
        self.told.difference_update(removed)
        self.told.update(stored_names)
        assert self.told == set(names_of(self.pool.snapshot()))

    @precondition(lambda self: not self.held)
    @rule()
    def idle(self) -> None:
        assert self.pool.num_used == 0

    @invariant()
    def every_block_is_free_cached_or_used(self) -> None:
        pool = self.pool
        used = {block.index: block for holder in self.held for block in holder.blocks}
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert pool.num_used == len(used)
        for block in used.values():
            assert block.users == sum(block in holder.blocks for holder in self.held)

    @invariant()
    def a_readable_block_has_a_readable_parent(self) -> None:
        known: set[int] = {self.pool.root(salt).name for salt in ("", "a")}
        for run in self.pool.snapshot():
            assert run.parent in known
            known.update(run.names)
        identities = {block.identity for block in self.pool._readable.values()}
        for parent, _ in self.pool._readable:
            assert isinstance(parent, str) or parent in identities


class CollidingPoolMachine(PoolMachine):
    """All names are equal: routers learn nothing, and still no block is ever taken for another."""

    names = staticmethod(colliding_names)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
CollidingPoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase
TestPoolWithCollidingNames = CollidingPoolMachine.TestCase
