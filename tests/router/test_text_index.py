"""`router.text_index` against a plain model: the names of each replica in the order in which they go."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from router.text_index import RUN_ENTRIES, TextHolding, TextIndex
from tests.router.test_index import plain_depth

NO_CAP = 10**9
SIZES = (1, 1, 1, 2, 2, 3, 3, 4, 4, 5)
ENDS = tuple(sum(SIZES[: place + 1]) for place in range(len(SIZES)))


def names_of(path: Sequence[int]) -> list[int]:
    """A prompt is a path in a tree; the name of a chunk is its path, so names compare as prefixes do."""
    names, name = [], 1
    for step in path:
        name = name * 4 + step + 1
        names.append(name)
    return names


def size_of(name: int) -> int:
    place = -1
    while name > 1:
        name = (name - 1) // 4
        place += 1
    return SIZES[place]


def test_a_new_prompt_is_known_as_deep_as_another_one_agrees_with_it() -> None:
    index = TextIndex(None, range(1, 300))
    holding = index.join()
    index.expect(holding, list(range(200)), 1.0, NO_CAP)

    assert index.match(list(range(250))) == {holding.slot: 200}
    assert index.match([*range(77), *range(1000, 1100)]) == {holding.slot: 77}
    assert index.match(list(range(200)), 10) == {holding.slot: 10}
    assert index.match([7]) == {}


def test_a_talk_that_stays_where_it_was_remains_one_run() -> None:
    index = TextIndex(None, range(1, 300))
    holding = index.join()
    for turn in range(1, 20):
        index.expect(holding, list(range(10 * turn)), float(turn), NO_CAP)

    assert len(list(holding.runs())) == 1
    assert index.room.used == 190 + RUN_ENTRIES


def test_more_chunks_than_any_text_has_are_not_looked_at() -> None:
    index = TextIndex(None, range(1, 10))
    holding = index.join()
    index.expect(holding, list(range(100)), 1.0, NO_CAP)
    index.expect(holding, list(range(100)), 2.0, NO_CAP)

    assert index.match(list(range(100))) == {holding.slot: 9}
    assert holding.expected == 9


class Replicas(RuleBasedStateMachine):
    replicas = Bundle("replicas")
    paths = st.lists(st.integers(0, 1), min_size=1, max_size=len(SIZES))

    def __init__(self) -> None:
        super().__init__()
        self.index = TextIndex(None, ENDS)
        self.held: dict[TextHolding, dict[int, float]] = {}
        self.sent: dict[tuple[TextHolding, float], tuple[list[int], int]] = {}
        """What each was sent at which stamp, and how much of it was there before."""
        self.stamp = 0.0

    @initialize(target=replicas)
    def start(self) -> TextHolding:
        return self.new_replica()

    @rule(target=replicas)
    def join(self) -> TextHolding:
        return self.new_replica()

    def new_replica(self) -> TextHolding:
        holding = self.index.join()
        self.held[holding] = {}
        return holding

    @rule(replica=consumes(replicas))
    def leave(self, replica: TextHolding) -> None:
        self.index.leave(replica)
        del self.held[replica]

    @rule(replica=replicas, path=paths, cap=st.sampled_from([0, 3, 8, 20, 40, NO_CAP]))
    def expect(self, replica: TextHolding, path: list[int], cap: int) -> None:
        names, held = names_of(path), self.held[replica]
        self.stamp += 1
        before = [held[name] for name in names if name in held]

        last_sent, known = self.index.expect(replica, names, self.stamp, cap)

        assert last_sent == (before[-1] if before else None)
        assert known == plain_depth(set(held), names)
        self.sent[replica, self.stamp] = names, known
        for name in reversed(names):
            held.pop(name, None)
            held[name] = self.stamp
        excess = sum(map(size_of, held)) - cap
        while held and (excess := excess - size_of(next(iter(held)))) >= 0:
            del held[next(iter(held))]

    @rule(replica=replicas, age=st.integers(0, 5))
    def expire(self, replica: TextHolding, age: int) -> None:
        horizon = self.stamp - age
        self.index.expire(replica, horizon)
        self.held[replica] = {name: stamp for name, stamp in self.held[replica].items() if stamp >= horizon}

    @rule(replica=replicas, age=st.integers(0, 5), is_lost=st.booleans())
    def retract(self, replica: TextHolding, age: int, is_lost: bool) -> None:
        """`is_lost`: also what was there before."""
        stamp = self.stamp - age
        names, known = self.sent.get((replica, stamp), ([], 0))
        known = 0 if is_lost else known
        self.index.retract(replica, names, stamp, known)
        stays = set(names[:known])
        self.held[replica] = {name: at for name, at in self.held[replica].items() if at != stamp or name in stays}

    @rule(replica=replicas)
    def clear(self, replica: TextHolding) -> None:
        self.index.clear(replica)
        self.held[replica] = {}

    @rule(replica=replicas, most=st.integers(1, 12))
    def drop_oldest(self, replica: TextHolding, most: int) -> None:
        before, used = list(self.held[replica].items()), self.index.room.used

        self.index.drop_oldest(replica, most)

        gone = len(before) - len(list(replica.names()))
        oldest = [name for name, stamp in before if stamp == before[0][1]]
        assert gone <= len(oldest)
        assert used - self.index.room.used >= most or gone == len(oldest)
        self.held[replica] = dict(before[gone:])

    @rule(replica=replicas, age=st.integers(0, 5))
    def count_since(self, replica: TextHolding, age: int) -> None:
        since = self.stamp - age
        sizes = [size_of(name) for name, stamp in self.held[replica].items() if stamp > since]
        assert replica.expected_since(since) == sum(sizes)

    @rule(path=paths, limit=st.none() | st.integers(0, len(SIZES)))
    def match(self, path: list[int], limit: int | None) -> None:
        names = names_of(path)
        found = self.index.match(names, limit)
        for replica, held in self.held.items():
            assert found.pop(replica.slot, 0) == plain_depth(set(held), names[:limit])
        assert not found

    @invariant()
    def all_is_held_and_counted_as_it_should_be(self) -> None:
        for replica, held in self.held.items():
            assert list(replica.names()) == list(held)
            assert replica.expected == sum(map(size_of, held))
            assert replica.oldest_stamp == next(iter(held.values()), float("inf"))
        assert len(self.index) == len({name for held in self.held.values() for name in held})
        runs = sum(len(list(replica.runs())) for replica in self.held)
        assert self.index.room.used == sum(map(len, self.held.values())) + RUN_ENTRIES * runs

    @invariant()
    def the_tree_holds_nothing_that_nobody_holds(self) -> None:
        runs = [(None, first, run) for first, run in self.index._roots.items()]
        while runs:
            parent, first, run = runs.pop()
            assert run.parent is parent
            assert run.names[0] == first
            assert run.size == sum(map(size_of, run.names))
            assert run.held or run.branches
            runs += [(run, name, branch) for name, branch in (run.branches or {}).items()]  # type: ignore[misc]

    def teardown(self) -> None:
        for replica in self.held:
            self.index.leave(replica)
        assert not self.index._roots
        assert self.index.room.used == 0


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["expect", "retract", "expire", "drop", "clear"]),
            st.integers(0, 2),
            st.lists(st.integers(-3, 9), max_size=8),
        ),
        max_size=40,
    ),
    st.lists(st.integers(-3, 9), max_size=10),
)
@settings(max_examples=300, deadline=None)
def test_names_that_are_no_hashes_of_what_is_before_them_break_nothing(
    events: list[tuple[str, int, list[int]]], names: list[int]
) -> None:
    """As if somebody had found collisions."""
    index = TextIndex(None, ENDS)
    replicas = [index.join() for _ in range(3)]
    for stamp, (event, which, chunks) in enumerate(events):
        replica = replicas[which]
        if event == "expect":
            index.expect(replica, chunks, float(stamp), 12)
            assert replica.expected < 12 + max(SIZES)
        elif event == "retract":
            index.retract(replica, chunks, float(stamp - 1), which)
        elif event == "expire":
            index.expire(replica, float(stamp - 3))
        elif event == "drop":
            index.drop_oldest(replica, len(chunks))
        else:
            index.clear(replica)
        for depth in index.match(names).values():
            assert 0 < depth <= len(names)

    for replica in replicas:
        index.leave(replica)
    assert not index._roots
    assert index.room.used == 0
