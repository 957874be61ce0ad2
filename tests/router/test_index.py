"""`router.index` against a plain model: a set of names for each replica."""

import gc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from router.index import Holding, Index

NO_CAP = 10**9


def plain_depth(held: set[int], names: Sequence[int]) -> int:
    depth = 0
    while depth < len(names) and names[depth] in held:
        depth += 1
    return depth


def test_match_gives_the_depth_of_every_replica_that_holds_a_prefix() -> None:
    index = Index()
    deep, shallow, other = index.join(), index.join(), index.join()
    index.store(deep, [1, 2, 3, 4])
    index.store(shallow, [1, 2])
    index.store(other, [9])

    assert index.match([1, 2, 3, 4, 5]) == {deep.slot: 4, shallow.slot: 2}
    assert index.match([9, 2]) == {other.slot: 1}
    assert index.match([7, 1]) == {}
    assert index.match([]) == {}


def test_the_garbage_collector_walks_over_nothing_that_events_filled() -> None:
    """The loop would stand still meanwhile: 30 ms for the full caches of 8 replicas."""
    index = Index()
    holding = index.join()
    index.store(holding, range(1 << 40, (1 << 40) + 10_000))

    assert holding.confirmed == 10_000
    assert not [each for each in gc.get_objects() if isinstance(each, set | dict) and (1 << 40) + 9_999 in each]


def test_a_name_that_is_removed_twice_at_once_counts_once() -> None:
    index = Index()
    holding = index.join()
    index.store(holding, [1, 2])

    index.remove(holding, [2, 2, 3])

    assert (holding.confirmed, index.room.used, len(index)) == (1, 1, 1)


def test_match_never_exceeds_the_limit() -> None:
    index = Index()
    holding = index.join()
    index.store(holding, [1, 2, 3])

    assert index.match([1, 2, 3], 2) == {holding.slot: 2}
    assert index.match([1, 2, 3], 0) == {}
    assert index.match([1, 2, 3], 99) == {holding.slot: 3}


def test_match_looks_up_few_names_of_a_long_prompt() -> None:
    class CountingNames(list[int]):
        looked_at = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            CountingNames.looked_at += 1
            return super().__getitem__(index)

    index = Index()
    for depth in (100, 5000, 8000):
        index.store(index.join(), range(depth))

    assert sorted(index.match(CountingNames(range(8192))).values()) == [100, 5000, 8000]
    assert CountingNames.looked_at < 3 * 14


def test_a_name_is_counted_once_however_often_it_is_stored() -> None:
    index = Index()
    holding = index.join()
    index.store(holding, [1, 1, 2])
    index.store(holding, [1, 2])
    index.expect(holding, [1, 2], 1.0, NO_CAP)

    assert (holding.confirmed, holding.expected, len(index)) == (2, 0, 2)

    index.remove(holding, [1, 1, 2, 2, 3])

    assert (holding.confirmed, holding.expected, len(index)) == (0, 0, 0)


def test_what_is_expected_counts_at_once_and_is_confirmed_by_its_event() -> None:
    index = Index()
    holding = index.join()
    index.expect(holding, [1, 2, 3], 1.0, NO_CAP)
    assert index.match([1, 2, 3]) == {holding.slot: 3}

    index.store(holding, [1, 2])
    index.expire(holding, 5.0)

    assert index.match([1, 2, 3]) == {holding.slot: 2}
    assert (holding.confirmed, holding.expected) == (2, 0)


def test_expiry_keeps_what_a_later_prompt_expects_too() -> None:
    index = Index()
    holding = index.join()
    index.expect(holding, [1, 2, 3], 1.0, NO_CAP)
    index.expect(holding, [1, 2, 8], 2.0, NO_CAP)

    index.expire(holding, 2.0)

    assert index.match([1, 2, 3]) == {holding.slot: 2}
    assert index.match([1, 2, 8]) == {holding.slot: 3}
    assert holding.expected == 3


def test_the_cap_drops_the_leaves_of_the_oldest_prompt_first() -> None:
    index = Index()
    holding = index.join()
    index.expect(holding, [1, 2, 3, 4], 1.0, 5)
    index.expect(holding, [1, 7, 8], 2.0, 5)

    assert holding.expected == 5
    assert index.match([1, 2, 3, 4]) == {holding.slot: 3}
    assert index.match([1, 7, 8]) == {holding.slot: 3}


