"""One request and its answer on an HTTP/1.1 connection: the parser on one side, the reader of the answer on the other.

Knows no socket and no pool; what it asks of its connection is `Carrier`. What it knows of HTTP, and no more:
Content-Length, chunked and read-to-close bodies; HEAD, 204 and 304; interim 1xx answers (skipped), trailers (ignored).
Encoded bodies and upgrades are not for replicas.

What must hold:

- The connection is given back (`finish`) or closed (`close`), one of them, once, and at once: an answer that has ended is
  read from memory, and the connection is already at the next request.
- A replica is untrusted input: all that is kept of what it sends is bounded by the constants below.
- Every wait has a deadline, and a cancellation at any of them closes the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.upstream.alarm import Alarm
from gateway.upstream.contract import (
    Header,
    ProtocolViolation,
    UpstreamClosed,
    UpstreamError,
    UpstreamRequest,
    UpstreamTimeout,
)
from gateway.upstream.known_head import MAX_KNOWN_BYTES, KnownHead

__all__ = ["HIGH_WATER_BYTES", "MAX_HEADERS", "MAX_HEAD_BYTES", "Carrier", "Exchange"]

MAX_HEAD_BYTES: Final = 64 << 10
"""Names and values of an answer's headers and trailers together; llhttp itself accepts any amount."""
MAX_HEADERS: Final = 128
HIGH_WATER_BYTES: Final = 64 << 10
"""Body bytes that may wait for a slow reader; beyond, the socket is left unread until the reader has taken them."""

_MAX_FRAMING_BYTES: Final = 2 * MAX_HEAD_BYTES
"""Raw bytes in a row that yield no body: an unfinished header, chunk extensions, a flood of 1xx. Twice the limit of the head,
so that white space alone makes no acceptable head too large."""
_RACE_S: Final = 1.0
"""A connection that was closed while idle shows it within a round trip. One that ends later was at work on the request: that
is a failure to count, and whether to try again is for others to decide."""


