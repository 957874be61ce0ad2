"""Heads of answers that the parser has read before, so that a whole answer under one like them needs no parser. Pure.

Answers of a replica differ in their body, in its length and in the second of their date. Two heads that are equal but for the
digits of their one Content-Length mean the same but for that length, so what the parser made of one holds for the other.
(There is but one: the parser refuses a head with two.) That costs 1.5 us, the parser and its callbacks 6.

Operations: `learn` an answer that was parsed, `find` one that came; both O(bytes of its head).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.upstream.contract import Header

__all__ = ["KnownHeads"]

_MAX_HEADS: Final = 256
_MAX_HEAD_BYTES: Final = 1 << 10
"""Replicas that send no head twice fill a megabyte at most."""
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d{1,9})\r\n", re.IGNORECASE)
_LENGTH_NAME: Final = b"content-length"


class _Head(NamedTuple):
    status: int
    headers: list[Header]
    length_at: int
    """Where in them the Content-Length is."""


class KnownHeads:
    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, _Head] = {}  # by head without the digits of its length

    def find(self, data: bytes) -> tuple[int, list[Header], bytes] | None:
        """Status, headers and body of `data`, if that is one whole answer under a known head and nothing else."""
        cut = _cut(data)
        if cut is None:
            return None
        like, length, body_at = cut
        head = self._heads.get(like)
        if head is None:
            return None
        status, headers, length_at = head
        headers = headers.copy()
        headers[length_at] = (_LENGTH_NAME, length)
        return status, headers, data[body_at:]

    def learn(self, data: bytes, status: int, headers: list[Header]) -> None:
        """What the parser read of `data`, an answer to any method but HEAD after which the connection may be used again."""
        cut = _cut(data)
        if cut is None:
            return
        like, length, _ = cut
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()  # those of this second are soon known again
        self._heads[like] = _Head(status, headers.copy(), headers.index((_LENGTH_NAME, length)))


def _cut(data: bytes) -> tuple[bytes, bytes, int] | None:
    """A head without the digits of its length, these, and where its body begins; None unless the body ends with `data`."""
    end = data.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
    found = _LENGTH.search(data, 0, end + 2) if end >= 0 else None
    if found is None:
        return None
    first, last = found.span(1)
    length, body_at = data[first:last], end + 4
    if body_at + int(length) != len(data):
        return None
    return data[:first] + data[last:body_at], length, body_at
