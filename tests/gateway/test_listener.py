"""The listener over raw sockets: what is refused, what ends by a deadline, and in which order answers go out.

Behind each piece of bad framing comes a second request, which must never be answered (request smuggling).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from gateway.server.connection import ListenerLimits
from gateway.server.listener import Listener
from tests.serving import eventually, serving

GET = b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n"
BEHIND = b"GET /behind HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Says what it was asked; `/slow` waits for `go`, `/stream` sends until the client leaves, `/early` reads no body."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.go = asyncio.Event()
        self.gone = asyncio.Event()
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.paths.append(path)
        self.scopes.append(scope)
        if path == "/early":
            await _answer(send, b"no", status=401)
        elif path == "/slow":
            await self.go.wait()
            await _answer(send, b"slow")
        elif path == "/stream":
            await self._stream(receive, send)
        elif path == "/fail":
            raise RuntimeError("as asked")
        elif path == "/broken":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise RuntimeError("as asked")
        else:
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone.set()
                    return
                body += message["body"]
                more = message["more_body"]
            self.bodies.append(body)
            await _answer(send, path.encode() + b":" + body)

    async def _stream(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        watching = asyncio.ensure_future(self._until_gone(receive))
        while not watching.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.sent += 1
        self.gone.set()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


async def _answer(send: Send, body: bytes, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


class Server:
    def __init__(self, app: App, listener: Listener, port: int) -> None:
        self.app = app
        self.listener = listener
        self.port = port

    @property
    def unsent_bytes(self) -> int:
        """Of all answers, what no socket has taken."""
        return sum(connection._transport.get_write_buffer_size() for connection in self.listener._open)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def say(self, *pieces: bytes) -> bytes:
        """Everything that comes back until the server closes, or is silent for a moment."""
        async with self.connected() as (reader, writer):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            return await _all(reader)


async def _all(reader: asyncio.StreamReader) -> bytes:
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:
            piece = await asyncio.wait_for(reader.read(1 << 20), 0.15)
            if not piece:
                return data + b"<closed>"
            data += piece
    return data


@contextlib.asynccontextmanager
async def listening(**limits: Any) -> AsyncIterator[Server]:
    app, listener = App(), Listener(ListenerLimits(**limits))
    async with serving(app, http=listener.protocol) as url:
        yield Server(app, listener, int(url.rpartition(":")[2]))


def assert_refused(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head
    assert b"x-request-id: req-" in head
    assert body.endswith(b"<closed>")
    error = json.loads(body.removesuffix(b"<closed>"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


BAD_FRAMING: dict[str, bytes] = {
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "equal lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "signed length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nhello",
    "length with underscore": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\nhello",
    "length as a list": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n\r\nhello",
    "transfer encoding not chunked": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "several transfer encodings": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "identity": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\n",
    "chunks of HTTP/1.0": b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\nhello",
    "empty length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: \r\n\r\nhello",
    "length of 70 bits": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1180591620717411303424\r\n\r\nhello",
    "space before colon": b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: x\n\n",
    "bare CR": b"GET / HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
    "chunk size too large": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "chunk without end": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    "signed chunk size": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n",
    "chunk size of another base": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "bare LF behind a chunk's size": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
    "chunk extension of 20 KB": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;a=%b\r\nabc\r\n0\r\n\r\n"
    % (b"b" * 20_000),
    "header without a name": b"GET / HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    "header name of other bytes": b"GET / HTTP/1.1\r\nHost: x\r\n\xff: b\r\n\r\n",
    "target of other bytes": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "target without a slash": b"GET x HTTP/1.1\r\nHost: x\r\n\r\n",
    "version 3.7": b"GET / HTTP/3.7\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no method": b"G@T / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    """For tests that change nothing in it."""
    async with listening() as server:
        yield server


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BAD_FRAMING)
async def test_bad_framing_is_refused_and_nothing_behind_it_is_answered(server: Server, name: str) -> None:
    assert_refused(await server.say(BAD_FRAMING[name] + BEHIND), 400, "invalid_http")

    assert "/behind" not in server.app.paths


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_host"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "invalid_host"),
        *[(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % bad, 400, "invalid_host") for bad in (b"a/b", b"a?b", b"a#b", b"u@h", b"")],
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: the-unexpected\r\n\r\n", 417, "expectation_failed"),
        (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 9000), 414, "target_too_long"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: %b\r\n\r\n" % (b"a" * 17000), 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"A: %b\r\n" % (b"a" * 9000) * 4), 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"A: b\r\n" * 101), 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: %b" % (b"a" * (1 << 20)), 431, "headers_too_large"),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n", 405, "method_not_allowed"),
        (b"GET /\r\n\r\n", 505, "http_version"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
    ],
)  # fmt: skip
async def test_what_no_app_should_see_is_refused(server: Server, request_: bytes, status: int, code: str) -> None:
    before = server.listener.refused[code]

    assert_refused(await server.say(request_, BEHIND), status, code)

    assert "/behind" not in server.app.paths
    assert server.listener.refused[code] == before + 1


CHUNKED = b"POST /ok HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_what_hides_between_chunks_is_counted_however_it_comes() -> None:
    async with listening() as server:
        small = await server.say(CHUNKED + b"8;a=b\r\nxxxxxxxx\r\n" * 1000 + b"0\r\n\r\n")
        dripped = await server.say(CHUNKED + b"3;a=", *[b"b" * 500] * 40, b"\r\nabc\r\n0\r\n\r\n")
        late = await server.say(CHUNKED + b"3\r\nabc\r\n", b"0;a=" + b"b" * 100_000 + b"\r\n\r\n" + BEHIND)

    assert small.endswith(b"/ok:" + b"x" * 8000)
    assert_refused(dripped, 400, "invalid_http")
    assert_refused(late, 400, "invalid_http")
    assert "/behind" not in server.app.paths


async def test_a_body_in_crumbs_is_refused_before_it_costs_much() -> None:
    async with listening() as server:
        began = time.thread_time()
        crumbs = await server.say(CHUNKED + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")
        cost_s = time.thread_time() - began
        pieces = await server.say(CHUNKED + b"40\r\n%b\r\n" % (b"x" * 64) * 5000 + b"0\r\n\r\n")

    assert_refused(crumbs, 400, "chunks_too_small")
    assert cost_s < 0.1
    assert pieces.endswith(b"x" * 64)


async def test_headers_up_to_the_limits_pass() -> None:
    async with listening() as server:
        head = b"GET /ok HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 98 + b"B: %b\r\n\r\n" % (b"b" * 16000)

        assert (await server.say(head)).endswith(b"/ok:")
        assert len(server.app.scopes[0]["headers"]) == 100


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("host", [b"x", b"x:80", b"127.0.0.1:8000", b"[::1]:8000", b"a-b.example"])
async def test_hosts_that_are_some(server: Server, host: bytes) -> None:
    assert b"200 OK" in await server.say(b"GET /ok HTTP/1.1\r\nHost: %b\r\n\r\n" % host)


async def test_a_request_needs_no_host_in_http_1_0() -> None:
    async with listening() as server:
        assert (await server.say(b"GET /ok HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\n/ok:<closed>")


async def test_an_offer_of_another_protocol_in_http_1_0_ends_with_the_connection_too() -> None:
    async with listening() as server:
        answer = await server.say(b"GET /ok HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n")

    assert answer.endswith(b"\r\n\r\n/ok:<closed>")


async def test_a_stream_for_http_1_0_ends_with_the_connection() -> None:
    async with listening() as server, server.connected() as (reader, writer):
        writer.write(b"GET /broken HTTP/1.0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")

    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.2"])
async def test_an_offer_of_another_protocol_is_ignored_and_its_body_read(offer: bytes) -> None:
    """Java's HTTP client offers h2c with every POST."""
    head = (
        b"POST /ok HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nContent-Length: 5\r\n\r\n"
        % offer
    )
    async with listening() as server:
        answer = await server.say(head + b"hel", b"lo" + GET)

    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"/ok:hello" in answer


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with listening() as server, server.connected() as (reader, writer):
        writer.write(GET.replace(b"/ok", b"/slow") + b"".join(GET.replace(b"/ok", b"/%d" % n) for n in range(5)))
        await eventually(lambda: server.app.paths == ["/slow"])
        server.app.go.set()
        answers = await _all(reader)

    assert [answers.find(b"/%d:" % n) for n in range(5)] == sorted(answers.find(b"/%d:" % n) for n in range(5))
    assert answers.find(b"slow") < answers.find(b"/0:")


