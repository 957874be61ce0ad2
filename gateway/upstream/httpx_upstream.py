"""Replicas through httpx: the transport that everybody knows, to compare with, and to fall back on should the native one fail.

It is slow (about 80 times the native CPU a request) and meant to be plain. Each call has a connection of its own, for two
reasons. A pool of httpx loses count of its connections when a caller is cancelled (encode/httpcore#1093), and it does not see
whether bytes came after the end of an answer, which the next request would take for its own. A pool for one connection that
lives as long as its call can do neither.

Of httpx only the transport is used, below the client: no redirects, cookies, proxies of the environment, retries or decoding.

What must hold: httpx runs in a task of the exchange's own and is cancelled once at most, so it can always finish its cleaning;
the task ends with its connection closed, and `HttpxUpstream.aclose` waits for those that are left.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx

from gateway.upstream.contract import (
    ConnectFailed,
    ConnectRefused,
    Header,
    LocalExhaustion,
    ProtocolViolation,
    UpstreamClosed,
    UpstreamError,
    UpstreamRequest,
    UpstreamTimeout,
    is_local_exhaustion,
)
from gateway.upstream.exchange import MAX_HEAD_BYTES, MAX_HEADERS
from gateway.upstream.http1 import encode_head, host_header

__all__ = ["HttpxUpstream"]

_STOP_S: Final = 1.0
_NO_TIMEOUTS: Final = {"connect": None, "read": None, "write": None, "pool": None}
"""The exchange has its own, which count as `Timeouts` says."""
_OUTSIDE: Final = (httpx.TransportError, OSError, UnicodeError)
"""UnicodeError: of a host name that cannot be one."""
_ONE_CONNECTION: Final = httpx.Limits(max_connections=1, max_keepalive_connections=0)


class HttpxUpstream:
    """`gateway.upstream.contract.Upstream` over httpx. Belongs to one event loop."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: for https origins; None trusts whom the system trusts."""
        self._tls = tls
        self._no_tls = ssl.SSLContext(
            ssl.PROTOCOL_TLS_CLIENT
        )  # httpx makes one for http as well, and reads a megabyte for it
        self._running: set[_Exchange] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def in_use(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> int:
        return 0

    async def send(self, request: UpstreamRequest) -> _Exchange:
        """See `Upstream.send`."""
        encode_head(request)  # raises what a request must not hold
        if self._closed:
            raise ConnectFailed("the gateway is stopping")
        exchange = _Exchange(request, self._transport(request.origin.scheme), self._running.discard)
        self._running.add(exchange)
        self._tasks.add(exchange.task)
        exchange.task.add_done_callback(self._tasks.discard)
        await exchange.wait_head()
        return exchange

    async def aclose(self) -> None:
        self._closed = True
        for exchange in list(self._running):
            exchange.fail(UpstreamClosed("the gateway is stopping"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)

    def _transport(self, scheme: str) -> httpx.AsyncHTTPTransport:
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        verify = self._tls if scheme == "https" and self._tls is not None else self._no_tls
        return httpx.AsyncHTTPTransport(verify=verify, trust_env=False, http2=False, limits=_ONE_CONNECTION)


class _Exchange:
    """The `UpstreamResponse`: a task that asks httpx, and a reader that takes one chunk at a time from it."""

    def __init__(
        self, request: UpstreamRequest, transport: httpx.AsyncHTTPTransport, on_end: Callable[[_Exchange], None]
    ) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self._timeouts = request.timeouts
        self._where = f"{request.origin.host}:{request.origin.port}"
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self._sent_at: float | None = None
        self._has_body = False
        self._chunk: bytes | None = None
        self._socket: Any = None
        self._failure: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self.task = self._loop.create_task(self._run(_as_httpx(request, self._trace), transport))
        self._on_end = on_end

    # --- the reader's side

    async def wait_head(self) -> None:
        while not self.status:
            if self._failure is not None:
                raise self._failure
            await self._wait()

    async def read_chunk(self) -> bytes | None:
        while self._chunk is None:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            await self._wait()
        chunk, self._chunk = self._chunk, None
        self._taken.set()
        return chunk

    async def forward(self, take: Callable[[bytes], bool]) -> None:
        while (chunk := await self.read_chunk()) is not None:
            if not take(chunk):
                return

    @property
    def ended(self) -> bool:
        return self._ended and self._chunk is None

    async def read(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while (part := await self.read_chunk()) is not None:
            size += len(part)
            if size > limit:
                await self.aclose()
                raise ProtocolViolation(f"the answer is longer than {limit} bytes")
            parts.append(part)
        return b"".join(parts)

    async def aclose(self) -> None:
        self._chunk = None
        self.fail(UpstreamClosed("closed by its reader"))

    async def _wait(self) -> None:
        """Until there is something new; at the deadline that is a failure."""
        self._news.clear()
        deadline, timed_out = self._deadline()
        try:
            async with asyncio.timeout_at(deadline):
                await self._news.wait()
        except TimeoutError:
            self.fail(timed_out)
        except asyncio.CancelledError:
            self.fail(UpstreamClosed("its reader was cancelled"))
            raise

    def _deadline(self) -> tuple[float, UpstreamError]:
        """Until when what is next may take, and what it is if it takes longer."""
        timeouts = self._timeouts
        if self._sent_at is None:
            failed = ConnectFailed(f"no connection to {self._where} within {timeouts.connect_s} s")
            return self._begun_at + timeouts.connect_s, failed
        if not self._has_body:
            late = UpstreamTimeout(f"no first byte within {timeouts.first_byte_s} s")
            return self._sent_at + timeouts.first_byte_s, late
        silent = UpstreamTimeout(f"silent for {timeouts.idle_s} s in the middle of an answer")
        return self._loop.time() + timeouts.idle_s, silent

    def fail(self, error: UpstreamError) -> None:
        """Close the connection; the reader gets `error` after what came before it. Does nothing after the end."""
        if self._ended or self._failure is not None:
            return
        self._end(error)
        self.task.cancel()

    def _end(self, failure: Exception | None) -> None:
        """The one end: what remains is to close the connection, which the task does in the loop's next turns."""
        self._failure = failure
        self._ended = failure is None
        self._on_end(self)
        self._news.set()

    # --- the task's side

    async def _run(self, request: httpx.Request, transport: httpx.AsyncHTTPTransport) -> None:
        try:
            response = await transport.handle_async_request(request)
            _check_head(response)
            self.headers = [(name.lower(), value) for name, value in response.headers.raw]
            self.status = response.status_code
            self._news.set()
            async for chunk in response.stream:  # type: ignore[union-attr]  # of an async transport it is one to await
                await self._hand_over(chunk)
        except asyncio.CancelledError:
            if self._failure is None:  # it was not `fail` that cancelled
                self._end(UpstreamClosed("the gateway is stopping"))
        except Exception as error:
            if self._failure is None:
                self._end(self._translated(error))
        else:
            self._end(None)
        finally:
            await transport.aclose()
            if self._socket is not None:
                await self._socket.aclose()  # httpcore forgets it when a TLS handshake is cancelled

    async def _hand_over(self, chunk: bytes) -> None:
        """One at a time: what the reader does not take stays in the socket."""
        self._has_body = True
        self._chunk = chunk
        self._news.set()
        while self._chunk is not None:
            self._taken.clear()
            await self._taken.wait()

    async def _trace(self, event: str, about: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._socket = about["return_value"]
        elif event == "http11.send_request_headers.started":
            self._sent_at = self._loop.time()
            self._news.set()

    def _translated(self, error: Exception) -> Exception:
        """What the reader gets for it. A fault of the request's own, or of ours, is nothing to hold against a replica."""
        if isinstance(error, httpx.LocalProtocolError) or not isinstance(error, _OUTSIDE):
            return error
        causes = list(_causes(error))
        if any(map(is_local_exhaustion, causes)):
            made: UpstreamError = LocalExhaustion(f"no connection to {self._where}: {error}")
        elif self._sent_at is None:
            refused = any(isinstance(cause, ConnectionRefusedError) for cause in causes)
            made = (ConnectRefused if refused else ConnectFailed)(f"no connection to {self._where}: {error}")
        elif isinstance(error, httpx.RemoteProtocolError) and not _is_early_end(error):
            made = ProtocolViolation(f"no valid HTTP/1.1 answer: {error}")
        else:
            made = UpstreamClosed(f"the connection was lost: {error}")
        made.__cause__ = error
        return made


def _as_httpx(request: UpstreamRequest, trace: Callable[..., Any]) -> httpx.Request:
    origin = request.origin
    headers: list[Header] = [
        (b"host", host_header(origin)),
        (b"accept-encoding", b"identity"),
        # h11 refuses white space around a value, which the native client sends.
        *((name, value.strip(b" \t")) for name, value in (*request.usual_headers, *request.headers)),
        (b"connection", b"close"),
    ]
    if request.body or request.method == "POST":
        headers.append((b"content-length", b"%d" % len(request.body)))
    # As a stream, the body is sent as it is and the headers are not completed; as a target, the path is not normalised.
    return httpx.Request(
        request.method,
        httpx.URL(scheme=origin.scheme, host=origin.host, port=origin.port),
        headers=headers,
        stream=httpx.ByteStream(request.body),
        extensions={"trace": trace, "timeout": _NO_TIMEOUTS, "target": request.path.encode("ascii")},
    )


def _check_head(response: httpx.Response) -> None:
    raw = response.headers.raw
    if len(raw) > MAX_HEADERS or sum(len(name) + len(value) for name, value in raw) > MAX_HEAD_BYTES:
        raise ProtocolViolation("the answer's headers are too large")
    if not 200 <= response.status_code <= 599:
        raise ProtocolViolation(f"the answer has status {response.status_code}")
    if response.headers.get("content-encoding", "").lower() not in ("identity", ""):
        raise ProtocolViolation("the answer is encoded, though only identity was accepted")


def _is_early_end(error: httpx.RemoteProtocolError) -> bool:
    """h11 and httpcore tell an answer that was cut from one that is wrong by their words alone."""
    return "disconnected" in str(error) or "closed connection" in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all that it came from: anyio puts what the socket said into a group, httpcore and httpx wrap that."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__
