"""Tokenizing only text that is new: a prompt cut at its special tokens, and a memory of what stood between them.

A tokenizer cuts a text at its special tokens before it does anything else, so what lies between two of them is tokenized as
if it stood alone. A chat template puts special tokens around every message; of a conversation that comes back with one more
turn, all but that turn is therefore found by its text. Whoever builds `Segments` must have made sure that its tokenizer
works this way (`router.tokenizer` checks it at load).

Ids are u32 in the machine's byte order, packed, from end to end: joining bytes is all that a known prompt costs.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

__all__ = ["SegmentCache", "Segments", "entry_bytes", "longest_match"]

_ENTRY_OVERHEAD_BYTES: Final = 176
"""Beside text and ids: a slot in the ordered dict (between 130 and 155, by how full the dict is) and the entry's size."""


class Segments:
    """Text → ids by way of the cache. Any thread may call `encode`."""

    def __init__(
        self,
        special_tokens: Mapping[str, bytes],
        encode_batch: Callable[[Sequence[str]], Iterable[bytes]],
        max_bytes: int,
    ) -> None:
        """`special_tokens`: text → packed id, of every token that cuts. `encode_batch`: texts without any → packed ids."""
        self._special_tokens = dict(special_tokens)
        self._split = longest_match(special_tokens).split
        self._encode_batch = encode_batch
        self._cache = SegmentCache(max_bytes)
        inner = {character for token in special_tokens for character in token[1:]}
        self.cuts = tuple(token for token in special_tokens if token[0] not in inner)
        """Special tokens before which a text may be cut in two: no other one can begin before such a cut and end behind it."""

    def encode(self, text: str) -> bytes:
        pieces = self._split(text)  # text, token, text, ..., token, text; a text may be empty
        segments, tokens = pieces[::2], pieces[1::2]
        used: dict[str, bytes] = {}
        missing: list[str] = []
        for segment in filter(None, dict.fromkeys(segments)):
            ids = self._cache.get(segment)
            if ids is None:
                missing.append(segment)
            else:
                used[segment] = ids
        if missing:
            used.update(zip(missing, self._encode_batch(missing), strict=True))
        self._cache.remember(used)

        used[""] = b""
        packed = [b""] * len(pieces)
        packed[::2] = map(used.__getitem__, segments)
        packed[1::2] = map(self._special_tokens.__getitem__, tokens)
        return b"".join(packed)


class _Entry(NamedTuple):
    ids: bytes
    size_bytes: int
    """Kept, not computed again: a str grows when somebody asks for its UTF-8, and what was added must be subtracted."""


class SegmentCache:
    """Text → packed ids, least recently used first out, bounded in bytes.

    `get` and `remember` are O(1) an entry. Any thread may call both, and none ever waits for another: `get` is one lookup
    in a dict, and `remember` gives up when another thread is in it. What it then forgets to remember costs a second
    tokenizing some day; the ids are right either way, because an entry is a pure function of its key.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        # Whoever takes the pen may write. Popping a deque is atomic, which makes this a lock that is only ever tried.
        self._pen = deque([None])

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, text: str) -> bytes | None:
        entry = self._entries.get(text)
        return entry.ids if entry is not None else None

    def remember(self, used: Mapping[str, bytes]) -> None:
        """Make these the most recently used entries, then drop the oldest until the bound holds."""
        try:
            pen = self._pen.pop()
        except IndexError:
            return
        try:
            for text, ids in used.items():
                if text in self._entries:
                    self._entries.move_to_end(text)
                else:
                    self._insert(text, ids)
            while self.size_bytes > self.max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.size_bytes -= oldest.size_bytes
        finally:
            self._pen.append(pen)

    def _insert(self, text: str, ids: bytes) -> None:
        size_bytes = entry_bytes(text, ids)
        if size_bytes <= self.max_bytes:  # else it would push out everything and then itself
            self._entries[text] = _Entry(ids, size_bytes)
            self.size_bytes += size_bytes


def entry_bytes(text: str, ids: bytes) -> int:
    """What an entry costs in memory."""
    return sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_OVERHEAD_BYTES


def longest_match(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern, one group, that finds the leftmost of these words, and of those that start there the longest.

    That is how tokenizers look for their special tokens. The words are laid out as a trie: Gemma has 6,400 of them, and one
    plain alternative each takes 70 times as long.
    """
    root: _Trie = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(f"({_pattern(root)})")


_Trie = dict[str, "_Trie"]
_END: Final = ""


def _pattern(node: _Trie) -> str:
    branches = [re.escape(character) + _pattern(child) for character, child in node.items() if character != _END]
    if not branches:
        return ""
    ends_here = _END in node
    pattern = branches[0] if len(branches) == 1 and not ends_here else f"(?:{'|'.join(branches)})"
    return pattern + "?" if ends_here else pattern  # greedy: longer words first