async def test_the_ninth_request_that_waits_for_another_is_too_many() -> None:
    async with listening() as server, server.connected() as (reader, writer):
        writer.write(GET.replace(b"/ok", b"/slow") + GET * 9)
        await eventually(lambda: server.listener.refused["too_many_pipelined"] == 1)
        server.app.go.set()
        answers = await _all(reader)

    assert answers.count(b"HTTP/1.1 200") == 9
    assert b"too_many_pipelined" in answers


async def test_a_long_body_behind_a_running_request_waits_in_the_socket() -> None:
    body = bytes(16 << 20)
    post = b"POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with listening() as server, server.connected() as (_, writer):
        writer.write(GET.replace(b"/ok", b"/slow") + post + body)
        await eventually(lambda: server.app.paths == ["/slow"])
        (connection,) = server.listener._open
        await eventually(lambda: connection._read_paused)
        unsent = len(body)
        while writer.transport.get_write_buffer_size() < unsent:  # until nothing moves any more
            unsent = writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.05)

        assert connection._pipelined[0].waiting_bytes < 1 << 20
        assert unsent > len(body) // 2

        server.app.go.set()
        await eventually(lambda: len(server.app.bodies) == 1)

    assert server.app.bodies == [body]


async def test_while_it_drains_every_answer_closes_its_connection() -> None:
    async with listening() as server, server.connected() as (reader, writer):
        writer.write(GET.replace(b"/ok", b"/slow") + GET)
        await eventually(lambda: server.app.paths == ["/slow"])
        server.listener.drain()
        server.app.go.set()
        running = await _all(reader)
        new = await server.say(GET)

    assert running.count(b"HTTP/1.1 200") == 2, "what was here is answered"
    assert running.count(b"connection: close") == 1
    assert new.count(b"connection: close") == 1


