"""The one reply to a request, and an end when the client leaves.

The hot routes are none of Starlette's (a response of it costs 25 us more, one BaseHTTPMiddleware 240 us); everything else is a
Starlette app behind them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from types import TracebackType
from typing import Final

from gateway.api_error import ApiError
from gateway.server.exchange import ClientGone, Exchange, Header

__all__ = ["Reply", "error_headers", "while_connected"]

_JSON: Final = (b"content-type", b"application/json")


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
