"""Heads that come again: with what is remembered of them, every connection does what it does with the parser alone.

Two connections get the same bytes in the same pieces. Behind one is an app whose routes are direct, so its heads are
remembered; the other's parser reads everything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gateway.server.asgi import AsgiExchange
from gateway.server.connection import Connection, ListenerLimits
from gateway.server.exchange import Exchange, Route
from gateway.server.headers import HEADERS_BY_NAME
from gateway.server.known_head import KnownHead
from gateway.server.listener import Listener
from gateway.server.request_head import RequestHead
from tests.gateway.splits import split

_LIMIT = 4000


class App:
    """Says what it was asked."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(scope, AsgiExchange(scope, receive, send))

    async def answer(self, scope: Scope, exchange: Exchange) -> None:
        body = exchange.try_take_body(_LIMIT)
        if body is None:
            body = await exchange.read_body(_LIMIT)
        headers = b",".join(b"%b=%b" % pair for pair in scope["headers"] if pair[0] != b"content-length")
        told = b"[%b %b|%b|%b]" % (scope["method"].encode(), scope["raw_path"], headers, body)
        await exchange.start(200, [(b"content-length", b"%d" % len(told))])
        await exchange.write(told, more=False)


class DirectApp(App):
    def direct_route(self, scope: Scope) -> Route | None:
        async def route(exchange: Exchange) -> None:
            await self.answer(scope, exchange)

        return route if scope["method"] == "POST" else None


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = ""
        self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 5000) if name in ("peername", "sockname") else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = self.ended or "half-closed"