async def test_a_broken_request_behind_a_running_one_lets_that_one_finish() -> None:
    async with listening() as server, server.connected() as (reader, writer):
        writer.write(GET.replace(b"/ok", b"/slow"))
        await eventually(lambda: server.app.paths == ["/slow"])
        writer.write(b"garbage\r\n\r\n")
        await eventually(lambda: server.listener.refused["invalid_http"] == 1)
        server.app.go.set()
        answers = await _all(reader)

    assert answers.index(b"slow") < answers.index(b"HTTP/1.1 400")


async def test_an_interim_answer_goes_out_only_when_the_body_is_wanted() -> None:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    async with listening() as server:
        assert b"100 Continue" not in await server.say(head % b"/early")
        async with server.connected() as (reader, writer):
            writer.write(head % b"/ok")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hello")
            assert (await _all(reader)).endswith(b"/ok:hello")


async def test_an_answer_before_the_body_is_read_reaches_its_client_and_ends_the_connection() -> None:
    """Closing with bytes unread would reset the connection, and the client would never see why."""
    async with listening() as server, server.connected() as (reader, writer):
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(20):
            writer.write(b"x" * 65536)
            await asyncio.sleep(0)
        answer = await _all(reader)

    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer


async def test_a_long_body_that_the_app_leaves_unread_does_not_hold_up_the_next_request() -> None:
    """As when a request over its limit is refused by its head, and its client tries again on the same connection."""
    async with listening() as server, server.connected() as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100000)
            answer = await asyncio.wait_for(reader.readuntil(b"no"), 5)
            if b"connection: close" in answer:  # the body did not come in one piece
                return
        writer.write(GET)

        assert await asyncio.wait_for(reader.readuntil(b"/ok:"), 5)


