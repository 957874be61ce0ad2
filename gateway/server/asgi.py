"""A request's headers, its one reply, and an end when the client leaves; and exchanges over any ASGI server.

The hot routes are none of Starlette's (a response of it costs 25 us more, one BaseHTTPMiddleware 240 us); everything else is a
Starlette app behind them.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, cast

from starlette.types import Receive, Scope, Send

from gateway.api_error import ApiError
from gateway.server.exchange import ClientGone, Exchange, Header, check_size

__all__ = [
    "HEADERS_BY_NAME",
    "AsgiExchange",
    "Reply",
    "error_headers",
    "given_request_id",
    "header",
    "last_header",
    "new_request_id",
    "read_body",
    "request_id",
    "require_json",
    "while_connected",
]

HEADERS_BY_NAME: Final = "warmpath.headers"
"""In a scope: a dict of its headers, of repeated ones the last. Made where it is missing."""

_SANE_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,128}")
_JSON: Final = (b"content-type", b"application/json")
_ID_BYTES: Final = 12
_IDS_PER_DRAW: Final = 256
_spare_ids: list[str] = []


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header that may appear once; None when absent. A repeated one is refused as 400."""
    headers = scope["headers"]
    by_name = _by_name(scope)
    if len(by_name) < len(headers) and sum(key == name for key, _ in headers) > 1:
        raise ApiError(400, "duplicate_header", f"The header '{name.decode('latin-1')}' appears more than once.")
    return by_name.get(name)


def _by_name(scope: Scope) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] | None = scope.get(HEADERS_BY_NAME)
    if found is None:
        found = scope[HEADERS_BY_NAME] = dict(scope["headers"])
    return found


def last_header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header that only informs: of a repeated one the last, None when absent."""
    return _by_name(scope).get(name)


def request_id(scope: Scope) -> str:
    """The caller's x-request-id if it is sane, else a new one."""
    return given_request_id(scope) or new_request_id()


def given_request_id(scope: Scope) -> str | None:
    """The caller's x-request-id if it is sane."""
    value = last_header(scope, b"x-request-id")
    return value.decode() if value is not None and _SANE_ID.fullmatch(value) else None


def new_request_id() -> str:
    """With 96 random bits. They are drawn for many at once, for each draw is a system call of some microseconds."""
    try:
        return _spare_ids.pop()
    except IndexError:
        drawn = os.urandom(_ID_BYTES * _IDS_PER_DRAW).hex()
        step = 2 * _ID_BYTES
        _spare_ids.extend(f"req-{drawn[start : start + step]}" for start in range(0, len(drawn), step))
        return _spare_ids.pop()


def require_json(scope: Scope) -> None:
    """Raises `ApiError` 415 for a body that is announced as anything else, or compressed: nothing is guessed or inflated."""
    kind = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "unsupported_media_type", "The body must be sent as 'content-type: application/json'.")
    if header(scope, b"content-encoding") not in (None, b"identity"):
        raise ApiError(415, "unsupported_encoding", "A compressed request body is not supported.")


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


class while_connected:  # noqa: N801
    """``with while_connected(exchange, reply):`` runs its block as long as the client is there.

    When the client leaves, the block is cancelled where it waits and `ClientGone` comes out: every `finally` inside runs,
    so the upstream connection closes and the reservation is released. A cancellation from elsewhere passes through
    unchanged (the same accounting as `asyncio.timeout`). Once `reply` went out whole there is nobody to lose, and what the
    block still has to do is between us and the replica.
    """

    __slots__ = ("_cancelling", "_exchange", "_gone", "_reply", "_task")

    def __init__(self, exchange: Exchange, reply: Reply) -> None:
        self._exchange = exchange
        self._reply = reply
        self._task = exchange.task
        self._gone = False

    def __enter__(self) -> None:
        self._cancelling = self._task.cancelling()
        self._exchange.watch(self._leave)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.watch(None)
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error

    def _leave(self) -> None:
        if not self._reply.complete:
            self._gone = True
            self._task.cancel()


class Reply:
    """The one answer to a request: start, chunks, end; or one error. Remembers how far it got."""

    __slots__ = ("_exchange", "complete", "headers", "request_id", "status", "streams", "try_chunk")

    def __init__(self, exchange: Exchange, request_id: str) -> None:
        self._exchange = exchange
        self.try_chunk = exchange.try_write
        """Send a piece without waiting; False when that cannot be, and nothing was sent."""
        self.request_id = request_id
        self.headers: list[Header] = []
        """Of the answer, whatever it will be."""
        self.status: int | None = None
        """None until the status line went out: until then every ending is still possible."""
        self.streams = False
        """Whether it goes out in pieces, each of which is whole by itself."""
        self.complete = False
        """Whether its last byte was handed to the server."""

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        await self._exchange.start(status, [*headers, *self._own_headers()])
        self.status = status  # not before: a start that is cancelled while it waits for a slow client has not begun

    async def chunk(self, data: bytes) -> None:
        self.streams = True
        await self._exchange.write(data, more=True)

    async def end(self, data: bytes = b"") -> None:
        await self._exchange.write(data, more=False)
        self.complete = True

    async def json(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        if self.status is None and self._exchange.try_answer(status, [_JSON, *headers, *self._own_headers()], body):
            self.status, self.complete = status, True
            return
        await self.start(status, [_JSON, (b"content-length", b"%d" % len(body)), *headers])
        await self.end(body)

    async def error(self, error: ApiError, headers: Iterable[Header] = ()) -> None:
        await self.json(error.status, error.body(), [*error_headers(error), *headers])

    def _own_headers(self) -> list[Header]:
        return [*self.headers, (b"x-request-id", self.request_id.encode())]


def error_headers(error: ApiError) -> list[Header]:
    """How to ask, for who has no valid key; whether and when to come back, as OpenAI's SDKs read it (at most 120 s)."""
    headers: list[Header] = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
    if error.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    if error.retry_after_s is not None:
        seconds = max(error.retry_after_s, 0.001)
        headers += [
            (b"retry-after", str(math.ceil(seconds)).encode()),
            (b"retry-after-ms", str(max(1, round(seconds * 1000))).encode()),
        ]
    return headers
