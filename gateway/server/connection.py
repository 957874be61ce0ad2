"""One client connection: HTTP/1.1 over llhttp, with every wait ended and everything that a client can send bounded.

What is refused here never reaches an app: it gets one answer in OpenAI's shape, after the answers that are due before it, and
the connection closes, since where the next request would begin can no longer be told.

A client that closes its sending side is taken for gone. Whoever only half-closes looks the same, and work for clients that left
costs more than they are worth.

What must hold: answers go out in the order of their requests; a connection has one running request at most; and every
connection ends, by its client, by an answer that says so, or by a deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from gateway.api_error import ApiError
from gateway.server.cycle import Cycle, encode_error
from gateway.server.exchange import Route
from gateway.server.headers import new_request_id
from gateway.server.known_head import KnownHead
from gateway.server.request_head import RequestHead

__all__ = ["Connection", "Hub", "ListenerLimits"]

_LINGER_S: Final = 2.0
"""How long what a refused client still sends is thrown away: closing at once would make its kernel drop our answer unread."""

_PIECE_BYTES: Final = 4 << 10
"""Of what the parser gets at once where chunks may come: so much without a byte of body is no framing, but what nobody needs
(a chunk's extension may be of any length, and the parser keeps silent about it)."""

_SMALL_CHUNK_BYTES: Final = 16
_MAX_SMALL_CHUNKS: Final = 1024
"""A chunk costs as much time as a kilobyte, however little is in it. So many may be smaller than that."""

_NO_HEAD: Final = RequestHead()
_NO_HEAD.complete = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """How long and how much. What a request's head may hold is in `gateway.server.request_head`."""

    head_s: float = 10.0
    """For a request's line and headers to arrive, from the connection's or the request's first moment."""
    body_s: float = 30.0
    """For its body, plus"""
    body_bytes_s: float = 16 << 10
    """a second for so many bytes of it."""
    keep_alive_s: float = 75.0
    """Above the idle time of load balancers (60 s), so that they close first and never meet a closed connection."""
    write_stall_s: float = 30.0
    """A client that takes nothing of what waits for it is cut."""
    max_pipelined: int = 8
    """Requests that may wait for the one before them."""
    max_connections: int | None = None
    """None: a share of the process's file descriptors (`gateway.server.listener`)."""


class Hub(Protocol):
    """What the connections of one listening socket share (`gateway.server.listener`)."""

    limits: ListenerLimits
    refused: Counter[str]
    draining: bool
    """Whether each answer closes its connection."""

    def opened(self, connection: Connection) -> bool:
        """Whether there is room for one more. Either way `closed` is due."""

    def closed(self, connection: Connection) -> None: ...


class _Stage(Enum):
    """What a connection waits for."""

    HEAD = "head"
    """The rest of a request's line and headers; of a new connection, all of it."""
    BODY = "body"
    ANSWER = "answer"
    """The app. It has its own limits."""
    IDLE = "idle"
    LINGER = "linger"
    """Whatever comes is thrown away."""


class Connection(asyncio.Protocol):
    """The `Carrier` of the request that is being answered, and parser callbacks (`on_*`) of those that arrive."""

    def __init__(self, hub: Hub, app: ASGIApp, server_state: ServerState) -> None:
        self.loop = asyncio.get_running_loop()
        self._hub = hub
        self._limits = hub.limits
        self._app = app
        self._direct_route: Callable[[Scope], Route | None] = getattr(app, "direct_route", _no_direct_route)
        self._server_state = server_state
        self._transport: asyncio.Transport
        self._parser = HttpRequestParser(self)
        self._peers: dict[str, Any] = {}
        # The request that arrives.
        self._known: KnownHead | None = None
        self._unparsed = b""
        """Data that began with a request, whose head was not parsed yet."""
        self._owed_bytes = 0
        """Of a body behind a known head, which the parser never sees."""
        self._head = _NO_HEAD
        self._upgrading = False
        self._receiving: Cycle | None = None
        self._body_bytes = 0
        self._num_chunks = 0
        self._unaccounted_bytes = 0
        # Those that have arrived.
        self._current: Cycle | None = None
        self._pipelined: deque[Cycle] = deque()
        self._refusal: ApiError | None = None
        self._stopping = False
        # Waits.
        self._stage = _Stage.HEAD
        self._since = self.loop.time()
        self._read_paused = False
        self.write_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._written_bytes = 0
        self._taken_bytes = 0
        self._taken_at = self._since

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by isinstance
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # uvicorn only calls `shutdown`
        self._peers = {
            "client": _address(transport.get_extra_info("peername")),
            "server": _address(transport.get_extra_info("sockname")),
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        }
        if not self._hub.opened(self):
            self._refuse(ApiError(503, "too_many_connections", "The gateway has no room for another connection."))
            self._transport.close()  # without waiting for what it sends: that would take the room it has not

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._stage is _Stage.LINGER:
            return
        if self._owed_bytes:
            data = data[self._take_owed(data) :]
        elif self._known is not None and self._is_between_requests:
            data = self._take_known(self._known, data)
        if not data:
            return
        try:
            self._unparsed = data if self._is_between_requests else b""
            self._feed(data)
        except ApiError as error:
            self._refuse(error)
        except HttpParserError as error:
            # A fault that a callback raised, which httptools wraps, or one that the parser found.
            fault = error.__context__
            self._refuse(fault if isinstance(fault, ApiError) else _invalid_http())

    def eof_received(self) -> None:
        """Nothing is returned, so the transport closes, and `connection_lost` follows."""

    def connection_lost(self, error: Exception | None) -> None:
        self._hub.closed(self)
        self._server_state.connections.discard(self)
        self.resume_writing()
        for cycle in (self._current, *self._pipelined):
            if cycle is not None:
                cycle.disconnect()
        self._pipelined.clear()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    # --- called by uvicorn

    def shutdown(self) -> None:
        """Finish what runs, take nothing new."""
        self._stopping = True
        if self._current is None:
            self._transport.close()
        else:
            self._current.keep_alive = False

    # --- called by the hub

    def close_after_answers(self) -> None:
        """The requests that are here are the last ones."""
        last = self._pipelined[-1] if self._pipelined else self._current
        if last is not None:
            last.keep_alive = False

    def check(self, now: float) -> None:
        """End what has lasted too long."""
        limits = self._limits
        waited_s = now - self._since
        if self._is_stalled(now):
            self._hub.refused["write_stalled"] += 1
            self._transport.abort()
        elif self._stage is _Stage.HEAD and waited_s > limits.head_s:
            if not self._head.complete:
                self._refuse(ApiError(408, "request_timeout", "The request's headers did not arrive in time."))
            else:
                self._transport.close()  # it never said anything
        elif self._stage is _Stage.BODY and not self._read_paused:
            if waited_s > limits.body_s + self._body_bytes / limits.body_bytes_s:
                self._refuse(ApiError(408, "request_timeout", "The request's body did not arrive in time."))
        elif self._stage is _Stage.IDLE and waited_s > limits.keep_alive_s:
            self._transport.close()
        elif self._stage is _Stage.LINGER and waited_s > _LINGER_S:
            self._transport.abort()

    def _is_stalled(self, now: float) -> bool:
        """Also of a connection that is closing: it does so only when the client has taken what was written."""
        unsent = self._transport.get_write_buffer_size()
        taken = self._written_bytes - unsent
        if not unsent or taken > self._taken_bytes:
            self._taken_bytes, self._taken_at = taken, now
        return now - self._taken_at > self._limits.write_stall_s

    # --- requests with a known head, which the parser never sees

    @property
    def _is_between_requests(self) -> bool:
        """Whether nothing runs, and what comes next is a request's first byte. Then the parser waits for just that."""
        return self._current is None and self._receiving is None and self._head.complete

    def _take_known(self, known: KnownHead, data: bytes) -> bytes:
        """Begin the request if it has the known head. Returns what is left of `data` for the parser."""
        found = known.match(data)
        if found is None:
            return data
        length, begin = found
        self._head = known.head
        cycle = Cycle(self, known.scope, known.route, length, keep_alive=not (self._stopping or self._hub.draining))
        end = begin + length
        if end <= len(data):  # nearly always
            self._wait_for(_Stage.ANSWER)
            cycle.feed_body(data[begin:end])
            cycle.feed_end()
            self._start(cycle)
            return data[end:]
        self._wait_for(_Stage.BODY)
        self._receiving = cycle
        self._body_bytes = 0
        self._owed_bytes = length
        self._start(cycle)
        if begin < len(data):
            self._take_owed(memoryview(data)[begin:])  # may be long, and is copied when the body is whole
        return b""

    def _take_owed(self, data: bytes | memoryview) -> int:
        """The next piece of the body. Returns how much of `data` it was."""
        piece = data[: self._owed_bytes]
        self._owed_bytes -= len(piece)
        self.on_body(piece)
        if not self._owed_bytes:
            self.on_message_complete()
        return len(piece)

    # --- the parser

    def _feed(self, data: bytes) -> None:
        if len(data) <= _PIECE_BYTES:
            self._parse(data)
            return
        view = memoryview(data)
        start = 0
        while start < len(data):
            is_plain = self._receiving is not None and not self._head.is_chunked
            end = len(data) if is_plain else start + _PIECE_BYTES
            self._parse(view[start:end])
            start = end

    def _parse(self, data: bytes | memoryview) -> None:
        self._unaccounted_bytes += len(data)
        num_bytes, head = len(data), self._head
        while True:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as upgrade:  # the parser stops where another protocol would begin; we speak none
                again = self._head.without_upgrade(self._parser.get_method(), self._parser.get_http_version())
                data = again + data[upgrade.args[0] :]
                self._parser = HttpRequestParser(self)
                self._upgrading = False
            else:
                break
        if head is self._head and not head.complete:
            head.add_raw(num_bytes)
        elif self._head.is_chunked and self._unaccounted_bytes > 2 * _PIECE_BYTES:
            raise _invalid_http()

    def on_message_begin(self) -> None:
        self._raw_bytes = 0
        if len(self._pipelined) >= self._limits.max_pipelined:
            raise ApiError(400, "too_many_pipelined", "Too many requests wait for the one before them.")
        self._head = RequestHead()
        if self._current is None:
            self._wait_for(_Stage.HEAD)

    def on_url(self, data: bytes) -> None:
        self._head.add_target(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unaccounted_bytes = 0
        self._head.add_header(name, value)

    def on_headers_complete(self) -> None:
        parser = self._parser
        data, self._unparsed = self._unparsed, b""
        if parser.should_upgrade():
            self._upgrading = True
            return
        head, version = self._head, parser.get_http_version()
        scope = head.scope(parser.get_method(), version, self._peers)
        route = self._direct_route(scope)
        goes_on = version == "1.1" and parser.should_keep_alive()
        if data and goes_on and route is not None:
            self._known = KnownHead.of(data, head, scope, route)
        cycle = self._receiving = Cycle(
            self,
            scope,
            route,
            head.announced_bytes,
            keep_alive=goes_on and not (self._stopping or self._hub.draining),
            expects_continue=head.expects_continue,
        )
        self._body_bytes = 0
        self._num_chunks = 0
        if self._current is None:
            self._wait_for(_Stage.BODY)
            self._start(cycle)
        else:
            self._pipelined.append(cycle)

    def on_chunk_header(self) -> None:
        self._unaccounted_bytes = 0
        self._num_chunks += 1
        if self._num_chunks > _MAX_SMALL_CHUNKS + self._body_bytes // _SMALL_CHUNK_BYTES:
            raise ApiError(400, "chunks_too_small", "The request's body comes in too many small chunks.")

    def on_body(self, data: bytes | memoryview) -> None:
        self._unaccounted_bytes = 0
        cycle = self._receiving
        if cycle is None:
            return
        self._body_bytes += len(data)
        self._raw_bytes = 0
        cycle.feed_body(data)
        if cycle.waiting_bytes > cycle.most_waiting_bytes and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._upgrading or self._receiving is None:
            return
        if self._receiving is self._current:
            self._wait_for(_Stage.ANSWER)
        self._receiving.feed_end()
        self._receiving = None

    # --- requests, one after the other

    def _start(self, cycle: Cycle) -> None:
        self._current = cycle
        cycle.task = self.loop.create_task(cycle.run(self._app))
        self._server_state.tasks.add(cycle.task)

    def finished(self) -> None:
        """See `Carrier`."""
        cycle, self._current = self._current, None
        assert cycle is not None
        self._server_state.total_requests += 1
        self.resume_reading()  # the app may have answered without taking a body that is here
        if not cycle.keep_alive:
            self._close_after_answer(whole_request=cycle.body_ended)
        elif self._pipelined:
            following = self._pipelined.popleft()
            self._wait_for(_Stage.ANSWER if following.body_ended else _Stage.BODY)
            self._start(following)
        elif self._refusal is not None:
            self._answer_refusal()
        else:
            self._wait_for(_Stage.IDLE if self._head.complete else _Stage.HEAD)

    def _refuse(self, error: ApiError) -> None:
        """Answer with it when its turn comes, and close. The request that was arriving never becomes whole."""
        self._hub.refused[error.code] += 1
        self._refusal = error
        cycle, self._receiving = self._receiving, None
        if cycle is not None and cycle is self._current:
            if cycle.begun:
                self._transport.abort()
                return
            cycle.disconnect()
            self._current = None
        elif cycle is not None:
            self._pipelined.remove(cycle)
        if self._current is None:
            self._answer_refusal()

    def _answer_refusal(self) -> None:
        assert self._refusal is not None
        self.write(encode_error(self._refusal, [(b"x-request-id", new_request_id().encode())]))
        self._close_after_answer(whole_request=False)

    def _close_after_answer(self, *, whole_request: bool) -> None:
        self._pipelined.clear()
        if whole_request or not self._transport.can_write_eof():
            self._transport.close()
            return
        self.resume_reading()
        self._transport.write_eof()
        self._wait_for(_Stage.LINGER)

    def _wait_for(self, stage: _Stage) -> None:
        self._stage = stage
        self._since = self.loop.time()

    # --- called by the cycle

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self._transport.write(data)

    async def drain(self) -> None:
        if not self._transport.is_closing():
            await self._writable.wait()

    def forget(self, task: asyncio.Task[None]) -> None:
        self._server_state.tasks.discard(task)

    def resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()


def _no_direct_route(scope: Scope) -> Route | None:
    """Of an app that has none."""
    return None


def _address(name: object) -> tuple[str, int] | None:
    """Of an IPv6 socket the first two of four; a UNIX socket has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def _invalid_http() -> ApiError:
    return ApiError(400, "invalid_http", "This is no valid HTTP.")
