"""The head of a replica's last answer with a length, so that the next one under the same head needs no parser. Pure.

Answers of a replica differ in their body, in its length and in the second of their date. Two heads that are equal but for the
digits of their one Content-Length mean the same but for that length, so what the parser made of one holds for the other.
(There is but one: the parser refuses a head with two.) Comparing costs 0.5 us, the parser and its callbacks 6.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.upstream.contract import Header

__all__ = ["MAX_KNOWN_BYTES", "KnownHead"]

MAX_KNOWN_BYTES: Final = 1 << 10
"""Longer heads are parsed each time."""
_MAX_DIGITS: Final = 9
"""A longer body is the parser's: a gigabyte is not what this is for."""
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d{1,%d})\r\n" % _MAX_DIGITS, re.IGNORECASE)
_LENGTH_NAME: Final = b"content-length"


class _Head(NamedTuple):
    before: bytes
    """Up to the digits of its length."""
    after: bytes
    """From behind them to its blank line."""
    status: int
    headers: list[Header]
    length_at: int
    """Where in `headers` the length is."""


class KnownHead:
    __slots__ = ("_head",)

    def __init__(self) -> None:
        self._head: _Head | None = None

    def read(self, data: bytes) -> tuple[int, list[Header], int, int] | None:
        """Status, headers, length of the body and where it begins, if `data` begins with the known head."""
        if self._head is None:
            return None
        before, after, status, headers, length_at = self._head
        first = len(before)
        last = data.find(b"\r", first, first + _MAX_DIGITS + 1)
        if last < 0 or not data.startswith(before) or not data.startswith(after, last):
            return None
        length = data[first:last]
        if not length.isdigit():
            return None
        headers = headers.copy()
        headers[length_at] = (_LENGTH_NAME, length)
        return status, headers, int(length), last + len(after)

    def learn(self, data: bytes, status: int, headers: list[Header]) -> None:
        """What the parser made of `data`: a head, and some of a body that ended with its length; the connection goes on."""
        end = data.find(b"\r\n\r\n", 0, MAX_KNOWN_BYTES)
        found = _LENGTH.search(data, 0, end + 2) if end >= 0 else None
        if found is None:
            return
        first, last = found.span(1)
        length_at = headers.index((_LENGTH_NAME, found[1]))
        self._head = _Head(data[:first], data[last : end + 4], status, headers.copy(), length_at)
