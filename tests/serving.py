"""A real server for tests: an ASGI app under uvicorn on a free port, in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

__all__ = ["eventually", "serving"]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Signals are the test runner's."""
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, *, port: int = 0, http: Any = "httptools") -> AsyncIterator[str]:
    """Yields the base URL. On exit the connections that are left are cut. `http`: uvicorn's protocol.

    As `gateway.serving` does it, without the middleware that reads forwarded addresses: it would hide direct routes.
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    # Its connections inherit it. asyncio sets it only where the socket names its protocol, and without it each second write of
    # an answer waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        app, http=http, proxy_headers=False, lifespan="off", log_level="critical", timeout_graceful_shutdown=1
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def eventually(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait until `condition` holds; fail the test when it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the code under test, which has no event for it
            await asyncio.sleep(0.005)
