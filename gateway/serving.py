"""Sockets, servers and what a process does once before it serves."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp

from gateway.log_format import JsonFormatter
from gateway.server.listener import Listener

__all__ = ["bound", "configure_logging", "listening", "make_server"]

_BACKLOG: Final = 2048
_CUT_S: Final = 2.0
"""After the grace, for the last words of answers that were cut to reach their clients."""


@contextlib.contextmanager
def listening(host: str, port: int, *, shared: bool = False) -> Iterator[socket.socket]:
    """`shared`: other processes of this user may listen there too. Raises OSError."""
    try:
        taken = socket.create_server((host, port), family=_family(host), backlog=_BACKLOG, reuse_port=shared)
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror}") from error
    with taken:
        yield taken


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[int]:
    """Keep a port, or any free one for 0, for processes that listen there with `shared`; the port. Raises OSError.

    It does not listen itself: the kernel would give it connections, and nobody would take them.
    """
    if port:  # a shared port would be shared with a stranger just as well, such as another gateway
        with listening(host, port):
            pass
    with socket.socket(_family(host)) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            kept.bind((host, port))
        except OSError as error:
            raise OSError(f"{host}:{port}: {error.strerror}") from error
        yield kept.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def make_server(app: ASGIApp, listener: Listener, grace_s: float) -> uvicorn.Server:
    """One that no signal ends by itself. Told to exit, it cancels what still runs when the grace and a moment more are over."""
    return _Server(
        uvicorn.Config(
            app,
            http=cast(Any, listener.protocol),
            proxy_headers=False,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=math.ceil(grace_s + _CUT_S),
        )
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Several servers may share a process, so none may own its signals; whoever runs them does."""
        yield


def configure_logging(level: str, format_: str) -> None:
    """`format_`: text or json."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    if format_ == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it tells at length how it starts and stops