class Client:
    def __init__(self, app: App) -> None:
        self.listener = Listener(ListenerLimits())
        self.transport = Transport()
        self.connection = Connection(self.listener, app, ServerState())
        self.connection.connection_made(self.transport)

    @property
    def seen(self) -> tuple[bytes, str, dict[str, int]]:
        """What the client sees, and what was counted; without ids that are drawn."""
        lines = self.transport.written.split(b"\r\n")
        written = b"\r\n".join(line for line in lines if not line.startswith(b"x-request-id"))
        return written, self.transport.ended, dict(self.listener.refused)

    async def send(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            if self.transport.ended in ("closed", "aborted"):
                break
            self.connection.data_received(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for _ in range(40):
            await asyncio.sleep(0)


def post(body: bytes = b"", *extra: bytes, path: bytes = b"/a", length: bytes | None = None) -> bytes:
    """`length`: what is said of it, where that is not true."""
    length = b"%d" % len(body) if length is None else length
    lines = [b"POST %b HTTP/1.1" % path, b"Host: x", *extra, b"Content-Length: " + length, b"X-Last: y", b"", body]
    return b"\r\n".join(lines)


async def both(pieces: Sequence[bytes]) -> Client:
    """The client of the app with direct routes, which saw what the other one saw."""
    known, parsed = Client(DirectApp()), Client(App())
    await known.send(pieces)
    await parsed.send(pieces)

    assert known.seen == parsed.seen
    return known


async def test_a_head_that_comes_again_is_recognized_whatever_its_length(recognized: list[int]) -> None:
    client = await both([post(b"x" * size) for size in (5, 0, 7, 1234, 5)])

    assert recognized == [0, 7, 1234, 5]
    assert client.seen[0].count(b"HTTP/1.1 200") == 5


@pytest.mark.parametrize(
    "request_",
    [
        post(b"hello", b"Content-Length: 5"),
        post(b"hello", b"Content-Length: 6"),
        post(b"hello", b"Transfer-Encoding: chunked"),
        post(b"hello", b"Connection: close"),
        post(b"hello", b"Expect: 100-continue"),
        post(b"hello", b"Connection: upgrade", b"Upgrade: h2c"),
        post(b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(b"hello").replace(b"Content-Length: 5", b"X-Content-Length: 5"),
        post(b"hello").replace(b"POST", b"GET"),
        post(b"hello", b"A: " + b"a" * 9000),
    ],
)
async def test_heads_that_say_more_than_a_length_are_never_remembered(recognized: list[int], request_: bytes) -> None:
    await both([request_, request_, post(b"behind")])

    assert recognized == []


@pytest.mark.parametrize(
    "length",
    [
        *(
            b"+5",
            b"-5",
            b" 5",
            b"5 ",
            b"05",
            b"",
            b"5,5",
            b"5;5",
            b"5_0",
            b"0x5",
            b"\xb2",
            "٥".encode(),
            b"5\n",
            b"5\r",
            b"5\0",
        ),
        *(b"1000000000", b"99999999999999999999", b"5\r\nContent-Length: 6", b"5\r\nA: b"),
    ],
)
async def test_a_length_that_is_not_plain_is_the_parsers(recognized: list[int], length: bytes) -> None:
    await both([post(b"first"), post(b"hello", length=length), post(b"behind")])

    assert 5 not in recognized


@pytest.mark.parametrize(
    "changed",
    [
        (b"X-Last: y", b"X-Last: z"),
        (b"Host: x", b"Host: a/b"),
        (b"POST", b"post"),
        (b"X-Last: y\r\n", b"X-Last: y\r\nTransfer-Encoding: chunked\r\n"),
        (b"X-Last: y\r\n", b"X-Last: y\r\nContent-Length: 99\r\n"),
        (b"X-Last: y\r\n\r\n", b"X-Last: y\n\n"),
        (b"X-Last", b"x-last"),
    ],
)
async def test_a_head_that_differs_anywhere_is_the_parsers(recognized: list[int], changed: tuple[bytes, bytes]) -> None:
    await both([post(b"hello"), post(b"hello").replace(*changed), post(b"behind")])

    assert 5 not in recognized


async def test_a_body_that_looks_like_requests_is_a_body() -> None:
    inner = post(b"inner")

    client = await both([post(b"first"), post(inner), post(inner * 3) + post(inner), post(inner[:-3]), inner])

    assert client.seen[0].count(b"HTTP/1.1 200") == 6


async def test_a_body_that_is_too_long_is_refused_by_what_is_announced() -> None:
    client = await both([post(b"first"), post(b"x", length=b"%d" % (_LIMIT + 1))])

    assert b"HTTP/1.1 500" in client.transport.written, "what this app makes of it"


async def test_a_client_that_leaves_in_the_middle_of_a_counted_body_ends_its_request() -> None:
    client = Client(DirectApp())
    await client.send([post(b"first"), post(b"x" * 100)[:-50]])
    cycle = client.connection._current

    client.connection.connection_lost(None)
    await asyncio.sleep(0)

    assert cycle is not None
    assert cycle.gone


async def test_a_counted_body_that_does_not_arrive_is_a_time_out() -> None:
    client = Client(DirectApp())
    await client.send([post(b"first"), post(b"x" * 100)[:-50]])

    client.connection.check(asyncio.get_running_loop().time() + 29)
    assert not client.listener.refused
    client.connection.check(asyncio.get_running_loop().time() + 31)

    assert client.listener.refused == {"request_timeout": 1}
    assert b"HTTP/1.1 408" in client.transport.written


async def test_while_it_drains_a_known_head_closes_its_connection_too() -> None:
    client = Client(DirectApp())
    await client.send([post(b"first")])
    client.listener.draining = True

    await client.send([post(b"second")])

    assert client.transport.written.count(b"connection: close") == 1
    assert client.transport.ended == "closed"


def test_what_is_remembered_is_bounded() -> None:
    data = post(b"", b"A: " + b"a" * 9000)
    head, scope = RequestHead(), {HEADERS_BY_NAME: {b"host": b"x"}}

    async def route(exchange: Exchange) -> None: ...

    assert KnownHead.of(data, head, scope, route) is None


REQUESTS = [
    post(b"hello"),
    post(b""),
    post(b"x" * 300),
    post(b"other", path=b"/b"),
    post(b"with a key", b"Authorization: Bearer k"),
    post(post(b"inside")),
    post(b"hello", b"Connection: keep-alive"),
    b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n" + post(b"after a line"),
    post(b"hello", length=b"05"),
    post(b"hello", b"Content-Length: 5"),
    post(b"hello", b"Connection: close"),
    post(b"hello", b"Expect: 100-continue"),
    post(b"hello", b"Transfer-Encoding: chunked"),
    post(b"hello", length=b"4"),
    post(b"hello", length=b"6"),
    b"\r\n",
    b"garbage\r\n\r\n",
]


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.sampled_from([*REQUESTS[:6], *REQUESTS]), min_size=1, max_size=8),
    st.lists(st.integers(0, 3000), max_size=12),
    st.booleans(),
)
def test_whatever_comes_in_whatever_pieces_is_answered_as_by_the_parser(
    requests: list[bytes], cuts: list[int], whole: bool
) -> None:
    """`whole`: also cut where requests begin, as most clients send them."""
    if whole:
        ends = [sum(map(len, requests[: n + 1])) for n in range(len(requests))]
        cuts = [*ends, *cuts[:2]]

    asyncio.run(_both(split(b"".join(requests), cuts)))


async def _both(pieces: Sequence[bytes]) -> None:
    await both([piece for piece in pieces if piece])


def test_changed_bytes_are_read_as_the_parser_reads_them() -> None:
    draw = random.Random(3)

    async def run() -> None:
        for _ in range(1500):
            request = bytearray(post(b"hello", b"Authorization: Bearer abcdef"))
            first = bytes(request)
            for _ in range(draw.randint(1, 2)):
                request[draw.randrange(len(request))] = draw.choice(b"\r\n\0 :0159aA;,-\xff")
            await both([first, bytes(request), first])

    asyncio.run(run())
