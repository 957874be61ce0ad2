"""A replica's life as a process: listen, serve until told to stop, end what still runs, in bounded time.

The order of the end: leave the gateways, so that nothing new is sent here; stop accepting; give running answers `grace_s`;
end the engine, so that what still runs gets an error event instead of a cut connection; wait for the connections, at most
`CLOSE_S` more.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from workers.api_error import ApiError
from workers.client import EngineClient
from workers.register import Registration, registered
from workers.server import new_request_id

__all__ = ["ServedApp", "bind", "is_loopback", "reachable_url", "serve", "stop_signals"]

_log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 75
"""Longer than gateways keep an idle connection: who closes first must be the one who sends next, or a request is lost."""

STALLED_READER_S: Final = 30
"""A client that takes nothing for so long is cut by the kernel; no server of ours would notice it."""

CLOSE_S: Final = 1
ENGINE_WATCH_S: Final = 0.25


class ServedApp(Protocol):
    """`workers.server.ReplicaApp`, or what stands around it."""

    @property
    def epoch(self) -> str: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def close_streams(self) -> None:
        """End the event streams, which would never end by themselves."""
        ...


def bind(host: str, port: int) -> socket.socket:
    """Take the address before the long start, so that a taken one shows at once. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it from the socket that accepts them.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_READER_S * 1000)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def reachable_url(sock: socket.socket) -> str:
    """Where others reach it: its address, or this machine's name when it listens on all addresses."""
    address, port = sock.getsockname()[:2]
    host = socket.gethostname() if ipaddress.ip_address(address).is_unspecified else address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def serve(
    app: ServedApp,
    engine: EngineClient,
    sock: socket.socket,
    *,
    stop: asyncio.Event,
    registrations: Sequence[Registration],
    grace_s: float,
) -> bool:
    """Serve until `stop`, or until the engine dies. False: it died. The engine has ended when this returns."""
    server = _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(grace_s) + CLOSE_S,
        )
    )
    _spare_collections()
    serving = asyncio.create_task(server.serve([sock]))
    try:
        async with registered(registrations):
            died = await _wait_for_the_end(serving, engine, stop)
            _log.info("the engine has ended" if died else "stopping")
        app.close_streams()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=0 if died else grace_s)
    finally:
        server.should_exit = True
        await engine.stop()
        await serving
    return not died


def _spare_collections() -> None:
    """What the start made is never garbage: a full collection would visit it, and every block of the cache, for nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)


async def _wait_for_the_end(serving: asyncio.Task[None], engine: EngineClient, stop: asyncio.Event) -> bool:
    """True: because the engine died."""
    while not stop.is_set() and not serving.done() and engine.alive:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), ENGINE_WATCH_S)
    return not engine.alive


class _Protocol(HttpToolsProtocol):
    def send_400_response(self, msg: str) -> None:
        """What is no HTTP never reaches the app, so its answer in OpenAI's shape is written here."""
        body = ApiError(400, "invalid_http", msg).body()
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {new_request_id()}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `stop_signals`': uvicorn would raise them again before the engine has ended."""
        yield
