"""A request over any ASGI server, not only our own: its body read from messages, and an `Exchange` that answers in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from starlette.types import Receive, Scope, Send

from gateway.server.exchange import ClientGone, Header, check_size
from gateway.server.headers import header

__all__ = ["AsgiExchange", "read_body"]


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Refuses (413) on the announced length, before reading, and on the real one while reading."""
    check_size(int(header(scope, b"content-length") or 0), limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data = message.get("body", b"")
        size += len(data)
        check_size(size, limit)
        if not message.get("more_body"):
            return b"".join((*parts, data)) if parts else data
        if data:
            parts.append(data)


class AsgiExchange:
    """An `Exchange` over any ASGI server. A task waits for ``http.disconnect``; nothing is written without waiting."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Made in the task that answers."""
        self.task = cast("asyncio.Task[None]", asyncio.current_task())
        self._scope = scope
        self._receive = receive
        self._send = send
        self._watching: asyncio.Task[None] | None = None

    def try_take_body(self, limit: int) -> bytes | None:
        return None

    async def read_body(self, limit: int) -> bytes:
        return await read_body(self._scope, self._receive, limit)

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.ensure_future(self._wait_for_disconnect(on_gone)) if on_gone is not None else None

    async def _wait_for_disconnect(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone()

    def try_answer(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        return False

    def try_write(self, data: bytes) -> bool:
        return False

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
