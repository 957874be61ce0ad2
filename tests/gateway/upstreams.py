"""What tests of replica transports share: requests, and a client with its scripted replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from gateway.upstream.contract import Header, Origin, Timeouts, Upstream, UpstreamRequest
from tests.gateway.scripted import Peer, Script, ScriptedReplica, scripted_replica
from tests.serving import eventually

_U = TypeVar("_U", bound=Upstream)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=5.0, idle_s=5.0)


def request(
    origin: Origin,
    *,
    method: str = "POST",
    path: str = "/v1/completions",
    headers: list[Header] | None = None,
    body: bytes = b"{}",
    timeouts: Timeouts = TIMEOUTS,
) -> UpstreamRequest:
    return UpstreamRequest(method=method, origin=origin, path=path, headers=headers or [], body=body, timeouts=timeouts)


async def call(upstream: Upstream, sent: UpstreamRequest) -> tuple[int, bytes]:
    response = await upstream.send(sent)
    try:
        return response.status, await response.read(1 << 26)
    finally:
        await response.aclose()


@asynccontextmanager
async def connected(script: Script, transport: Callable[[], _U]) -> AsyncIterator[tuple[_U, ScriptedReplica]]:
    """A client and its replica. At the end nothing may be in use."""
    async with scripted_replica(script) as replica:
        upstream = transport()
        try:
            yield upstream, replica
            assert upstream.in_use == 0
        finally:
            await upstream.aclose()
        for peer in replica.peers:
            peer.resume_reading()  # who does not read does not see the end either
        await eventually(lambda: replica.open == 0)


async def forever(peer: Peer) -> None:
    """Read requests, answer nothing."""
    while True:
        await peer.request()
