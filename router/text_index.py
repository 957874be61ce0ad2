"""Which replica was sent which text: what `router.index` is for tokens, for replicas without events.

Here nothing is confirmed and nothing comes name by name: prompts are sent, whole, and forgotten. So what is kept are *runs*,
chunks that follow each other and are held by the same replicas; a tree of them, in which prompts share what they have in
common (as in SGLang's radix cache). A prompt that nobody has seen is one run, a talk that stays at its replica remains one.

Operations and their cost, for a prompt that is made up of r runs (1 to 3 are usual):

- `match`: how many leading chunks of a prompt each replica holds. O(r · log n + holders).
- `expect`: what a prompt just sent there will leave behind. O(r · log n), and a list operation over what is new.
- `retract`, `expire`, `clear`, `drop_oldest`: O(runs that go).

A name stands for all of the text before it (`router.blocks`), so two runs that agree in one name agree in all before it, and
bisection finds where they part. A replica holds a run or it does not: what would hold a part of one parts it in two.

What must hold: the runs of one stamp stand leaf first, and those of an older stamp go first, so a parent outlives its children
at each replica. A run that nobody holds is in the tree only while it has branches.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from router.index import Room

__all__ = ["RUN_ENTRIES", "TextHolding", "TextIndex"]

RUN_ENTRIES: Final = 3
"""What a run takes beside its names, in entries of `router.index.ENTRY_BYTES`. Measured by `tests.router.bench_memory`."""


class _Run:
    """Chunks that follow each other. Changed only by the index."""

    __slots__ = ("branches", "held", "names", "parent", "place", "size")

    def __init__(self, names: list[int], place: int, size: int, parent: _Run | None) -> None:
        self.names = names
        self.place = place
        """How many chunks are before it."""
        self.size = size
        self.parent = parent
        self.branches: dict[int, _Run] | None = None
        """By their first names."""
        self.held: dict[int, float] = {}
        """Slot of each replica that holds it → when it was last sent there."""


class TextHolding:
    """What one replica holds. Made by `TextIndex.join`, changed only by the index."""

    __slots__ = ("_by_stamp", "expected", "slot")

    confirmed: Final = 0
    """Events come with tokens."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.expected = 0
        """How much it should hold by what was sent to it, in units of the smallest chunk."""
        self._by_stamp: OrderedDict[float, list[_Run]] = OrderedDict()  # oldest first; in each, leaf first

    @property
    def oldest_stamp(self) -> float:
        """When what goes first was last sent there; infinity when there is nothing."""
        return next(iter(self._by_stamp), math.inf)

    def expected_since(self, stamp: float) -> int:
        """How much was last sent there after `stamp`. O(runs of it)."""
        size = 0
        for at, runs in reversed(self._by_stamp.items()):
            if at <= stamp:
                break
            for run in runs:
                size += run.size
        return size

    def names(self) -> Iterator[int]:
        """In the order in which they go."""
        for run in self.runs():
            yield from reversed(run.names)

    def runs(self) -> Iterator[_Run]:
        for runs in self._by_stamp.values():
            yield from runs


