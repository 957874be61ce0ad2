"""The native replica client: HTTP/1.1 over pooled connections, on asyncio.Protocol and httptools (llhttp).

It is made for requests whose body is in memory and for answers that may stream for minutes, and costs a small part of what
a general client costs: a request is one write, a piece of the body is one callback and at most one wake-up of its reader
(`gateway.upstream.exchange`), and no task is started. What is the same from one request or answer of a replica to the next,
the head's usual lines and the head of an answer, is encoded and parsed once. It follows no redirects and keeps no cookies.

What must hold: a connection carries one exchange at a time. It goes back to the pool only when its answer ended exactly
where the bytes did and the request was sent whole; every other end closes it at once, whatever was still to be sent or read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, cast

from gateway.upstream.alarm import Alarm
from gateway.upstream.contract import (
    ConnectFailed,
    ConnectRefused,
    Header,
    LocalExhaustion,
    Origin,
    UpstreamClosed,
    UpstreamError,
    UpstreamRequest,
    is_local_exhaustion,
)
from gateway.upstream.exchange import Exchange
from gateway.upstream.known_head import KnownHead

__all__ = ["Http1Upstream", "encode_head", "host_header"]

_KEEP_IDLE_S: Final = 4.0
"""uvicorn, and so vLLM and our workers, close a connection that was idle for 5 s; leaving first avoids most races."""
_MAX_AGE_S: Final = 300.0
"""After so long an origin's name may point elsewhere, and a busy connection would never find out."""
_MAX_IDLE: Final = 256
"""Idle connections kept for one origin; more are left over from a burst."""

_OURS: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"accept-encoding"})


class Http1Upstream:
    """`gateway.upstream.contract.Upstream` over HTTP/1.1. Belongs to one event loop."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        keep_idle_s: float = _KEEP_IDLE_S,
        max_age_s: float = _MAX_AGE_S,
    ) -> None:
        """`tls`: for https origins; None trusts whom the system trusts. `max_age_s`: a connection older than that is not kept
        for another request.
        """
        self._tls = tls
        self._keep_idle_s = keep_idle_s
        self._max_age_s = max_age_s
        self._connections: set[_Connection] = set()
        # Dicts as ordered sets: the newest is taken, the oldest expires, any may be lost, each in O(1).
        self._idle: dict[Origin, dict[_Connection, None]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._known_heads: dict[Origin, KnownHead] = {}

    @property
    def in_use(self) -> int:
        """Connections that carry an exchange."""
        return sum(connection.exchange is not None for connection in list(self._connections))

    @property
    def idle(self) -> int:
        return sum(map(len, list(self._idle.values())))

    async def send(self, request: UpstreamRequest) -> Exchange:
        """See `Upstream.send`. A request that met a connection closed while idle is sent once more, on a fresh one."""
        head = encode_head(request)
        connection = self._take_idle(request.origin)
        if connection is not None:
            exchange = connection.begin(head, request)
            try:
                await exchange.wait_ready()
            except UpstreamClosed:
                if not exchange.met_closed_connection:
                    raise
            else:
                return exchange
        connection = await self._connect(request)
        exchange = connection.begin(head, request)
        await exchange.wait_ready()
        return exchange

    async def aclose(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        connections = list(self._connections)
        for connection in connections:
            connection.break_off(UpstreamClosed("the gateway is stopping"))
        if connections:
            # The loop closes the sockets in its next turns; no peer has a say in it.
            await asyncio.wait([connection.lost for connection in connections], timeout=1.0)

    async def _connect(self, request: UpstreamRequest) -> _Connection:
        origin, connect_s = request.origin, request.timeouts.connect_s
        where = f"{origin.host}:{origin.port}"
        self._require_open()
        try:
            async with asyncio.timeout(connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=self._tls_context() if origin.scheme == "https" else None,
                )
        except TimeoutError as error:
            raise ConnectFailed(f"no connection to {where} within {connect_s} s") from error
        except ConnectionRefusedError as error:
            raise ConnectRefused(f"no connection to {where}: {error}") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be one
            if is_local_exhaustion(error):
                raise LocalExhaustion(f"no connection to {where}: {error}") from error
            raise ConnectFailed(f"no connection to {where}: {error}") from error
        if self._closed or connection.is_closing():
            connection.close()
            raise ConnectFailed(f"the connection to {where} was closed at once")
        # Only now: of a connection whose connecting was cancelled, uvloop closes the socket but reports no loss.
        self._connections.add(connection)
        return connection

    def _require_open(self) -> None:
        if self._closed:
            raise ConnectFailed("the gateway is stopping")

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _take_idle(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if connection.idle_since + self._keep_idle_s > connection.loop.time():
                return connection
            connection.close()
        return None

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what was idle for too long. One timer for all connections, so that a request sets none."""
        expired_before = loop.time() - self._keep_idle_s
        for origin, idle in list(self._idle.items()):
            for connection in list(idle):
                if connection.idle_since > expired_before:
                    break
                connection.close()
            if not idle:
                del self._idle[origin]
                self._known_heads.pop(origin, None)
        self._sweeper = loop.call_later(self._keep_idle_s, self._sweep, loop) if self._idle else None

    # --- called by connections

    def known_head(self, origin: Origin) -> KnownHead:
        return self._known_heads.setdefault(origin, KnownHead())

    def try_keep(self, connection: _Connection) -> bool:
        """Whether the connection, done with its exchange, may wait here for the next one."""
        if connection.idle_since - connection.opened_at > self._max_age_s:
            return False
        idle = self._idle.setdefault(connection.origin, {})
        if len(idle) >= _MAX_IDLE:
            return False
        idle[connection] = None
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(self._keep_idle_s, self._sweep, connection.loop)
        return True

    def closing(self, connection: _Connection) -> None:
        if (idle := self._idle.get(connection.origin)) is not None:
            idle.pop(connection, None)

    def lost(self, connection: _Connection) -> None:
        self._connections.discard(connection)


