"""The composition root: a whole gateway out of its planes (`gateway.planes`), run as one process.

Of several processes `gateway.processes.supervising` and `gateway.processes.data` put the same planes together.

Order of the end: the client listener stops as `gateway.shutdown` says, then the admin listener; then nothing needs the watcher,
the upstream connections and the thread that tokenizes, and they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import click
from starlette.types import ASGIApp

from gateway.admin.bodies import DecisionBody, RequestRates
from gateway.admin.context import Insight
from gateway.admin.live import Live
from gateway.admin.registry import Registry
from gateway.homes import Homes
from gateway.hotpath import HotPath
from gateway.keys import KeyKind, KeyStore
from gateway.keys.opening import open_key_store
from gateway.memory import keep_freed_memory, spare_collections
from gateway.planes.control import ControlPlane, build_control_plane
from gateway.planes.data import DataPlane, build_data_plane, client_server
from gateway.planes.knowledge import Knowledge, build_knowledge, unready
from gateway.reloader import Reloader, SettingsSource
from gateway.retries import Quarantine
from gateway.server.listener import ADMIN_SHARE, Listener, raise_descriptor_limit
from gateway.serving import listening, make_server
from gateway.settings import Settings
from gateway.telemetry import render
from gateway.upstream.contract import Upstream
from router import ReplicaView, Router

__all__ = ["Gateway", "build_gateway", "first_keys", "run_gateway"]

_log = logging.getLogger("warmpath.gateway")


@dataclass(frozen=True, slots=True)
class Gateway:
    """A whole gateway in one process: two apps, and what runs beside them (`Gateway.background`)."""

    keys: KeyStore
    knowledge: Knowledge
    data: DataPlane
    control: ControlPlane
    stopping: asyncio.Event
    """Set when it should get no new requests, because it is to end."""

    @property
    def public(self) -> HotPath:
        return self.data.public

    @property
    def admin(self) -> ASGIApp:
        return self.control.admin

    @property
    def upstream(self) -> Upstream:
        return self.knowledge.upstream

    @property
    def registry(self) -> Registry:
        return self.control.registry

    @property
    def reloader(self) -> Reloader:
        return self.control.reloader

    @property
    def live(self) -> Live:
        return self.control.live

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Watches replicas and ends leases while the block runs."""
        try:
            async with self.data.background(), self.control.background(), self.keys.following():
                yield
        finally:
            await self.knowledge.aclose()
            await self.keys.aclose()


def build_gateway(settings: Settings, keys: KeyStore, source: SettingsSource | None = None) -> Gateway:
    """`Gateway.background` closes `keys`. `source`: where the settings came from, to read them again."""
    knowledge = build_knowledge(settings, Router(settings.routing.router_settings))
    data = build_data_plane(settings, knowledge, keys, None, Homes(), Quarantine())

    async def metrics(replicas: Sequence[ReplicaView]) -> bytes:
        data.endings.tell()
        in_flight, now = data.public.in_flight, time.monotonic()
        return await asyncio.to_thread(lambda: render(data.telemetry.families(in_flight), replicas, now))

    async def decisions() -> list[DecisionBody]:
        return data.decision_bodies()

    def rates() -> RequestRates:
        data.endings.tell()
        per_s, failed_per_s = data.rates.per_s(time.monotonic())
        return RequestRates(data.public.in_flight, len(data.admission), per_s, failed_per_s)

    def apply(new: Settings) -> None:
        knowledge.apply(new)
        data.apply(new)

    stopping = asyncio.Event()
    insight = Insight(
        metrics=metrics,
        decisions=decisions,
        unready=lambda: "The gateway is stopping." if stopping.is_set() else unready(knowledge.router),
        rates=rates,
    )
    control = build_control_plane(settings, knowledge, keys, insight, data.telemetry, source, apply)
    return Gateway(keys, knowledge, data, control, stopping)


async def run_gateway(settings: Settings, source: SettingsSource) -> None:
    """Serve in this one process until SIGINT or SIGTERM; SIGHUP reads the settings again.

    Raises OSError for a port in use, `KeyStoreError`.
    """
    raise_descriptor_limit()
    with (
        listening(settings.server.host, settings.server.port) as public_socket,
        listening(settings.admin.host, settings.admin.port) as admin_socket,
    ):
        gateway = build_gateway(settings, await open_key_store(settings), source)
        await first_keys(gateway.keys, is_open=settings.server.open)
        public = client_server(settings, gateway.data)
        admin = make_server(gateway.admin, Listener(descriptor_share=ADMIN_SHARE), 0.0)

        def stop() -> None:
            gateway.stopping.set()
            gateway.live.close()
            if public.is_stopping:
                admin.force_exit = True
            public.stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, gateway.reloader.ask)
        _log.info(
            "serving http://%s:%d/v1, admin http://%s:%d",
            *public_socket.getsockname()[:2],
            *admin_socket.getsockname()[:2],
        )
        spare_collections()
        keep_freed_memory()
        async with gateway.background():
            serving = asyncio.create_task(admin.serve([admin_socket]))
            try:
                await public.serve(public_socket)
            finally:
                admin.should_exit = True
                await serving


async def first_keys(keys: KeyStore, *, is_open: bool) -> None:
    """Where there are none at all, make them and show them, once."""
    wanted: dict[KeyKind, str] = {"admin": "admin key", "join": "join token for workers", "client": "client key"}
    if is_open:
        del wanted["client"]
    for kind, what in wanted.items():
        if (text := await keys.create_first(kind, name="first")) is not None:
            click.echo(f"{what} (shown this once): {text}")
