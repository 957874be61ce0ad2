"""A bounded memory of values that can be made again.

Two generations, each a plain dict. What was found goes into the younger one; when that is full it becomes the older one, and
what had been the older is dropped. Any thread may use it, and none waits: threads that meet lose an entry at worst.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Generations"]

_Value = TypeVar("_Value")


class Generations(Generic[_Value]):
    def __init__(self, max_entries: int) -> None:
        """Of each generation, at least 1."""
        self._max_entries = max(max_entries, 1)
        self._young: dict[int, _Value] = {}
        self._old: dict[int, _Value] = {}

    def __len__(self) -> int:
        """Entries kept, each counted once or, while it moves from the older generation, twice."""
        return len(self._young) + len(self._old)

    def get(self, key: int) -> _Value | None:
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: int, value: _Value) -> None:
        if len(self._young) >= self._max_entries:
            self._old, self._young = self._young, {}
        self._young[key] = value