async def test_a_body_in_many_chunks_costs_no_more_than_its_bytes() -> None:
    """Counting what waits anew for each chunk took 17 s for such a one, in which nobody else was answered."""
    async with listening() as server, server.connected() as (reader, writer):
        began = time.process_time()
        writer.write(b"POST /ok HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"10\r\n0123456789abcdef\r\n" * 50_000 + b"0\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"/ok:"), 30)

        assert server.app.bodies == [b"0123456789abcdef" * 50_000]
        assert time.process_time() - began < 1.5


@pytest.mark.parametrize("endless", [b"0\r\nA: ", b"0\r\nA", b"1;a="])
async def test_trailers_and_chunk_extensions_end(endless: bytes) -> None:
    async with listening() as server, server.connected() as (reader, writer):
        writer.write(b"POST /ok HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + endless)
        for _ in range(20):
            writer.write(b"a" * 65536)
            await asyncio.sleep(0)

        assert_refused(await _all(reader), 400, "invalid_http")


async def test_a_body_the_app_does_not_read_leaves_the_socket_unread() -> None:
    async with listening() as server, server.connected() as (_, writer):
        writer.write(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        written = 0
        with contextlib.suppress(TimeoutError):
            while written < 50 << 20:
                writer.write(b"x" * 65536)
                await asyncio.wait_for(writer.drain(), 0.3)
                written += 65536

    assert written < 20 << 20  # what the kernel's buffers take


@pytest.mark.parametrize(
    "sent", [b"", b"GET /ok HTTP/1.1\r\nHos", b"POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe"]
)
async def test_a_request_that_does_not_arrive_ends(sent: bytes) -> None:
    async with listening(head_s=0.2, body_s=0.2) as server, server.connected() as (reader, writer):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 5)

        await eventually(lambda: not server.listener.num_connections)
        if sent:
            assert_refused(answer + b"<closed>", 408, "request_timeout")
        else:
            assert answer == b""
        if sent.startswith(b"POST"):
            await asyncio.wait_for(server.app.gone.wait(), 5)


async def test_dripped_headers_do_not_extend_their_time() -> None:
    async with listening(head_s=0.3) as server, server.connected() as (reader, writer):
        writer.write(b"GET /ok HTTP/1.1\r\n")
        dripping = asyncio.ensure_future(_drip(writer))
        answer = await asyncio.wait_for(reader.read(), 5)
        dripping.cancel()

    assert b" 408 " in answer


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"A: b\r\n")
        await asyncio.sleep(0.05)


async def test_a_slow_but_steady_body_arrives() -> None:
    async with listening(body_s=0.5, body_bytes_s=1000) as server, server.connected() as (reader, writer):
        writer.write(b"POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: 3000\r\n\r\n")
        for _ in range(30):
            writer.write(b"x" * 100)
            await asyncio.sleep(0.05)

        assert b"200 OK" in await _all(reader)


async def test_an_idle_connection_is_closed_and_a_used_one_kept() -> None:
    async with listening(keep_alive_s=1.0) as server, server.connected() as (reader, writer):
        for _ in range(3):
            writer.write(GET)
            assert (await reader.readuntil(b"/ok:")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.3)

        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_client_that_takes_nothing_is_cut_and_one_that_is_slow_is_not() -> None:
    async with listening(write_stall_s=0.7) as server:
        async with server.connected() as (reader, writer):
            writer.write(GET.replace(b"/ok", b"/stream"))
            await asyncio.wait_for(server.app.gone.wait(), 10)
            assert server.listener.refused["write_stalled"] == 1
            assert server.app.sent < 20_000_000 // 65536

        server.app.gone.clear()
        async with server.connected() as (reader, writer):
            writer.write(GET.replace(b"/ok", b"/stream"))
            for _ in range(20):
                await reader.readexactly(1 << 19)
                await asyncio.sleep(0.1)
            assert not server.app.gone.is_set()
            assert server.listener.refused["write_stalled"] == 1
        await asyncio.wait_for(server.app.gone.wait(), 5)


