"""The listening side of the gateway: what its client connections share.

uvicorn runs it (`Listener.protocol` is its ``http``) and owns sockets and shutdown; apps are plain ASGI
(`gateway.server.cycle`), but for the routes that they give directly (`gateway.server.exchange`). Its own protocols have no
limit on headers, no time-out while a request arrives and none for a client that takes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from gateway.server.connection import Connection, ListenerLimits

__all__ = ["ADMIN_SHARE", "CLIENTS_SHARE", "Listener", "raise_descriptor_limit"]

CLIENTS_SHARE: Final = 0.4
"""A client's connection may need another one to a replica, so this is four fifths of the descriptors. One that a replica could
not be given would look like that replica's failure."""
ADMIN_SHARE: Final = 0.1

_SWEEP_S: Final = 0.5
"""How late a deadline may be noticed. One timer for all connections, so that a request sets none."""


class Listener:
    """What the connections of one listening socket share."""

    def __init__(self, limits: ListenerLimits | None = None, *, descriptor_share: float = CLIENTS_SHARE) -> None:
        """`descriptor_share`: of the process's file descriptors, where `limits` gives no number of connections."""
        self.limits = limits or ListenerLimits()
        self.max_connections = self.limits.max_connections or int(_descriptors() * descriptor_share)
        self.refused: Counter[str] = Counter()
        """Requests and connections that were refused or cut here, by code."""
        self.draining = False
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def num_connections(self) -> int:
        return len(self._open)

    def protocol(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """A new connection's, as uvicorn asks for it."""
        return Connection(self, cast(ASGIApp, config.loaded_app), server_state)

    def drain(self) -> None:
        """From now on every answer closes its connection, so that clients connect anew, elsewhere."""
        self.draining = True
        for connection in self._open:
            connection.close_after_answers()

    def opened(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        self._open.add(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(_SWEEP_S, self._sweep, connection.loop)
        return len(self._open) <= self.max_connections

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self._open):
            connection.check(now)
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep, loop) if self._open else None


def raise_descriptor_limit() -> None:
    """To what the process may have at most: many systems start with 1,024 of them, for programs that do not need more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
