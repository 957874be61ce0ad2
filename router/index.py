"""Which replica holds which block.

Operations and their cost, for a prompt of n blocks and R replicas:

- `match`: how many leading blocks of a prompt each replica holds. O(d · log n) look-ups, d = number of different answers; one
  look-up when nobody holds the first block. Never a step per block, never a look-up per replica.
- `store`, `remove`: what a replica's events say. O(1) a block.
- `expect`: what a prompt just sent there will leave behind. O(blocks that no event has confirmed yet).
- `leave`, `clear`: O(what that replica holds).
- `drop_oldest`: O(1) an entry that goes.

A dict maps a name to a bit mask of replicas (in `_SHARDS` parts, because one of 500,000 names takes 15 ms to grow); beside it
each replica keeps its own names, so that it can leave without a walk over everybody's. A name is held because events
*confirmed* it or because it is *expected*; the mask does not tell these apart, so a match costs one look-up a step. An entry
takes at most `ENTRY_BYTES`, name included, and on average much less: 90-150 bytes when confirmed and 140-210 when expected by
one replica, 40 and 100 for each of many (CPython 3.11).

This is the index of replicas with events, that of the others is `router.text_index`; the rest of the router sees a
`PrefixIndex` in both. A `Room` counts the entries of all that share it, so that one bound in bytes holds over them all. An
index only counts; whoever adds (`router.route`) drops what was used least recently when the room is over its limit.

What `match` relies on: a replica that holds a block holds all blocks before it, because engines free a sequence tail first
and never keep a child without its parent. So masks only lose bits along a prompt, and bisection finds where. Confirmed
entries inherit this from the replica; expected ones are touched leaf first and dropped oldest first, so a parent always
outlives its children. A replica whose events break the rule gets a wrong depth for itself, and nothing else goes wrong:
every entry is still counted once and dropped once.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

__all__ = ["ENTRY_BYTES", "Holding", "Index", "PrefixIndex", "Room"]

ENTRY_BYTES: Final = 220
"""The most that one block of one replica costs here: its dicts have just grown, nobody else holds it, names are not shared.
Measured by `python -m tests.router.bench_memory`."""

_SHARDS: Final = 256
_SHARD_BITS: Final = _SHARDS - 1
"""Names are hashes, so their last bits are as good as any."""


@dataclass(slots=True)
class Room:
    """Entries (a block that a replica holds) in all indexes together, and how many there may be."""

    limit: int = sys.maxsize
    used: int = 0


class PrefixIndex(Protocol):
    """What both kinds of index can do, each with the holdings that it made."""

    def join(self) -> Any: ...
    def leave(self, holding: Any) -> None: ...
    def clear(self, holding: Any) -> None: ...
    def clear_confirmed(self, holding: Any) -> None: ...
    def expect(self, holding: Any, names: Sequence[int], stamp: float, cap: int) -> tuple[float | None, int]: ...
    def retract(self, holding: Any, names: Sequence[int], stamp: float, known: int = 0) -> None: ...
    def expire(self, holding: Any, horizon: float) -> None: ...
    def drop_oldest(self, holding: Any, most: int) -> None: ...
    def match(self, names: Sequence[int], limit: int | None = None) -> dict[int, int]: ...


class Holding:
    """What one replica holds. Made by `Index.join`, changed only by the index."""

    __slots__ = ("_bit", "_confirmed", "_expected", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self._bit = 1 << slot
        self._confirmed: dict[int, None] = {}
        """A set, as a dict: that has only numbers in it, so the garbage collector does not walk over it. The sets of 8 full
        caches, just made, took its smallest collection 30 ms.
        """
        self._expected: OrderedDict[int, float] = OrderedDict()  # name → stamp, oldest first

    @property
    def confirmed(self) -> int:
        """How many blocks events say it holds."""
        return len(self._confirmed)

    @property
    def expected(self) -> int:
        """How many more blocks it should hold by what was sent to it."""
        return len(self._expected)

    @property
    def oldest_stamp(self) -> float:
        """When the expected block that goes first was last sent there; infinity when there is none."""
        return next(iter(self._expected.values()), math.inf)

    def expected_since(self, stamp: float) -> int:
        """How many expected blocks were last sent there after `stamp`. O(that number)."""
        count = 0
        for at in reversed(self._expected.values()):
            if at <= stamp:
                break
            count += 1
        return count


class Index:
    def __init__(self, room: Room | None = None) -> None:
        self.room = Room() if room is None else room
        self._shards: tuple[dict[int, int], ...] = tuple({} for _ in range(_SHARDS))
        self._free_slots: list[int] = []
        self._slots = 0

    def __len__(self) -> int:
        """Number of different blocks that anybody holds."""
        return sum(map(len, self._shards))

    def join(self) -> Holding:
        if self._free_slots:
            return Holding(self._free_slots.pop())
        self._slots += 1
        return Holding(self._slots - 1)

    def leave(self, holding: Holding) -> None:
        """Drop all it holds; its slot may be given to another. The holding is of no further use."""
        self.clear(holding)
        self._free_slots.append(holding.slot)

    def clear(self, holding: Holding) -> None:
        self.clear_confirmed(holding)
        self.expire(holding, float("inf"))

    def clear_confirmed(self, holding: Holding) -> None:
        gone, holding._confirmed = holding._confirmed, {}
        self._drop(holding, gone)

    def store(self, holding: Holding, names: Iterable[int]) -> None:
        """Events say that it holds these; what was expected is now known."""
        shards, bit, confirmed, expected = self._shards, holding._bit, holding._confirmed, holding._expected
        before = len(confirmed) + len(expected)
        for name in names:
            if name in confirmed:
                continue
            confirmed[name] = None
            if expected.pop(name, None) is None:
                # `bit` itself for a first holder: a new number would take 32 bytes more.
                masks = shards[name & _SHARD_BITS]
                if (held := masks.setdefault(name, bit)) is not bit:
                    masks[name] = held | bit
        self.room.used += len(confirmed) + len(expected) - before

    def remove(self, holding: Holding, names: Iterable[int]) -> None:
        """Events say that it no longer holds these. Names that it does not hold are ignored."""
        confirmed = holding._confirmed
        self._drop(holding, [name for name in names if confirmed.pop(name, name) is None])

    def expect(self, holding: Holding, names: Sequence[int], stamp: float, cap: int) -> tuple[float | None, int]:
        """A prompt with these blocks was sent there at `stamp`; keep at most `cap` of `Holding.expected`, dropping the oldest.

        Returns when the deepest of them that was expected already had last been sent there, None when none was; and 0: of a
        prompt that is retracted nothing stays expected, for what was computed before events tell. `stamp` must be larger than
        every one before it. The walk goes from the leaf to the first confirmed block: the blocks before that one are
        confirmed too.
        """
        shards, bit, confirmed, expected = self._shards, holding._bit, holding._confirmed, holding._expected
        before, last_sent = len(expected), None
        for name in reversed(names):
            if name in confirmed:
                break
            if name in expected:
                if last_sent is None:
                    last_sent = expected[name]
                expected.move_to_end(name)
            else:
                masks = shards[name & _SHARD_BITS]
                if (held := masks.setdefault(name, bit)) is not bit:
                    masks[name] = held | bit
            expected[name] = stamp
        self.room.used += len(expected) - before
        if (excess := len(expected) - cap) > 0:
            self._drop(holding, [expected.popitem(last=False)[0] for _ in range(excess)])
        return last_sent, 0

    def retract(self, holding: Holding, names: Sequence[int], stamp: float, known: int = 0) -> None:
        """The prompt sent at `stamp` was not computed. Blocks that a later prompt expects too stay."""
        expected = holding._expected
        gone = []
        for name in names:
            if expected.get(name) == stamp:
                del expected[name]
                gone.append(name)
        self._drop(holding, gone)

    def expire(self, holding: Holding, horizon: float) -> None:
        """Drop what was last sent there before `horizon`."""
        expected = holding._expected
        gone = []
        for name, stamp in expected.items():
            if stamp >= horizon:
                break
            gone.append(name)
        for name in gone:
            del expected[name]
        self._drop(holding, gone)

    def drop_oldest(self, holding: Holding, most: int) -> None:
        """Drop what was last sent there longest ago, at one moment, leaves first; at most `most` of it."""
        expected, stamp = holding._expected, holding.oldest_stamp
        gone: list[int] = []
        for name, at in expected.items():
            if at != stamp or len(gone) == most:
                break
            gone.append(name)
        for name in gone:
            del expected[name]
        self._drop(holding, gone)

    def match(self, names: Sequence[int], limit: int | None = None) -> dict[int, int]:
        """Slot of each replica that holds a prefix of `names` → number of leading blocks it holds, at most `limit`."""
        count = len(names) if limit is None else min(len(names), limit)
        if count <= 0:
            return {}
        shards = self._shards
        first = shards[names[0] & _SHARD_BITS].get(names[0], 0)
        if not first:
            return {}
        depths: dict[int, int] = {}
        # Ranges [low, high) left to search; everybody in `here` holds the block at `low`, those who hold the one at `high`
        # are `there`. At `count` nobody holds anything.
        ranges = [(0, first, count, 0)]
        while ranges:
            low, here, high, there = ranges.pop()
            if here == there:
                continue
            if high - low == 1:
                lost = here & ~there
                while lost:
                    bit = lost & -lost
                    depths[bit.bit_length() - 1] = high
                    lost ^= bit
                continue
            middle = (low + high) // 2
            name = names[middle]
            between = shards[name & _SHARD_BITS].get(name, 0) & here
            ranges.append((low, here, middle, between))
            ranges.append((middle, between, high, there & between))
        return depths

    def _drop(self, holding: Holding, names: Collection[int]) -> None:
        """These left one of its collections. A name is never in both: what is confirmed is not expected any more."""
        self.room.used -= len(names)
        shards, bit = self._shards, holding._bit
        for name in names:
            masks = shards[name & _SHARD_BITS]
            left = masks[name] ^ bit
            if left:
                masks[name] = left
            else:
                del masks[name]
