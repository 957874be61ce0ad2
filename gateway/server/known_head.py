"""A head that was accepted once, to be recognized when the same client sends it again. Pure.

A client that keeps its connection says the same with each request, but for the digits of Content-Length. To parse a head is a
function of its bytes: what is the same up to those digits, and after them, means what it meant, and needs no parser. Whatever
is not exactly that goes to the parser, which is slower and never wrong.
"""

from __future__ import annotations

import re
from hmac import compare_digest
from typing import Final, Self

from starlette.types import Scope

from gateway.server.exchange import Route
from gateway.server.headers import HEADERS_BY_NAME
from gateway.server.request_head import RequestHead

__all__ = ["KnownHead"]

_MAX_BYTES: Final = 8 << 10
"""Well below what a head may have, so that a longer Content-Length never makes it too long. A connection keeps one."""
_MAX_DIGITS: Final = 9
"""A longer body is the parser's: a gigabyte is not what this is for."""
_LENGTH: Final = re.compile(rb"\r\ncontent-length: ?([0-9]+)\r\n", re.IGNORECASE)
_LINE: Final = re.compile(rb"content-length", re.IGNORECASE)
_NEVER: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"trailer"})
"""Headers of requests that are framed, or to be answered, in another way than by length."""


class KnownHead:
    """Of a request that has a direct route, in HTTP/1.1, after which the connection goes on."""

    __slots__ = ("_after", "_before", "head", "route", "scope")

    def __init__(self, before: bytes, after: bytes, head: RequestHead, scope: Scope, route: Route) -> None:
        self._before = before
        self._after = after
        self.head = head
        self.scope = scope
        self.route = route

    @classmethod
    def of(cls, data: bytes, head: RequestHead, scope: Scope, route: Route) -> Self | None:
        """`data` begins with the accepted head. None for one that is not to be recognized."""
        end = data.find(b"\r\n\r\n", 0, _MAX_BYTES) + 4
        if end < 4 or not _NEVER.isdisjoint(scope[HEADERS_BY_NAME]):
            return None
        length = _LENGTH.search(data, 0, end)
        if length is None or len(_LINE.findall(data, 0, end)) > 1:
            return None
        return cls(data[: length.start(1)], data[length.end(1) : end], head, scope, route)

    def match(self, data: bytes) -> tuple[int, int] | None:
        """The length of the body, and where it begins, if `data` begins with this head, whole; else None.

        A head holds a key, and a proxy sends those of several clients over one connection: how long it takes tells nobody how
        much of another's he has guessed.
        """
        begin = len(self._before)
        end = data.find(b"\r\n", begin, begin + _MAX_DIGITS + 2)
        if end < 0 or not compare_digest(data[:begin], self._before):
            return None
        digits = data[begin:end]
        if not digits.isdigit() or (digits.startswith(b"0") and len(digits) > 1):
            return None
        body = end + len(self._after)
        return (int(digits), body) if compare_digest(data[end:body], self._after) else None
