"""From the signal to the end of a process's client listener: every client gets a whole answer, or is told that it gets none.

    the signal      /ready says no, so that load balancers look elsewhere; answers close their connections; new connections
                    are still accepted, since load balancers learn late
    drain_s         the listener closes; what runs goes on
    grace_s         what still runs is cut: a stream ends with an error event, anything else with a 503
    + a moment      connections that do not even take that are closed

A second signal skips whatever is left. The admin listener closes last, since it says how all this goes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from gateway.server.listener import Listener

__all__ = ["ClientServer"]


class ClientServer:
    """Serves clients until it is told to stop, and then to the end."""

    def __init__(
        self,
        server: uvicorn.Server,
        listener: Listener,
        *,
        drain_s: float,
        grace_s: float,
        cut: Callable[[], None],
    ) -> None:
        """`listener`: whose connections `server` has. `cut`: end what still runs, with a word to its clients."""
        self._server = server
        self._listener = listener
        self._drain_s = drain_s
        self._grace_s = grace_s
        self._cut = cut
        self._told = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether it should get nothing new."""
        return self._told.is_set()

    def stop(self) -> None:
        """Told again, it waits for no answer that still runs."""
        if self._told.is_set():
            self._hurry.set()
            self._server.force_exit = self._server.should_exit = True
        self._told.set()

    async def serve(self, listening: socket.socket) -> None:
        """Returns when the listener and all its connections are closed."""
        serving = asyncio.create_task(self._server.serve([listening]))
        told = asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._end(serving)
            await serving
        finally:
            told.cancel()
            serving.cancel()

    async def _end(self, serving: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        cut_at = loop.time() + self._grace_s
        self._listener.drain()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._hurry.wait()
        except TimeoutError:
            self._server.should_exit = True
        await asyncio.wait({serving}, timeout=cut_at - loop.time())
        if not serving.done():
            self._cut()
