"""base64 of ids, of which those seen before cost a tenth of what encoding them again would.

Ids are taken in spans of 3,072, whose 12 KiB fill whole groups of base64's three bytes, so texts of spans can be put together.
A span is found by a hash and then compared byte by byte: wrong ids would be a wrong answer.
"""

from __future__ import annotations

import base64
from typing import Final

import xxhash

from router.generations import Generations

__all__ = ["IdTexts"]

_SPAN_BYTES: Final = 12 << 10
_ENTRY_BYTES: Final = _SPAN_BYTES + _SPAN_BYTES // 3 * 4 + 300
"""In memory: ids, their text, and what holds them."""

_hash = xxhash.xxh3_64_intdigest


class IdTexts:
    """Any thread may use it, and none waits."""

    def __init__(self, max_bytes: int) -> None:
        self._known: Generations[tuple[bytes, bytes]] = Generations(max_bytes // (2 * _ENTRY_BYTES))

    def __len__(self) -> int:
        """Spans kept (`router.generations`)."""
        return len(self._known)

    def encode(self, packed_ids: bytes) -> bytes:
        """The same as base64 of all of it. 3 us for each known span."""
        if len(packed_ids) < _SPAN_BYTES:
            return base64.b64encode(packed_ids)
        end = len(packed_ids) - len(packed_ids) % _SPAN_BYTES
        texts = [self._span(packed_ids[start : start + _SPAN_BYTES]) for start in range(0, end, _SPAN_BYTES)]
        texts.append(base64.b64encode(packed_ids[end:]))
        return b"".join(texts)

    def _span(self, ids: bytes) -> bytes:
        key = _hash(ids)
        known = self._known.get(key)
        if known is not None and known[0] == ids:
            return known[1]
        text = base64.b64encode(ids)
        self._known.put(key, (ids, text))
        return text
