"""How much of what sequences want computed will cost nothing, because another one has it computed. Pure.

Waiting sequences that share a prefix wait for the first of them to compute it (`workers.scheduler`), so a sum over all of them
counts it too often. Names stand for blocks here, for it is an estimate: a collision of two makes it a little low.

A name costs one dict entry when it comes and when it goes; the count itself costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.blocks import BlockName

__all__ = ["Wanted"]


class Wanted:
    """A multiset of names."""

    def __init__(self) -> None:
        self.num_free = 0
        """Of all that are in it: all but one of each name, and of a name that was just computed that one too."""
        self._times: dict[BlockName, int] = {}
        self._computed: set[BlockName] = set()

    def add(self, names: Iterable[BlockName]) -> None:
        """One more wants these, and the cache does not have them."""
        times = self._times
        for name in names:
            before = times.get(name, 0)
            times[name] = before + 1
            if name in self._computed:
                self._computed.remove(name)  # and dropped again
            elif before:
                self.num_free += 1

    def remove(self, names: Iterable[BlockName]) -> None:
        """One less wants these, each of them wanted before."""
        times = self._times
        for name in names:
            left = times[name] - 1
            if left or name in self._computed:
                self.num_free -= 1
            if left:
                times[name] = left
            else:
                del times[name]
                self._computed.discard(name)

    def compute(self, names: Iterable[BlockName]) -> None:
        """One that wanted these has computed them. The others will know when they look into the cache."""
        times = self._times
        for name in names:
            if times[name] == 1 or name in self._computed:
                self.remove((name,))
            else:
                times[name] -= 1
                self._computed.add(name)