def test_a_prompt_sent_again_is_as_young_as_its_last_sending() -> None:
    index = Index()
    holding = index.join()
    index.expect(holding, [1, 2], 1.0, NO_CAP)
    index.expect(holding, [8, 9], 2.0, NO_CAP)
    index.expect(holding, [1, 2], 3.0, NO_CAP)

    index.expire(holding, 2.5)

    assert index.match([1, 2]) == {holding.slot: 2}
    assert index.match([8, 9]) == {}


def test_a_prompt_longer_than_the_cap_keeps_its_beginning() -> None:
    index = Index()
    holding = index.join()
    index.expect(holding, range(10), 1.0, 4)

    assert index.match(range(10)) == {holding.slot: 4}


def test_retracting_a_prompt_leaves_what_others_expect() -> None:
    index = Index()
    holding = index.join()
    index.expect(holding, [1, 2, 3], 1.0, NO_CAP)
    index.expect(holding, [1, 2, 4], 2.0, NO_CAP)

    index.retract(holding, [1, 2, 3], 1.0)

    assert index.match([1, 2, 3]) == {holding.slot: 2}
    assert index.match([1, 2, 4]) == {holding.slot: 3}


def test_a_replica_that_leaves_takes_its_entries_and_its_slot_is_clean_for_the_next() -> None:
    index = Index()
    first, second = index.join(), index.join()
    for holding in (first, second):
        index.store(holding, [1, 2])
        index.expect(holding, [1, 2, 3], 1.0, NO_CAP)

    index.leave(first)
    assert index.match([1, 2, 3]) == {second.slot: 3}

    third = index.join()
    assert third.slot == first.slot
    assert index.match([1, 2, 3]) == {second.slot: 3}

    index.leave(second)
    assert len(index) == 0


@pytest.mark.parametrize("order", [[1], [3], [1, 3], [2, 3]])
def test_a_hole_gives_a_depth_within_the_prompt_and_nothing_else_goes_wrong(order: list[int]) -> None:
    index = Index()
    liar, honest = index.join(), index.join()
    index.store(honest, [0, 1, 2, 3])
    index.store(liar, [0, 1, 2, 3])

    index.remove(liar, order)

    depths = index.match([0, 1, 2, 3])
    assert depths[honest.slot] == 4
    assert 0 <= depths.get(liar.slot, 0) <= 4
    index.clear(liar)
    assert (liar.confirmed, len(index)) == (0, 4)


