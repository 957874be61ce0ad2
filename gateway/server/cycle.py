"""One request on a client's connection: an `Exchange` for a route that needs no ASGI, `receive` and `send` for any other app.

Knows no parser, no limits and no other request; what it asks of its connection is `Carrier`.

The status line is written with the first piece of the body, so a small answer is one write. An answer whose length is known
gets a Content-Length, any other is chunked; to a client of HTTP/1.0, which knows no chunks, it ends with the connection.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Scope

from gateway.api_error import ApiError
from gateway.server.exchange import ClientGone, Header, Route, check_size

__all__ = ["HIGH_WATER_BYTES", "Carrier", "Cycle", "encode_error"]

_log = logging.getLogger("warmpath.listener")

HIGH_WATER_BYTES: Final = 64 << 10
"""Body bytes that may wait for the app; beyond, the socket is left unread."""

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus
}
_BODILESS: Final = frozenset({204, 304})
_JSON: Final = (b"content-type", b"application/json")
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Carrier(Protocol):
    """The connection, as long as the request is the one that may write to it."""

    @property
    def write_paused(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Until the client has taken most of what was written, or is gone."""

    def resume_reading(self) -> None: ...

    def finished(self) -> None:
        """The answer is written whole: the next request may begin, or the connection closes."""

    def forget(self, task: asyncio.Task[None]) -> None:
        """It has nothing left to do."""

    def abort(self) -> None:
        """The answer cannot be completed: the client must not take it for whole."""