class _Connection(asyncio.Protocol):
    """One socket from connect to loss: carries an exchange, waits in the pool, or is closing."""

    def __init__(self, pool: Http1Upstream, origin: Origin) -> None:
        self.loop = asyncio.get_running_loop()
        self.alarm = Alarm(self.loop)
        self.known_head = pool.known_head(origin)
        self.origin = origin
        self.exchange: Exchange | None = None
        self.opened_at = self.loop.time()
        self.idle_since = 0.0
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._pool = pool
        self._transport: asyncio.Transport

    def begin(self, head: bytes, request: UpstreamRequest) -> Exchange:
        """Write the request. Its body is in memory already, so nothing is gained by waiting until the socket has taken it:
        an early answer must be seen meanwhile, and a replica that does not read runs into `first_byte_s`.
        """
        self.exchange = Exchange(self, request)
        if request.body:
            self._transport.writelines((head, request.body))  # uvloop copies neither, as it would head + body
        else:
            self._transport.write(head)
        return self.exchange

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def break_off(self, error: UpstreamError) -> None:
        """Close; if an exchange is running, it ends with `error`."""
        if self.exchange is None:
            self.close()
        else:
            self.exchange.fail(error)

    # --- called by the exchange

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def finish(self, *, reusable: bool) -> None:
        self.exchange = None
        self.idle_since = self.loop.time()
        sent_whole = self._transport.get_write_buffer_size() == 0  # else the replica did not care to read all of it
        if not (reusable and sent_whole and self._pool.try_keep(self)):
            self.close()

    def close(self) -> None:
        """At once: a graceful close would first wait for the replica to read the rest of its request."""
        self.exchange = None
        self.alarm.close()
        self._pool.closing(self)
        self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by isinstance

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.close()  # nobody asked; no later request may take it for its answer
        else:
            self.exchange.feed(data)

    def eof_received(self) -> None:
        if self.exchange is None:
            self.close()
        else:
            self.exchange.feed_eof()

    def connection_lost(self, error: Exception | None) -> None:
        self.break_off(UpstreamClosed(f"the connection was lost: {error or 'closed'}"))
        self._pool.lost(self)
        self.lost.set_result(None)


def encode_head(request: UpstreamRequest) -> bytes:
    """Request line and headers. Raises ValueError rather than let a value end its line: values come from other people."""
    parts = [
        _usual_lines(request.method, request.path, request.origin, request.usual_headers),
        _lines(request.headers),
    ]
    if request.body or request.method == "POST":
        parts.append(b"content-length: %d\r\n" % len(request.body))
    parts.append(b"\r\n")
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _usual_lines(method: str, path: str, origin: Origin, headers: tuple[Header, ...]) -> bytes:
    """What is the same in all such requests to an origin."""
    if not path.startswith("/") or " " in path:
        raise ValueError("a request's path starts with a slash and has no space")
    line = f"{method} {path} HTTP/1.1\r\n".encode("ascii")
    _require_lines(line, 1)
    return b"%bhost: %b\r\naccept-encoding: identity\r\n%b" % (line, host_header(origin), _lines(headers))


def _lines(headers: Sequence[Header]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        if name in _OURS:
            raise ValueError(f"the header {name!r} is for the transport to set")
        parts += (name, b": ", value, b"\r\n")
    lines = b"".join(parts)
    _require_lines(lines, len(headers))
    return lines


def _require_lines(data: bytes, number: int) -> None:
    if not data.count(b"\r\n") == data.count(b"\r") == data.count(b"\n") == number or b"\0" in data:
        raise ValueError("the path or a header of a request holds a line break or NUL")


def host_header(origin: Origin) -> bytes:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    default_port = 443 if origin.scheme == "https" else 80
    return (host if origin.port == default_port else f"{host}:{origin.port}").encode("ascii")
