"""What runs in the supervisor: keys, leases, admin API, the ledger of limits, and a router that hears what all processes do."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gateway.admin.bodies import RequestRates
from gateway.admin.context import Insight
from gateway.admin.live import RateMeter
from gateway.app import first_keys
from gateway.keys import KeyStore
from gateway.keys.opening import open_key_store
from gateway.limits import Ledger, LedgerServer
from gateway.memory import spare_collections
from gateway.planes.control import build_control_plane
from gateway.planes.knowledge import build_knowledge, unready
from gateway.processes.bus import SUPERVISOR, Bus
from gateway.processes.control import ENDED, Ended, Start, encode, settings_bytes
from gateway.processes.members import members_of
from gateway.processes.merged_metrics import families_of
from gateway.processes.messages import Batch, Message
from gateway.processes.shared_router import SharedRouter
from gateway.processes.supervisor import Supervisor, announcing
from gateway.reloader import SettingsSource
from gateway.server.listener import ADMIN_SHARE, Listener, raise_descriptor_limit
from gateway.serving import bound, listening, make_server
from gateway.settings import Settings
from gateway.telemetry import Telemetry, render
from router import ReplicaView, Trust

__all__ = ["counting", "run_supervisor"]

_log = logging.getLogger("warmpath.gateway")


async def run_supervisor(settings: Settings, source: SettingsSource, log_level: str) -> None:
    """Serve by several processes until SIGINT or SIGTERM; SIGHUP reads the settings again.

    Raises OSError for a port in use, `KeyStoreError`."""
    raise_descriptor_limit()
    with (
        bound(settings.server.host, settings.server.port) as port,
        listening(settings.admin.host, settings.admin.port) as admin_socket,
        tempfile.TemporaryDirectory(prefix="warmpath-") as bus_folder,  # only this user may enter it
    ):
        keys = await open_key_store(settings)
        await first_keys(keys, is_open=settings.server.open)
        _log.info(
            "serving http://%s:%d/v1 by %d processes, admin http://%s:%d",
            settings.server.host,
            port,
            settings.server.processes,
            *admin_socket.getsockname()[:2],
        )
        await _Supervising(settings, source, keys, port, bus_folder, log_level).run(admin_socket)


class _Supervising:
    def __init__(
        self,
        settings: Settings,
        source: SettingsSource,
        keys: KeyStore,
        port: int,
        bus_folder: str,
        log_level: str,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._port = port
        self._bus_folder = bus_folder
        self._clock = time.monotonic
        self._bus = bus = Bus(
            Path(bus_folder),
            SUPERVISOR,
            hear=self._hear,
            what_is_open=lambda: self._router.what_is_open(),
            open_numbers=self._tell_open,
        )
        self._router = SharedRouter(settings.routing.router_settings, bus.post, bus.post_now, bus.catch_up)
        self._knowledge = build_knowledge(settings, self._router)
        self._ledger = ledger = LedgerServer(Ledger(), self._clock, time.time)
        self._telemetry = Telemetry()
        self._meter = RateMeter()
        self._supervisor = Supervisor(
            count=settings.server.processes,
            grace_s=settings.server.drain_s + settings.server.grace_s,
            log=(log_level, settings.log.format),
            start_of=self._start_of,
            state=self._state,
            on_processes=self._on_processes,
            asked=lambda process: {
                "ledger": lambda message: ledger.handle(str(process), message),
                "ended": counting(self._meter, self._clock),
            },
            on_gone=lambda process: ledger.forget(str(process)),
        )
        insight = Insight(
            metrics=self._metrics,
            decisions=self._supervisor.decisions,
            unready=lambda: unready(self._router) or self._supervisor.unready(),
            rates=self._rates,
        )
        self._control = build_control_plane(
            settings, self._knowledge, keys, insight, self._telemetry, source, self._knowledge.apply
        )

    async def run(self, admin_socket: socket.socket) -> None:
        admin = make_server(
            announcing(self._control.admin, self._supervisor), Listener(descriptor_share=ADMIN_SHARE), grace_s=0.0
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._supervisor.stop)
        loop.add_signal_handler(signal.SIGHUP, self._control.reloader.ask)
        spare_collections()
        self._bus.start()
        try:
            async with self._control.background(), self._keys.following():
                serving = asyncio.create_task(admin.serve([admin_socket]))
                try:
                    await self._supervisor.run()
                finally:
                    self._control.live.close()
                    admin.should_exit = True
                    await serving
        finally:
            await self._knowledge.aclose()
            await self._keys.aclose()
            self._bus.close()

    # --- what the processes are told

    def _start_of(self, process: int, peers: Sequence[int]) -> Start:
        views = self._router.replicas()
        return Start(
            process=process,
            settings=settings_bytes(self._control.reloader.settings),
            host=self._settings.server.host,
            port=self._port,
            bus_folder=self._bus_folder,
            peers=list(peers),
            keys=self._keys.ring.encode(),
            members=members_of(self._control.registry, self._router),
            healthy=[view.id for view in views if view.healthy],
            exact=[view.id for view in views if view.trust is Trust.EXACT],
        )

    def _state(self) -> Mapping[str, bytes]:
        return {
            "keys": self._keys.ring.encode(),
            "settings": settings_bytes(self._control.reloader.settings),
            "members": encode(members_of(self._control.registry, self._router)),
        }

    def _on_processes(self, processes: Sequence[int]) -> None:
        self._router.set_processes(processes, self._clock())
        self._bus.set_peers(processes)

    # --- what they tell

    def _hear(self, batch: Batch) -> None:
        now = self._clock()
        for message in batch.messages:
            self._router.hear(batch.process, message, now)

    def _tell_open(self) -> list[Message]:
        self._router.drop_silent(self._clock())
        return self._router.open_numbers()

    def _rates(self) -> RequestRates:
        per_s = self._meter.per_s(self._clock())
        return RequestRates(self._supervisor.in_flight(), self._supervisor.queued(), *per_s)

    async def _metrics(self, replicas: Sequence[ReplicaView]) -> bytes:
        merged, now = await self._supervisor.take_metrics(), self._clock()
        merged.take("supervisor", families_of(self._telemetry.families(0)))
        return await asyncio.to_thread(lambda: render(merged.families(), replicas, now))


def counting(meter: RateMeter, clock: Callable[[], float]) -> Callable[[bytes], bytes]:
    """What hears one process's `Ended` from its start on, and counts what is new of it."""
    known = Ended()

    def hear(message: bytes) -> bytes:
        nonlocal known
        told = ENDED.decode(message)
        meter.add(told.requests - known.requests, told.failures - known.failures, clock())
        known = told
        return b""

    return hear
