"""From the signal to the exit: every client gets a whole answer, or is told that it gets none.

    the signal      /ready says no, so that load balancers look elsewhere; answers close their connections; new connections
                    are still accepted, since load balancers learn late
    drain_s         the public listener closes; what runs goes on
    grace_s         what still runs is cut: a stream ends with an error event, anything else with a 503
    + a moment      connections that do not even take that are closed
    then            the admin listener closes, last, because it says how all this goes

A second signal skips whatever is left.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

__all__ = ["CUT_S", "Shutdown", "uvicorn_grace_s"]

CUT_S: Final = 2.0
"""For the last words of answers that were cut to reach their clients."""


def uvicorn_grace_s(grace_s: float) -> int:
    """uvicorn cancels what it serves when this is over; by then nothing should be left."""
    return math.ceil(grace_s + CUT_S)


class Shutdown:
    """Runs two servers in one process until it is told to stop."""

    def __init__(
        self,
        public: uvicorn.Server,
        admin: uvicorn.Server,
        *,
        drain_s: float,
        grace_s: float,
        begin: Callable[[], None],
        cut: Callable[[], None],
    ) -> None:
        """`begin`: from now on /ready says no, and answers close their connections. `cut`: end what still runs."""
        self._public = public
        self._admin = admin
        self._drain_s = drain_s
        self._grace_s = grace_s
        self._begin = begin
        self._cut = cut
        self._told = asyncio.Event()
        self._hurry = asyncio.Event()

    def tell(self) -> None:
        """Stop; told again, wait for no answer that still runs."""
        if not self._told.is_set():
            self._told.set()
            return
        self._hurry.set()
        for server in (self._public, self._admin):
            server.force_exit = server.should_exit = True

    async def serve(self, public_socket: socket.socket, admin_socket: socket.socket) -> None:
        """Returns when both are closed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admin.serve([admin_socket]))
            public = group.create_task(self._public.serve([public_socket]))
            await self._told.wait()
            try:
                await self._end(public)
            finally:
                self._admin.should_exit = True

    async def _end(self, public: asyncio.Task[None]) -> None:
        cut_at = asyncio.get_running_loop().time() + self._grace_s
        self._begin()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._hurry.wait()
        except TimeoutError:
            self._public.should_exit = True
        await asyncio.wait([public], timeout=cut_at - asyncio.get_running_loop().time())
        if not public.done():
            self._cut()
            await asyncio.wait([public])  # ends by `uvicorn_grace_s`