async def test_a_client_that_takes_nothing_of_a_short_rest_is_cut_too() -> None:
    """Too little to pause the app, but a connection closes only when all of it is taken."""
    async with listening(keep_alive_s=0.3, write_stall_s=0.7) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with client:
            client.connect(("127.0.0.1", server.port))
            client.setblocking(False)
            body = b"x" * 30_000
            request = b"POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            sent = 0
            while not server.unsent_bytes:
                await asyncio.get_running_loop().sock_sendall(client, request)
                sent += 1
                await eventually(lambda: len(server.app.bodies) == sent)  # noqa: B023 - waited for here
                await asyncio.sleep(0)

            await eventually(lambda: not server.listener.num_connections)

    assert server.listener.refused["write_stalled"] == 1


async def test_connections_beyond_the_cap_are_told_so() -> None:
    async with listening(max_connections=2) as server, server.connected(), server.connected():
        await eventually(lambda: server.listener.num_connections == 2)
        answer = await server.say(GET)

    assert b" 503 " in answer
    assert b"too_many_connections" in answer
    assert server.app.paths == []


async def test_an_app_that_fails_is_a_500_or_a_broken_body() -> None:
    async with listening() as server:
        failed = await server.say(GET.replace(b"/ok", b"/fail"))
        broken = await server.say(GET.replace(b"/ok", b"/broken"))

    assert b"HTTP/1.1 500" in failed
    assert json.loads(failed.partition(b"\r\n\r\n")[2])["error"]["code"] == "internal_error"
    assert not broken.endswith(b"0\r\n\r\n<closed>")


async def test_head_has_the_headers_of_get_and_no_body() -> None:
    async with listening() as server:
        answer = await server.say(GET.replace(b"GET", b"HEAD") + GET)

    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"/ok:") == 1


async def test_stopping_lets_running_answers_finish_and_closes_the_rest() -> None:
    async with contextlib.AsyncExitStack() as clients:
        async with listening() as server:
            idle, _ = await clients.enter_async_context(server.connected())
            reader, writer = await clients.enter_async_context(server.connected())
            writer.write(GET.replace(b"/ok", b"/slow"))
            await eventually(lambda: server.app.paths == ["/slow"])
            asyncio.get_running_loop().call_later(0.2, server.app.go.set)

        answer = await reader.read()
        assert b"connection: close" in answer
        assert answer.endswith(b"slow")
        assert await idle.read() == b""


async def test_requests_do_not_depend_on_how_their_bytes_are_cut() -> None:
    draw = random.Random(1)
    async with listening() as server:
        for _ in range(150):
            bodies = [draw.randbytes(draw.randrange(200)) for _ in range(draw.randint(1, 4))]
            data = b"".join(_post(body, chunked=draw.random() < 0.5) for body in bodies)
            server.app.bodies.clear()
            async with server.connected() as (_, writer):
                while data:
                    cut = draw.randint(1, 60)
                    writer.write(data[:cut])
                    data = data[cut:]
                    await asyncio.sleep(0)
                await eventually(lambda: len(server.app.bodies) == len(bodies))  # noqa: B023 - waited for here
            assert server.app.bodies == bodies


def _post(body: bytes, *, chunked: bool) -> bytes:
    if not chunked:
        return b"POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:7], body[7:]) if piece)
    return b"POST /ok HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\nTrailer: t\r\n\r\n" % pieces


async def test_an_ordinary_client_sees_an_ordinary_server() -> None:
    async with listening() as server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert (await client.post("/ok", content=b"hello")).text == "/ok:hello"
        assert (await client.get("/a%20b?c=d")).text == "/a b:"
        assert server.app.scopes[-1]["query_string"] == b"c=d"
        assert server.app.scopes[-1]["raw_path"] == b"/a%20b"
        assert server.listener.num_connections == 1