class Carrier(Protocol):
    """The connection, as long as the exchange runs."""

    loop: asyncio.AbstractEventLoop
    alarm: Alarm
    known_head: KnownHead
    """Of the replica's answers."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def finish(self, *, reusable: bool) -> None:
        """The answer came to its end; `reusable` says whether the connection may carry another exchange."""

    def close(self) -> None:
        """Close the socket now."""


class Exchange:
    """The `UpstreamResponse` that `Http1Upstream.send` hands out.

    The parser's callbacks (`on_*`) only note what they see. `feed` acts on it when the parser has returned, because what
    follows the end of an answer in the same bytes decides whether the connection can be used again.

    Of an answer under the head of the last one the body need only be counted, by no parser (`KnownHead`).
    """

    __slots__ = (
        "__weakref__",
        "_alarm",
        "_beginning",
        "_buffered_bytes",
        "_carrier",
        "_chunks",
        "_ended",
        "_failure",
        "_framed",
        "_framing_bytes",
        "_had_interim",
        "_has_body",
        "_has_head",
        "_head_bytes",
        "_heard",
        "_interim",
        "_is_head_request",
        "_known_head",
        "_left",
        "_loop",
        "_parser",
        "_paused",
        "_ready",
        "_reusable",
        "_sent_at",
        "_take",
        "_timeouts",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(self, carrier: Carrier, request: UpstreamRequest) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self._loop = carrier.loop
        self._timeouts = request.timeouts
        self._ready = request.ready
        self._is_head_request = request.method == "HEAD"
        self._sent_at = self._loop.time()
        # The connection while it is ours, and its parser: a new one each time (0.4 us) holds nothing of the last answer.
        self._carrier: Carrier | None = carrier
        self._alarm = carrier.alarm
        self._known_head = carrier.known_head
        self._parser: HttpResponseParser | None = None
        self._beginning = b""
        self._left: int | None = None
        """Bytes of the body that are to come, where its head is known and there is no parser."""
        # How far the answer got.
        self._heard = False
        self._interim = False
        self._had_interim = False
        self._has_head = False
        self._framed = False
        self._has_body = False
        self._ended = False
        self._reusable = False
        self._failure: UpstreamError | None = None
        self._head_bytes = 0
        self._framing_bytes = 0
        # Between the socket and the reader.
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None

    # --- the reader's side

    async def wait_ready(self) -> None:
        """Until status and headers are here, and as much of the body as `UpstreamRequest.ready` waits for."""
        while not self._is_ready():
            await self._wait()
        if self._failure is not None and not self._has_head:
            raise self._failure
        self._ready = "head"  # from now on the reader gets what there is

    def _is_ready(self) -> bool:
        """Whether the reader has something to do. What it was promised to wait for may be more than memory should hold."""
        if self._ended or self._paused or self._failure is not None:
            return True
        return self._has_head and (
            self._ready == "head" or self.status != 200 or (self._ready == "body" and self._has_body)
        )

    @property
    def met_closed_connection(self) -> bool:
        """Whether the request, which has just failed, met a connection that had been closed while it was idle."""
        return not self._heard and self._loop.time() - self._sent_at < _RACE_S

    async def read_chunk(self) -> bytes | None:
        chunks = self._chunks
        while not chunks:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            await self._wait()
        return self._drain()

    async def forward(self, take: Callable[[bytes], bool]) -> None:
        self._take = take
        try:
            while self._take is not None:
                if self._chunks:
                    if not take(self._drain()):
                        return
                elif self._failure is not None:
                    raise self._failure
                elif self._ended:
                    return
                else:
                    await self._wait()  # meanwhile `_push` hands over, and forgets `take` when it wants no more
        finally:
            self._take = None

    @property
    def ended(self) -> bool:
        return self._ended

    async def read(self, limit: int) -> bytes:
        if self._ended and self._buffered_bytes <= limit:
            return self._drain() if self._chunks else b""
        parts: list[bytes] = []
        size = 0
        while (part := await self.read_chunk()) is not None:
            size += len(part)
            if size > limit:
                self._drop()
                raise ProtocolViolation(f"the answer is longer than {limit} bytes")
            parts.append(part)
        return b"".join(parts)

    async def aclose(self) -> None:
        self._drop()

    def _drain(self) -> bytes:
        """What has arrived and was not read, at least one byte."""
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        if self._paused and self._carrier is not None:
            self._paused = False
            self._carrier.resume_reading()
        return data

    async def _wait(self) -> None:
        """Until there is something new; at the deadline that is a failure."""
        assert self._waiter is None, "an answer has one reader"
        loop, timeouts = self._loop, self._timeouts
        if self._has_body:
            self._alarm.set(loop.time() + timeouts.idle_s, self._silent)
        else:
            self._alarm.set(self._sent_at + timeouts.first_byte_s, self._silent)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self._drop()
            raise
        finally:
            self._waiter = None

    def _silent(self) -> None:
        """At the deadline of a wait."""
        if self._waiter is None or self._waiter.done():
            return  # the reader is busy, and the silence its own; its next wait sets the alarm
        if self._has_body:
            self.fail(UpstreamTimeout(f"silent for {self._timeouts.idle_s} s in the middle of an answer"))
        else:
            self.fail(UpstreamTimeout(f"no first byte within {self._timeouts.first_byte_s} s"))

    def _drop(self) -> None:
        """The reader wants no more."""
        self._chunks.clear()
        self.fail(UpstreamClosed("closed by its reader"))

    # --- the connection's side

    def feed(self, data: bytes) -> None:
        if self._parser is not None or not self._try_count(data):
            assert self._parser is not None
            self._framing_bytes += len(data)
            try:
                self._parser.feed_data(data)
            except (HttpParserError, HttpParserUpgrade) as error:
                if not self._ended:
                    self.fail(_violation(error))
                    return
                self._reusable = False
            if self._ended:
                self._learn()
                self._finish()
            elif self._framing_bytes > _MAX_FRAMING_BYTES:
                self.fail(ProtocolViolation("the answer has too many bytes that are not of its body"))
        if self._take is not None and self._chunks and self._waiter is not None and not self._waiter.done():
            self._push(self._take, self._waiter)
        elif self._is_ready():
            self._wake()
        elif self._has_body:
            self._alarm.set(self._loop.time() + self._timeouts.idle_s, self._silent)
        if self._buffered_bytes > HIGH_WATER_BYTES and not self._paused and self._carrier is not None:
            self._paused = True
            self._carrier.pause_reading()
            self._wake()

    def _try_count(self, data: bytes) -> bool:
        """Count `data` of an answer whose head is known; False, and nothing is counted, where the parser must read it."""
        if self._left is None:
            self._heard = True
            known = None if self._is_head_request else self._known_head.read(data)
            if known is None:
                self._parser = HttpResponseParser(self)
                self._beginning = data[:MAX_KNOWN_BYTES]
                return False
            self.status, self.headers, self._left, body_at = known
            self._has_head = self._framed = True
            data = data[body_at:]
        self._count_body(data)
        return True

    def _count_body(self, data: bytes) -> None:
        assert self._left is not None
        body, excess = data[: self._left], data[self._left :]
        if body:
            self._left -= len(body)
            self._has_body = True
            self._buffered_bytes += len(body)
            self._chunks.append(body)
        if not self._left:
            self._ended = True
            self._reusable = not excess.strip(b"\r\n")  # line ends before an answer mean nothing, as to the parser
            self._finish()

    def _learn(self) -> None:
        if self._reusable and self.status == 200 and not (self._is_head_request or self._had_interim):
            self._known_head.learn(self._beginning, self.status, self.headers)

    def _push(self, take: Callable[[bytes], bool], waiter: asyncio.Future[None]) -> None:
        """The reader waits in `forward`: give it what has arrived. It wakes up only when nothing more is to come."""
        try:
            if not take(self._drain()):
                self._take = None
        except Exception as error:
            waiter.set_exception(error)
            return
        if self._take is None or self._ended:
            self._wake()
        else:
            self._alarm.deadline = self._loop.time() + self._timeouts.idle_s

    def feed_eof(self) -> None:
        """The replica closed its side, which is how an answer without framing ends."""
        if self._has_head and not self._framed:
            self._ended = True
            self._finish()
            self._wake()
        else:
            self.fail(
                UpstreamClosed("closed in the middle of an answer" if self._heard else "closed without an answer")
            )

    def fail(self, error: UpstreamError) -> None:
        """Close the connection; the reader gets `error` after what came before it. Does nothing after the end."""
        if self._ended or self._failure is not None:
            return
        self._failure = error
        self._leave().close()
        self._wake()

    def _finish(self) -> None:
        carrier = self._leave()
        if self._paused:
            carrier.resume_reading()
        carrier.finish(reusable=self._reusable)

    def _leave(self) -> Carrier:
        carrier = self._carrier
        assert carrier is not None
        self._alarm.clear()
        self._carrier = self._parser = None
        return carrier

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the parser's side

    def on_message_begin(self) -> None:
        if self._ended:
            raise ProtocolViolation("bytes after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            raise ProtocolViolation("the answer's headers are too large")
        if self._has_head:
            return  # a trailer
        name, value = name.lower(), value.strip(b" \t")  # llhttp leaves white space at the end
        self.headers.append((name, value))
        if name == b"content-length":
            self._framed = True
        elif name == b"transfer-encoding":
            self._framed = True
            if value.lower() != b"chunked":
                raise ProtocolViolation("the answer has a transfer encoding other than chunked")
        elif name == b"content-encoding" and value.lower() not in (b"identity", b""):
            raise ProtocolViolation("the answer is encoded, though only identity was accepted")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ProtocolViolation(f"the answer has status {status}")
        if status < 200:  # at a 101 the parser stops with an error
            self._interim = self._had_interim = True
            self._framed = False
            self.headers.clear()
            return
        self.status = status
        self._has_head = True
        if self._is_head_request:  # llhttp would wait for the body that the headers describe
            self._end()

    def on_body(self, data: bytes) -> None:
        if self._ended or self._interim:
            raise ProtocolViolation("a body where none can be")
        self._has_body = True
        self._framing_bytes = 0
        self._buffered_bytes += len(data)
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            self._end()

    def _end(self) -> None:
        assert self._parser is not None
        self._ended = True
        self._reusable = self._parser.should_keep_alive()


def _violation(error: HttpParserError | HttpParserUpgrade) -> ProtocolViolation:
    """The fault that a callback raised, which httptools wraps, or the one that the parser found."""
    if isinstance(error.__context__, ProtocolViolation):
        return error.__context__
    violation = ProtocolViolation(f"no valid HTTP/1.1 answer: {error}")
    violation.__cause__ = error
    return violation
