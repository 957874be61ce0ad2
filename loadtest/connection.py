"""HTTP/1.1 by hand, for one thing: send a request made before, note when its events come, keep the end of the stream.

A general client takes more CPU for a stream than the router that it measures. Connections are kept and used again, as those
of every SDK are.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final, cast

__all__ = ["Connections", "Exchange", "Lost"]

_TAIL_BYTES: Final = 4096
"""Of a stream's end: more than its usage event takes."""

_IDLE_S: Final = 2.0
"""A server that closes idle connections after 5 s must not meet a request on its way."""

_HEAD_END: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class Lost(Exception):
    """The connection ended before the answer did."""


class Exchange:
    """One request and what came back. Times are those of `time.monotonic`."""

    __slots__ = ("done", "first_at", "last_at", "status", "tail")

    def __init__(self) -> None:
        self.status = 0
        self.first_at: float | None = None
        """Of the first event."""
        self.last_at = 0.0
        self.tail = b""
        """The last bytes of the body, borders of chunks included."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.reusable = False
        self.idle_since = 0.0
        self._exchange: Exchange | None = None
        self._head = b""
        self._left: int | None = None  # bytes of a body whose length was told
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, payload: bytes, exchange: Exchange) -> None:
        self._exchange, self._head, self._left, self.reusable = exchange, b"", None, False
        self._transport.write(payload)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()  # nobody asked for it
            return
        now = time.monotonic()
        if not exchange.status:
            self._head += data
            if _HEAD_END not in self._head:
                return
            head, _, data = self._head.partition(_HEAD_END)
            exchange.status = int(head[9:12])
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else None
            self._chunked = _CHUNKED.search(head) is not None
            self.reusable = not _CLOSE.search(head) and (self._chunked or length is not None)
            exchange.tail = b"\r\n"  # so that an empty body ends like any other
        exchange.tail = tail = (exchange.tail + data)[-_TAIL_BYTES:]
        if exchange.first_at is None and b"data:" in tail:
            exchange.first_at = now
        exchange.last_at = now
        if self._left is not None:
            self._left -= len(data)
            ended = self._left <= 0
        else:
            ended = self._chunked and tail.endswith(_LAST_CHUNK)
        if ended:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.reusable = self._exchange, False
        if exchange is not None:
            until_close = exchange.status and not self._chunked and self._left is None
            self._end(None if until_close and exc is None else Lost())

    def _end(self, error: Lost | None) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "called once for each"
        if exchange.done.done():
            return  # whoever waited has gone
        if error is None:
            exchange.done.set_result(None)
        else:
            exchange.done.set_exception(error)


class Connections:
    """To one server on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Connection] = []

    async def ask(self, payload: bytes, exchange: Exchange | None = None) -> Exchange:
        """Raises OSError, Lost. The last connection used is used next. `exchange`: a new one, for who looks at it meanwhile."""
        connection = self._take() or await self._open()
        exchange = exchange or Exchange()
        try:
            connection.send(payload, exchange)
            await exchange.done
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()
        return exchange

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _take(self) -> _Connection | None:
        oldest = time.monotonic() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        return connection