class Cycle:
    __slots__ = (
        "_announced_bytes",
        "_answered",
        "_body",
        "_body_ended",
        "_body_taken",
        "_carrier",
        "_chunked",
        "_expects_continue",
        "_head",
        "_is_http11",
        "_left",
        "_on_gone",
        "_quiet_bytes",
        "_route",
        "_waiter",
        "gone",
        "keep_alive",
        "most_waiting_bytes",
        "scope",
        "task",
        "waiting_bytes",
    )

    def __init__(
        self,
        carrier: Carrier,
        scope: Scope,
        route: Route | None,
        announced_bytes: int = 0,
        *,
        keep_alive: bool,
        expects_continue: bool = False,
    ) -> None:
        """`route`: None where an ASGI app answers. `announced_bytes`: of the body; 0 where its length is not known before."""
        self.task: asyncio.Task[None]
        """The one that answers it. Set when that begins."""
        self.scope = scope
        self.keep_alive = keep_alive
        """Whether the connection may carry another request after this one."""
        self.gone = False
        """Whether the client left before its answer was complete."""
        self._carrier = carrier
        self._route = route
        self._expects_continue = expects_continue
        self._is_http11 = scope["http_version"] == "1.1"
        # The request.
        self._announced_bytes = announced_bytes
        self._body: list[bytes | memoryview] = []
        self.waiting_bytes = 0
        """Of the body, that the app has not taken. Counted, since a body may come in chunks of one byte."""
        self.most_waiting_bytes = HIGH_WATER_BYTES
        """Beyond, the socket is left unread."""
        self._quiet_bytes = 0
        """Up to here no piece of the body wakes up who waits for it."""
        self._body_ended = False
        self._body_taken = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_gone: Callable[[], None] | None = None
        # The answer.
        self._head: bytes | None = None
        self._answered = False
        self._chunked = False
        self._left: int | None = None

    # --- called by the connection

    @property
    def begun(self) -> bool:
        """Whether any of its answer may have been written."""
        return self._head is not None

    @property
    def body_ended(self) -> bool:
        """Whether the request has arrived whole."""
        return self._body_ended

    def feed_body(self, data: bytes | memoryview) -> None:
        if not self._answered:
            self._body.append(data)
            self.waiting_bytes += len(data)
            if self.waiting_bytes > self._quiet_bytes:
                self._wake()

    def feed_end(self) -> None:
        self._body_ended = True
        self._wake()

    def disconnect(self) -> None:
        """The client is gone: the app is told, and nothing more is written."""
        if self._answered or self.gone:
            return
        self.gone = True
        self._wake()
        if self._on_gone is not None:
            self._on_gone()

    async def run(self, app: ASGIApp) -> None:
        try:
            if self._route is not None:
                await self._route(self)
            else:
                await app(self.scope, self.receive, self.send)
            if not self._answered:
                await self._give_up()
        except asyncio.CancelledError:  # the server stops
            if not self._answered:
                self._carrier.abort()
            raise
        except Exception:
            _log.exception("the app failed on %s %s", self.scope["method"], self.scope["path"])
            await self._give_up()
        finally:
            self._carrier.forget(self.task)

    async def _give_up(self) -> None:
        """Of an app that left an answer unfinished."""
        if self._answered or self.gone:
            return
        if self.begun:
            self._carrier.abort()
        else:
            error = ApiError(500, "internal_error", "The gateway failed to handle this request.")
            await self.start(500, [_JSON])
            await self.write(error.body(), more=False)

    def _drop_body(self) -> None:
        self._body.clear()
        self.waiting_bytes = 0

    def _take_body(self) -> bytes:
        """What is here of it."""
        body = bytes(self._body[0]) if len(self._body) == 1 else b"".join(self._body)
        self._drop_body()
        self._body_taken = self._body_ended
        return body

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """For more of the body, its end, or the client's."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _say_continue(self) -> None:
        """To a client that waits to be told that its body is wanted."""
        if self._expects_continue and not self.begun and not self.gone:
            self._expects_continue = False
            self._carrier.write(_CONTINUE)

    # --- called by the route, as `Exchange` says

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone
        if on_gone is not None and self.gone:
            on_gone()

    def try_take_body(self, limit: int) -> bytes | None:
        if not self._body_ended or self._expects_continue or self.gone:
            return None
        check_size(self.waiting_bytes, limit)
        self._carrier.resume_reading()
        return self._take_body()

    async def read_body(self, limit: int) -> bytes:
        check_size(self._announced_bytes, limit)
        self._say_continue()
        self.most_waiting_bytes = self._quiet_bytes = limit
        self._carrier.resume_reading()
        while not self.gone:
            check_size(self.waiting_bytes, limit)
            if self._body_ended:
                return self._take_body()
            await self._wait()
        raise ClientGone

    def try_answer(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        if self.gone or self._carrier.write_paused:
            return False
        if self.scope["method"] == "HEAD" or status in _BODILESS:
            self._start(status, headers)
            self._write_body(body, more=False)
            return True
        if self._head is not None:
            raise RuntimeError("an answer starts once")
        head = _encode_head(status, headers)
        self._head, self._left = b"", 0
        self._carrier.write(b"%bcontent-length: %d\r\n%b%b" % (head, len(body), self._last_line(), body))
        self._end()
        return True

    def try_write(self, data: bytes) -> bool:
        if self.gone or self._carrier.write_paused:
            return False
        if self._chunked and data and not self._answered:  # nearly always: the head is out, and no length is kept
            self._carrier.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._write_body(data, more=True)
        return True

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        if not (self.gone or self._carrier.write_paused) or await self._may_write():
            self._start(status, headers)

    async def write(self, data: bytes, *, more: bool) -> None:
        if not (self.gone or self._carrier.write_paused) or await self._may_write():
            self._write_body(data, more=more)

    async def _may_write(self) -> bool:
        """When the client has taken most of what there was; False if it is gone."""
        if self._carrier.write_paused:
            await self._carrier.drain()
        if self.gone:
            await asyncio.sleep(0)  # an app that never waits for anything must not hold the loop for a client that left
        return not self.gone

    # --- called by an ASGI app

    async def receive(self) -> Message:
        self._say_continue()
        while not (self.gone or self._answered):
            if self._body or (self._body_ended and not self._body_taken):
                body = self._take_body()
                self._carrier.resume_reading()
                return {"type": "http.request", "body": body, "more_body": not self._body_ended}
            await self._wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self.start(message["status"], message.get("headers", ()))
        else:
            await self.write(message.get("body", b""), more=message.get("more_body", False))

    # --- the answer

    def _start(self, status: int, headers: Iterable[Header]) -> None:
        if self._head is not None:
            raise RuntimeError("an answer starts once")
        sent = []
        for header in headers:
            name, value = header
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                self.keep_alive = False
                continue
            sent.append(header)
        head = _encode_head(status, sent)
        if self.scope["method"] == "HEAD" or status in _BODILESS:
            self._left = 0
        self._head = head

    def _write_body(self, data: bytes, *, more: bool) -> None:
        if self._head is None or self._answered:
            raise RuntimeError("a body belongs between an answer's start and its end")
        if self.scope["method"] == "HEAD":
            data = b""
        head = b""
        if self._head:
            head, self._head = self._complete_head(self._head, data, more), b""
        if self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if not more:
                data += b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the body is not as long as its Content-Length says")
        if head or data:
            self._carrier.write(head + data)
        if not more:
            self._end()

    def _end(self) -> None:
        self._answered = True
        if self._body:
            self._drop_body()
        self._wake()
        self._carrier.finished()

    def _complete_head(self, head: bytes, data: bytes, more: bool) -> bytes:
        """With how the body ends, and whether the connection does."""
        framing = b""
        if self._left is None:
            if not more:
                self._left = len(data)
                framing = b"content-length: %d\r\n" % len(data)
            elif self._is_http11:
                self._chunked = True
                framing = b"transfer-encoding: chunked\r\n"
            else:
                self.keep_alive = False
        return b"%b%b%b" % (head, framing, self._last_line())

    def _last_line(self) -> bytes:
        """Of the head: whether the connection ends with this answer."""
        if not self._body_ended:
            self.keep_alive = False  # the rest of the request would be read as the next one
        return b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"


def _encode_head(status: int, headers: Sequence[Header]) -> bytes:
    """Without its last line. Raises RuntimeError for what would end a header before its end."""
    lines = [_STATUS_LINES[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    head = b"".join(lines)
    if not head.count(b"\n") == head.count(b"\r") == len(headers) + 1 or b"\0" in head:
        raise RuntimeError("a header of an answer holds a line break or NUL")
    return head


def encode_error(error: ApiError, headers: Iterable[Header]) -> bytes:
    """A whole answer for what never reaches an app. The connection closes after it."""
    body = error.body()
    lines = b"".join(b"%b: %b\r\n" % header for header in (_JSON, *headers))
    return b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        _STATUS_LINES[error.status],
        lines,
        len(body),
        body,
    )
