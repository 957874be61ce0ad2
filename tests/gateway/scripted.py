"""A replica that answers with exactly the bytes a test wants, over a real socket, and counts who is connected."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import cast

from gateway.upstream.contract import Origin
from tests.serving import eventually

Script = Callable[["Peer"], Awaitable[None]]


class Peer(asyncio.Protocol):
    """One accepted connection. Its script runs until it returns or the client is gone; returning leaves it open."""

    def __init__(self, replica: ScriptedReplica) -> None:
        self.replica = replica
        self.number = 0
        self._received = bytearray()
        self._news = asyncio.Event()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.replica.accepted += 1
        self.replica.peers.add(self)
        self.number = self.replica.accepted
        self._task = asyncio.get_running_loop().create_task(self._run())

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.replica.peers.discard(self)
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self.replica.script(self)
        except Exception as error:  # a script's own failure must fail its test, not vanish in a task
            self.replica.errors.append(error)

    async def request(self) -> bytes:
        """The next whole request as it came: head and body."""
        while (size := _request_size(self._received)) is None or len(self._received) < size:
            await self._more()
        request = bytes(self._received[:size])
        del self._received[:size]
        self.replica.requests.append(request)
        return request

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()

    def pause_reading(self) -> None:
        """Until `resume_reading`, this side does not see the client leave either."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def write_pieces(self, pieces: Iterable[bytes]) -> None:
        """Each piece reaches the client in a read of its own: it is on the same loop and gets its turn in between."""
        for piece in pieces:
            self.write(piece)
            for _ in range(3):
                await asyncio.sleep(0)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()


class ScriptedReplica:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.origin = Origin("http", "127.0.0.1", 0)
        self.accepted = 0
        self.peers: set[Peer] = set()
        self.requests: list[bytes] = []
        self.errors: list[Exception] = []

    @property
    def open(self) -> int:
        return len(self.peers)


@asynccontextmanager
async def scripted_replica(script: Script, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedReplica]:
    replica = ScriptedReplica(script)
    server = await asyncio.get_running_loop().create_server(lambda: Peer(replica), "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    replica.origin = Origin("https" if tls else "http", "localhost" if tls else "127.0.0.1", port)
    try:
        yield replica
    finally:
        server.close()
        for peer in list(replica.peers):
            peer.abort()
        await eventually(lambda: not replica.peers)
        await server.wait_closed()
    assert not replica.errors, replica.errors


def answer_each(*pieces: bytes) -> Script:
    """Answer every request of a connection with the same bytes."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.write_pieces(pieces)

    return script


def _request_size(received: bytearray) -> int | None:
    head, end, _ = bytes(received).partition(b"\r\n\r\n")
    if not end:
        return None
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(head) + 4 + int(value)
    return len(head) + 4