class HonestReplicas(RuleBasedStateMachine):
    """Stores child after parent and removes leaf first, as engines do: depths are exact.

    A prompt is a path in a tree; the name of a block is its path, so names compare as prefixes do.
    """

    replicas = Bundle("replicas")
    paths = st.lists(st.integers(0, 1), min_size=1, max_size=7)

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.confirmed: dict[Holding, set[int]] = {}
        self.expected: dict[Holding, dict[int, float]] = {}
        self.stamp = 0.0

    @staticmethod
    def names(path: Sequence[int]) -> list[int]:
        names, name = [], 1
        for step in path:
            name = name * 4 + step + 1
            names.append(name)
        return names

    def held(self, replica: Holding) -> set[int]:
        return self.confirmed[replica] | self.expected[replica].keys()

    @initialize(target=replicas)
    def start(self) -> Holding:
        return self.new_replica()

    @rule(target=replicas)
    def join(self) -> Holding:
        return self.new_replica()

    def new_replica(self) -> Holding:
        holding = self.index.join()
        self.confirmed[holding], self.expected[holding] = set(), {}
        return holding

    @rule(replica=consumes(replicas))
    def leave(self, replica: Holding) -> None:
        self.index.leave(replica)
        del self.confirmed[replica], self.expected[replica]

    @rule(replica=replicas, path=paths)
    def store(self, replica: Holding, path: list[int]) -> None:
        self.index.store(replica, self.names(path))
        self.confirmed[replica] |= set(self.names(path))
        for name in self.names(path):
            self.expected[replica].pop(name, None)

    @rule(replica=replicas, data=st.data())
    def remove_a_leaf(self, replica: Holding, data: st.DataObject) -> None:
        held = self.held(replica)
        leaves = [name for name in self.confirmed[replica] if not held & {name * 4 + step + 1 for step in range(3)}]
        if leaves:
            leaf = data.draw(st.sampled_from(sorted(leaves)))
            self.index.remove(replica, [leaf])
            self.confirmed[replica].remove(leaf)

    @rule(replica=replicas, path=paths, cap=st.sampled_from([0, 3, 8, 20, NO_CAP]))
    def expect(self, replica: Holding, path: list[int], cap: int) -> None:
        self.stamp += 1
        self.index.expect(replica, self.names(path), self.stamp, cap)
        expected = self.expected[replica]
        for name in reversed(self.names(path)):
            if name not in self.confirmed[replica]:
                expected.pop(name, None)
                expected[name] = self.stamp
        while len(expected) > cap:
            del expected[next(iter(expected))]

    @rule(replica=replicas, age=st.integers(0, 5))
    def expire(self, replica: Holding, age: int) -> None:
        horizon = self.stamp - age
        self.index.expire(replica, horizon)
        self.expected[replica] = {name: stamp for name, stamp in self.expected[replica].items() if stamp >= horizon}

    @rule(replica=replicas, path=paths, age=st.integers(0, 5))
    def retract(self, replica: Holding, path: list[int], age: int) -> None:
        # Only what a prompt of that very stamp expects may go, and its leaves are the last that others need.
        names = self.names(path)
        stamp = self.stamp - age
        mine = {name for name, at in self.expected[replica].items() if at == stamp}
        if mine <= set(names):
            self.index.retract(replica, names, stamp)
            for name in mine:
                del self.expected[replica][name]

    @rule(replica=replicas)
    def clear(self, replica: Holding) -> None:
        self.index.clear(replica)
        self.confirmed[replica], self.expected[replica] = set(), {}

    @rule(path=paths, limit=st.none() | st.integers(0, 7))
    def match(self, path: list[int], limit: int | None) -> None:
        names = self.names(path)
        found = self.index.match(names, limit)
        for replica in self.confirmed:
            assert found.pop(replica.slot, 0) == plain_depth(self.held(replica), names[:limit])
        assert not found

    @invariant()
    def counts_are_exact(self) -> None:
        for replica in self.confirmed:
            assert replica.confirmed == len(self.confirmed[replica])
            assert replica.expected == len(self.expected[replica])
        assert len(self.index) == len({name for replica in self.confirmed for name in self.held(replica)})
        assert self.index.room.used == sum(len(self.held(replica)) for replica in self.confirmed)

    @rule(replica=replicas, most=st.integers(1, 4))
    def drop_oldest(self, replica: Holding, most: int) -> None:
        self.index.drop_oldest(replica, most)
        expected = self.expected[replica]
        oldest = [name for name, stamp in expected.items() if stamp == next(iter(expected.values()))]
        for name in oldest[:most]:
            del expected[name]

    @rule(replica=replicas, age=st.integers(0, 5))
    def count_since(self, replica: Holding, age: int) -> None:
        since = self.stamp - age
        assert replica.expected_since(since) == sum(stamp > since for stamp in self.expected[replica].values())


TestHonestReplicas = HonestReplicas.TestCase
TestHonestReplicas.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

events = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "expect", "retract", "expire", "clear", "clear_confirmed"]),
        st.integers(0, 2),
        st.lists(st.integers(-3, 9), max_size=8),
    ),
    max_size=40,
)


@given(events, st.lists(st.integers(-3, 9), max_size=10))
@settings(max_examples=300, deadline=None)
def test_events_in_any_order_never_raise_and_every_entry_is_counted_once(
    events: list[tuple[str, int, list[int]]], names: list[int]
) -> None:
    index = Index()
    replicas = [index.join() for _ in range(3)]
    for stamp, (event, which, blocks) in enumerate(events):
        replica = replicas[which]
        if event == "store":
            index.store(replica, blocks)
        elif event == "remove":
            index.remove(replica, blocks)
        elif event == "expect":
            index.expect(replica, blocks, float(stamp), 6)
            assert replica.expected <= 6
        elif event == "retract":
            index.retract(replica, blocks, float(max(stamp - 1, 0)))
        elif event == "expire":
            index.expire(replica, float(stamp - 3))
        elif event == "clear":
            index.clear(replica)
        else:
            index.clear_confirmed(replica)
        for depth in index.match(names).values():
            assert 0 < depth <= len(names)

    held = [replica.confirmed + replica.expected for replica in replicas]
    assert index.room.used == sum(held)
    assert max(held) <= len(index) <= sum(held)
    for replica in replicas:
        index.leave(replica)
    assert len(index) == 0
