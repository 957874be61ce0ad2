"""One request and its one answer, as the routes see them that our own listener serves without ASGI.

ASGI says everything in messages, one dict each, and a client's leaving is one of them, which takes a task to wait for. A hot
route needs less: the body whole, an answer written at once where that can be, and a call when the client leaves. Any other
server gives the same through `gateway.server.asgi.AsgiExchange`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from starlette.types import Scope

from gateway.api_error import ApiError

__all__ = ["ClientGone", "Exchange", "Header", "Route", "RoutesDirectly", "check_size"]

Header = tuple[bytes, bytes]


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Exchange(Protocol):
    @property
    def task(self) -> asyncio.Task[None]:
        """The one that answers."""

    def try_take_body(self, limit: int) -> bytes | None:
        """The body, once, where all of it is here; None: `read_body`. Raises `ApiError` 413."""

    async def read_body(self, limit: int) -> bytes:
        """The whole body. Raises `ClientGone`, and `ApiError` 413 on the announced length, before reading, and on the real one
        while reading."""

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call `on_gone`, once, when the client leaves before its answer is complete; at once if it has. None: no more."""

    def try_answer(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        """A whole answer, now; False, and nothing is written, when that cannot be. Its length needs no header."""

    def try_write(self, data: bytes) -> bool:
        """A piece of an answer that has begun, now; False, and nothing is written, when that cannot be."""

    async def start(self, status: int, headers: Sequence[Header]) -> None: ...

    async def write(self, data: bytes, *, more: bool) -> None: ...


Route = Callable[[Exchange], Coroutine[Any, Any, None]]


class RoutesDirectly(Protocol):
    """An ASGI app some of whose routes need no ASGI."""

    def direct_route(self, scope: Scope) -> Route | None:
        """What answers requests with this head; None: the app, as any other.

        One route, and so one `scope`, may serve many requests that differ in nothing but their bodies: ``content-length`` in
        it is of any of them.
        """


def check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ApiError(413, "request_too_large", f"The request body is larger than {limit} bytes.")