class TextIndex:
    def __init__(self, room: Room | None, ends: Sequence[int]) -> None:
        """`ends`: how much text, in units of the smallest chunk, the first chunk holds, the first two, and so on."""
        self.room = Room() if room is None else room
        self._ends = (0, *ends)
        self._roots: dict[int, _Run] = {}
        self._holdings: list[TextHolding] = []  # by slot; of a free one, the last that had it
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        """Number of different chunks that anybody holds. O(runs)."""
        count = 0
        runs = list(self._roots.values())
        while runs:
            run = runs.pop()
            count += len(run.names) if run.held else 0
            runs += (run.branches or {}).values()
        return count

    def join(self) -> TextHolding:
        if self._free_slots:
            slot = self._free_slots.pop()
            holding = self._holdings[slot] = TextHolding(slot)
        else:
            holding = TextHolding(len(self._holdings))
            self._holdings.append(holding)
        return holding

    def leave(self, holding: TextHolding) -> None:
        """Drop all it holds; its slot may be given to another. The holding is of no further use."""
        self.clear(holding)
        self._free_slots.append(holding.slot)

    def clear(self, holding: TextHolding) -> None:
        self.expire(holding, math.inf)

    def expire(self, holding: TextHolding, horizon: float) -> None:
        """Drop what was last sent there before `horizon`."""
        by_stamp = holding._by_stamp
        while by_stamp and next(iter(by_stamp)) < horizon:
            self._let_go(holding, by_stamp.popitem(last=False)[1])

    def clear_confirmed(self, holding: TextHolding) -> None:
        """There is nothing of that kind."""

    def retract(self, holding: TextHolding, names: Sequence[int], stamp: float, known: int = 0) -> None:
        """The prompt sent at `stamp` was not computed. What a later prompt expects too stays, and so do its first `known`
        chunks, which were there before.
        """
        runs = holding._by_stamp.get(stamp, [])
        first_kept = next((number for number, run in enumerate(runs) if run.place < known), len(runs))
        gone = runs[:first_kept]
        del runs[:first_kept]
        self._let_go(holding, gone)
        if runs and (keep := known - runs[0].place) < len(runs[0].names):
            if _is_shared(runs[0]):
                self._part(runs[0], keep)
                self._let_go(holding, [runs.pop(0)])
            else:
                self._shorten_to(holding, runs[0], keep)
        if not runs:
            holding._by_stamp.pop(stamp, None)

    def expect(self, holding: TextHolding, names: Sequence[int], stamp: float, cap: int) -> tuple[float | None, int]:
        """A prompt with these chunks was sent there at `stamp`; keep at most `cap` of `TextHolding.expected` or less than a
        chunk more, dropping the oldest.

        Returns when the deepest of them that was expected already had last been sent there, None when none was; and how many
        leading ones were. `stamp` must be larger than every one before it.
        """
        slot, by_stamp = holding.slot, holding._by_stamp
        last_sent = None
        runs, known = self._runs_of(names, slot)
        runs.reverse()
        for run in runs:
            at = run.held.get(slot)
            if at is None:
                known = run.place
                holding.expected += run.size
                self.room.used += len(run.names) + RUN_ENTRIES
            else:
                if last_sent is None:
                    last_sent = at
                siblings = by_stamp[at]
                siblings.remove(run)
                if not siblings:
                    del by_stamp[at]
            run.held[slot] = stamp
        if runs:
            by_stamp[stamp] = runs
        while (excess := holding.expected - cap) > 0 and self._shorten(holding, excess):
            pass
        return last_sent, known

    def drop_oldest(self, holding: TextHolding, most: int) -> None:
        """Drop what was last sent there longest ago, at one moment, leaves first: `most` entries of it or all, and what is left
        of a run that cannot be shortened without parting it.
        """
        runs = next(iter(holding._by_stamp.values()), [])
        while runs and most > 0:
            run = runs[0]
            keep = 0 if _is_shared(run) else len(run.names) - most
            most -= len(run.names) + RUN_ENTRIES
            self._cut(holding, run, max(keep, 0))

    def match(self, names: Sequence[int], limit: int | None = None) -> dict[int, int]:
        """Slot of each replica that holds a prefix of `names` → number of leading chunks it holds, at most `limit`."""
        count = len(names) if limit is None else min(len(names), limit)
        depths: dict[int, int] = {}
        branches: dict[int, _Run] | None = self._roots
        place = 0
        while branches and place < count and (run := branches.get(names[place])) is not None:
            shared = _shared(run.names, names, place, count)
            end = place + shared
            if not place:
                depths = dict.fromkeys(run.held, end)
            else:
                for slot in run.held:
                    if depths.get(slot) == place:
                        depths[slot] = end
            if shared < len(run.names):
                break
            branches, place = run.branches, end
        return depths

    def _runs_of(self, names: Sequence[int], slot: int) -> tuple[list[_Run], int]:
        """The runs that make up all of `names`, from its beginning, and of how many chunks there were some. Where there are
        none that do, they are made.
        """
        runs: list[_Run] = []
        branches: dict[int, _Run] | None = self._roots
        parent: _Run | None = None
        place, count = 0, min(len(names), len(self._ends) - 1)  # beyond that there are no texts
        while branches and place < count and (run := branches.get(names[place])) is not None:
            shared = _shared(run.names, names, place, count)
            if shared < len(run.names):
                self._part(run, shared)
            runs.append(run)
            parent, place = run, place + shared
            branches = run.branches
        if place == count:
            return runs, place
        if parent is None:
            branches = self._roots
        elif slot in parent.held and not _is_shared(parent):
            self._extend(parent, names[place:count])
            return runs, place
        elif branches is None:
            branches = parent.branches = {}
        run = _Run(list(names[place:count]), place, self._ends[count] - self._ends[place], parent)
        branches[names[place]] = run
        runs.append(run)
        return runs, place

    def _extend(self, run: _Run, names: Sequence[int]) -> None:
        """A talk went on where it was: its only holder has more of it."""
        (slot,) = run.held
        run.names += names
        size = self._ends[run.place + len(run.names)] - self._ends[run.place]
        self._holdings[slot].expected += size - run.size
        self.room.used += len(names)
        run.size = size

    def _part(self, run: _Run, at: int) -> _Run:
        """In two, for all who hold it: the first `at` chunks stay this run. Returns the other."""
        place = run.place + at
        rest = _Run(run.names[at:], place, self._ends[run.place + len(run.names)] - self._ends[place], run)
        del run.names[at:]
        run.size -= rest.size
        rest.held = run.held.copy()
        rest.branches, run.branches = run.branches, {rest.names[0]: rest}
        for branch in (rest.branches or {}).values():
            branch.parent = rest
        for slot, stamp in rest.held.items():
            siblings = self._holdings[slot]._by_stamp[stamp]
            siblings.insert(siblings.index(run), rest)
        self.room.used += RUN_ENTRIES * len(rest.held)
        return rest

    def _shorten(self, holding: TextHolding, excess: int) -> bool:
        """Drop so much of the run that goes first, all but less than a chunk, so that what is full also looks full. False when
        that is nothing.
        """
        run = next(iter(holding._by_stamp.values()))[0]
        end = run.place + len(run.names)
        keep = max(bisect_left(self._ends, self._ends[end] - excess) - run.place, 0)
        if keep == len(run.names):
            return False
        self._cut(holding, run, keep)
        return True

    def _cut(self, holding: TextHolding, run: _Run, keep: int) -> None:
        """The replica keeps only so many chunks of a run, which is the first of its stamp and of its holding."""
        if keep and not _is_shared(run):
            self._shorten_to(holding, run, keep)
            return
        gone = self._part(run, keep) if keep else run
        by_stamp = holding._by_stamp
        stamp, runs = next(iter(by_stamp.items()))
        del runs[0]
        if not runs:
            del by_stamp[stamp]
        self._let_go(holding, [gone])

    def _shorten_to(self, holding: TextHolding, run: _Run, keep: int) -> None:
        """Of a run that only this replica holds, and that nothing goes on from, so many chunks are left."""
        size = self._ends[run.place + keep] - self._ends[run.place]
        holding.expected -= run.size - size
        self.room.used -= len(run.names) - keep
        run.size = size
        del run.names[keep:]

    def _let_go(self, holding: TextHolding, runs: Iterable[_Run]) -> None:
        """The replica holds these no more; they are out of its order already."""
        slot = holding.slot
        for run in runs:
            del run.held[slot]
            holding.expected -= run.size
            self.room.used -= len(run.names) + RUN_ENTRIES
            while not run.held and not run.branches:
                parent = run.parent
                if parent is None:
                    del self._roots[run.names[0]]
                    break
                assert parent.branches is not None
                del parent.branches[run.names[0]]
                run = parent


def _is_shared(run: _Run) -> bool:
    """Whether another replica holds it, or its end is a beginning."""
    return len(run.held) > 1 or bool(run.branches)


def _shared(run: Sequence[int], names: Sequence[int], place: int, count: int) -> int:
    """How many chunks of `names` from `place` on, up to `count`, are those of a run that begins with the same one."""
    most = min(len(run), count - place)
    if run[most - 1] == names[place + most - 1]:
        return most
    same, other = 0, most - 1
    while other - same > 1:
        middle = (same + other) // 2
        if run[middle] == names[place + middle]:
            same = middle
        else:
            other = middle
    return other
