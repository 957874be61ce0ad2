"""Talks that were seen before, found by the bytes that a request's messages begin with.

A talk is kept under a hash of its beginning, whose length is one of `_PLACES`. A request's beginnings of these lengths are
hashed in one go, and what is found is compared byte by byte, for wrong ids would be a wrong answer. 10 us at 36 KB, 60 us at
400 KB.

Most prompts never come again. So the first sighting leaves a few hashes only, and who was sighted before is worth being kept.
Any thread may use it, and none waits; threads that meet lose a talk at worst.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from router.generations import Generations

__all__ = ["NEW", "KnownTalk", "KnownTalks", "Sighting", "TalkSize"]

_MIN_BYTES: Final = 1 << 10
"""Less is as soon rendered as found."""
_MOST_VALUES: Final = 50_000
"""JSON values in messages: half of what a request may have."""
_MOST_ITEMS: Final = 2048
"""Messages and parts of them, as many as a request may have."""
_SEEN: Final = 1 << 15
"""Beginnings to be known again, twice: 8 MB."""
_SEEN_PLACES: Final = 2
"""Of each sighting: the end of a talk may be another one when it comes again."""
_TALK_BYTES: Final = 600
"""What holds a talk in memory, beside what it holds."""
_SAME_PLACE: Final = 16
"""Talks that are the same up to one of `_PLACES` and may be kept."""


def _places() -> list[int]:
    places = [_MIN_BYTES]
    while places[-1] < 1 << 30:
        places.append(places[-1] + places[-1] // 2)
    return places


_PLACES: Final = _places()
"""Lengths at which a text is hashed, to find what may be its beginning: 15 of them in 400 KB."""


class TalkSize(NamedTuple):
    """Of messages, as the client sent them."""

    num_items: int = 0
    """Messages, and parts of their contents."""
    num_values: int = 0
    """At least as many as there are JSON values."""
    num_bytes: int = 0
    """In memory."""

    def and_of(self, messages: Iterable[Mapping[str, Any]]) -> TalkSize:
        num_items, num_values, num_bytes = self
        level: list[Any] = []
        for message in messages:
            content = message.get("content")
            num_items += 1 + (len(content) if isinstance(content, list | tuple) else 0)
            level.append(message)
        while level:
            value = level.pop()
            num_bytes += sys.getsizeof(value)
            if isinstance(value, Mapping | list | tuple):
                num_values += 1 + len(value)
                level += value.values() if isinstance(value, Mapping) else value
        return TalkSize(num_items, num_values, num_bytes)

    @property
    def is_certainly_allowed(self) -> bool:
        return self.num_items <= _MOST_ITEMS and self.num_values <= _MOST_VALUES


@dataclass(frozen=True, slots=True, eq=False)
class KnownTalk:
    source: bytes
    """JSON of the messages, from the bracket to the end of the last one that is known."""
    messages: Sequence[Mapping[str, Any]]
    """As templates expect them."""
    only_text: bool
    """They hold nothing but texts."""
    size: TalkSize
    iterations: int
    """Of the template's loop over the messages, whose text is known."""
    missing: int
    """How many messages the loop leaves out at the beginning."""
    state: Sequence[Any]
    """What the template noted when the next iteration began."""
    before: str
    """What it wrote before the loop."""
    key: bytes
    """Of `LoopRendering`."""
    ids: bytes
    """Of what comes before the loop, and of the known iterations."""

    @property
    def size_bytes(self) -> int:
        return _TALK_BYTES + len(self.source) + self.size.num_bytes + len(self.before) + len(self.key) + len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    source: bytes
    keys: Sequence[int]
    """Of its beginnings."""
    known: KnownTalk | None
    """The longest talk that it goes on from. Behind what is known there is a comma."""
    is_again: bool
    """Whether messages that began like these were sighted before. If not, the rest is not told."""


NEW: Final = Sighting(b"", (), None, is_again=False)
"""Of messages that nothing is known of."""


class KnownTalks:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes // 2
        self._seen: Generations[bool] = Generations(_SEEN)
        self.forget()

    def forget(self) -> None:
        self._young: dict[int, tuple[KnownTalk, ...]] = {}
        self._old: dict[int, tuple[KnownTalk, ...]] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Of the talks that are kept, at most."""
        return self._young_bytes + self._old_bytes

    def sight(self, messages: bytes | msgspec.Raw) -> Sighting:
        """Look at the messages of a request, given as JSON."""
        view = memoryview(messages)
        if len(view) <= _MIN_BYTES:
            return NEW
        keys = _keys(view)
        is_again = any(map(self._seen.get, reversed(keys)))
        for key in keys[-_SEEN_PLACES:]:
            self._seen.put(key, True)
        if not is_again:
            return NEW
        source = bytes(view)
        return Sighting(source, keys, self._find(source, keys), is_again)

    def keep(self, talk: KnownTalk, sighting: Sighting) -> None:
        """`talk`: a beginning of what was sighted. One that is too short is not kept."""
        place = bisect_right(_PLACES, len(talk.source))
        if place:
            self._put(sighting.keys[place - 1], talk)

    def _find(self, source: bytes, keys: Sequence[int]) -> KnownTalk | None:
        """The longest one that these messages go on from."""
        for key in reversed(keys):
            young = self._young.get(key, ())
            for talk in sorted((*young, *self._old.get(key, ())), key=_length, reverse=True):
                end = len(talk.source)
                if source[end : end + 1] == b"," and source.startswith(talk.source):
                    if not any(each is talk for each in young):
                        self._put(key, talk)
                    return talk
        return None

    def _put(self, key: int, talk: KnownTalk) -> None:
        if self._young_bytes + talk.size_bytes > self._max_bytes:
            self._old, self._young = self._young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
        if talk.size_bytes <= self._max_bytes:
            self._young_bytes += talk.size_bytes
            others = [each for each in self._young.get(key, ()) if each.source != talk.source]
            self._young[key] = (talk, *others[: _SAME_PLACE - 1])


def _length(talk: KnownTalk) -> int:
    return len(talk.source)


def _keys(view: memoryview) -> list[int]:
    """Of its beginnings, one for each of `_PLACES`."""
    hashed, start = xxhash.xxh3_64(), 0
    keys = []
    for end in _PLACES[: bisect_right(_PLACES, len(view))]:
        hashed.update(view[start:end])
        keys.append(hashed.intdigest())
        start = end
    return keys
