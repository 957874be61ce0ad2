"""The client by hand, against servers that say exactly what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.connection import Connections, Exchange, Lost

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"text":"0\\r\\n\\r\\n"}\n\n', b'data: {"usage":{"completion_tokens":2}}\n\n', b"data: [DONE]\n\n"]
STREAM = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"
ASK = b"GET / HTTP/1.1\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@contextlib.asynccontextmanager
async def connected(handler: Handler) -> AsyncIterator[Connections]:
    """To a server that has ended all its connections afterwards."""
    handling: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handling.add(asyncio.ensure_future(handle(reader, writer)))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    connections = Connections(server.sockets[0].getsockname()[1])
    try:
        yield connections
    finally:
        connections.close()
        server.close()
        async with asyncio.timeout(30):
            await asyncio.gather(*handling)


def saying(*parts: bytes, close: bool = False) -> Handler:
    """Answers each request with these bytes, each part in a segment of its own."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return handle


async def ask(*parts: bytes, close: bool = False) -> Exchange:
    async with connected(saying(*parts, close=close)) as connections, asyncio.timeout(30):
        return await connections.ask(ASK)


@given(cuts=st.lists(st.integers(1, len(STREAM) - 1), max_size=4))
def test_a_stream_ends_at_its_last_chunk_however_it_is_cut(cuts: list[int]) -> None:
    places = sorted({0, *cuts, len(STREAM)})
    parts = [STREAM[start:end] for start, end in itertools.pairwise(places)]

    exchange = asyncio.run(ask(*parts))

    assert exchange.status == 200
    assert exchange.tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert exchange.first_at is not None
    assert exchange.first_at <= exchange.last_at


async def test_an_answer_with_a_length_ends_there() -> None:
    exchange = await ask(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\n", b"busy")

    assert (exchange.status, exchange.first_at, exchange.tail[-4:]) == (503, None, b"busy")


async def test_an_answer_with_neither_ends_with_its_connection() -> None:
    exchange = await ask(b"HTTP/1.0 200 OK\r\n\r\ndata: [DONE]\n\n", close=True)

    assert (exchange.status, b"[DONE]" in exchange.tail) == (200, True)


@pytest.mark.parametrize(
    "part", [b"", HEAD, HEAD + b"5\r\ndata:\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort"]
)
async def test_a_connection_that_ends_early_is_lost(part: bytes) -> None:
    with pytest.raises(Lost):
        await ask(part, close=True)


async def test_comments_before_the_first_event_are_not_its_first_token() -> None:
    exchange = await ask(HEAD, b"8\r\n: ping\n\n\r\n", b"0\r\n\r\n")

    assert exchange.first_at is None


async def test_connections_are_used_again_unless_the_server_ends_them() -> None:
    opened = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await answer(reader, writer)

    answer = saying(STREAM)
    async with connected(count) as connections:
        for _ in range(3):
            await connections.ask(ASK)
    assert opened == 1

    answer = saying(STREAM.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
    async with connected(count) as connections:
        for _ in range(3):
            await connections.ask(ASK)
    assert opened == 4


async def test_one_who_stops_waiting_leaves_no_connection_behind() -> None:
    closed = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.read()
        closed.set()

    async with connected(handle) as connections:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connections.ask(ASK)
        async with asyncio.timeout(30):
            await closed.wait()
