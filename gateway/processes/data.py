"""A data process: `python -m gateway.processes FD`, started by a supervisor and told everything over the socket FD.

It imports what it needs, then waits to be started, so that one can stand by for another that dies. It takes connections when
it knows every replica that its supervisor knows to be well, and it ends when it is told to, or when its supervisor is gone:
running answers get their time in both cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import uvloop

from gateway.keys import KeyRing, RingHolder
from gateway.limits import RemoteLedger
from gateway.memory import keep_freed_memory, spare_collections
from gateway.planes.data import DataPlane, build_data_plane, client_server
from gateway.planes.knowledge import Knowledge, build_knowledge, unready
from gateway.processes.bus import Bus
from gateway.processes.channel import Channel, ChannelClosed
from gateway.processes.control import IDS, MEMBERS, Ended, Start, decode_start, encode, settings_of
from gateway.processes.members import Member, Membership
from gateway.processes.merged_metrics import families_of
from gateway.processes.messages import Batch, Crashed, HomeMade, Message
from gateway.processes.shared_memory import SharedHomes, SharedQuarantine
from gateway.processes.shared_router import SharedRouter
from gateway.server.listener import raise_descriptor_limit
from gateway.serving import configure_logging, listening
from router import Trust

__all__ = ["main"]

_log = logging.getLogger("warmpath.processes")

_WARM_S: Final = 2.0
"""How long a new process may take to find the replicas well that are. Longer, and somebody else must have a reason."""
_LEDGER_S: Final = 1.0
"""More than the limits wait themselves (`gateway.limits.link`)."""
_POLL_S: Final = 0.02
_NEWS_POLL_S: Final = 0.1


class _DataProcess:
    """What is there once `start` was called."""

    def __init__(self, start: Start, ledger: RemoteLedger) -> None:
        settings = settings_of(start.settings)
        clock = time.monotonic
        self._start = start
        self._clock = clock
        self._bus = bus = Bus(
            Path(start.bus_folder),
            start.process,
            hear=self._hear,
            what_is_open=lambda: self._router.what_is_open(),
            open_numbers=self._tell_open,
        )
        self._router = SharedRouter(settings.routing.router_settings, bus.post, bus.post_now, bus.catch_up)
        self._homes = SharedHomes(bus.post_now, bus.catch_up)
        self._quarantine = SharedQuarantine(bus.post_now)
        self._knowledge: Knowledge = build_knowledge(settings, self._router)
        self.keys = RingHolder(KeyRing.decode(start.keys))
        self.plane: DataPlane = build_data_plane(
            settings, self._knowledge, self.keys, ledger, self._homes, self._quarantine
        )
        self.plane.telemetry.register(
            "counter",
            "warmpath_bus_dropped_messages",
            "Messages that another process never got: it took nothing for too long.",
            (),
            lambda: {(): bus.dropped},
        )
        self._membership = Membership(self._router, self._knowledge.watcher, clock)
        self.server = client_server(settings, self.plane)
        self._listening = contextlib.ExitStack()

    def join(self) -> None:
        """The others and the replicas. Raises OSError."""
        self._bus.start()
        self.set_peers(self._start.peers)
        self.take_members(self._start.members)

    async def listen(self) -> socket.socket:
        """Once it knows what others know. Raises OSError."""
        await self._warm_up()
        spare_collections()
        keep_freed_memory()
        return self._listening.enter_context(listening(self._start.host, self._start.port, shared=True))

    async def serve(self, listener: socket.socket, tell: Callable[[str, bytes], None]) -> None:
        """Until the server was asked to stop, and running answers have ended or had their time.

        `tell`: the supervisor, by topic.
        """
        async with self.plane.background():
            telling = asyncio.create_task(self._tell_news(tell))
            try:
                await self.server.serve(listener)
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)

    async def aclose(self) -> None:
        self._listening.close()
        await self._knowledge.aclose()
        self._bus.close()

    def unready(self) -> str:
        return unready(self._router) or ""

    # --- what the supervisor says

    def take_members(self, members: Sequence[Member]) -> None:
        self._membership.take_over(members)

    def take_settings(self, data: bytes) -> None:
        settings = settings_of(data)
        self._knowledge.apply(settings)
        self.plane.apply(settings)

    def take_keys(self, data: bytes) -> None:
        self.keys.ring = KeyRing.decode(data)

    def set_peers(self, processes: Sequence[int]) -> None:
        self._router.set_processes(processes, self._clock())
        self._bus.set_peers(processes)

    async def metrics(self) -> bytes:
        self.plane.endings.tell()
        return await asyncio.to_thread(self._metrics)

    def _metrics(self) -> bytes:
        return encode(families_of(self.plane.telemetry.families(self.plane.public.in_flight)))

    def decisions(self) -> bytes:
        return encode(self.plane.decision_bodies())

    # --- what other processes say

    def _hear(self, batch: Batch) -> None:
        now = self._clock()
        for message in batch.messages:
            match message:
                case HomeMade():
                    self._homes.hear(message)
                case Crashed():
                    self._quarantine.hear(message)
                case _:
                    self._router.hear(batch.process, message, now)

    def _tell_open(self) -> list[Message]:
        self._router.drop_silent(self._clock())
        return self._router.open_numbers()

    # --- inside

    async def _warm_up(self) -> None:
        for _ in range(round(_WARM_S / _POLL_S)):
            if self._knows_all():
                return
            await asyncio.sleep(_POLL_S)

    def _knows_all(self) -> bool:
        views = self._router.replicas()
        healthy = {view.id for view in views if view.healthy}
        exact = {view.id for view in views if view.trust is Trust.EXACT}
        return healthy.issuperset(self._start.healthy) and exact.issuperset(self._start.exact)

    def _news(self) -> dict[str, bytes]:
        """By topic."""
        plane = self.plane
        plane.endings.tell()
        return {
            "unready": self.unready().encode(),
            "in_flight": b"%d" % plane.public.in_flight,
            "queued": b"%d" % len(plane.admission),
            "ended": encode(Ended(plane.rates.requests, plane.rates.failures)),
        }

    async def _tell_news(self, tell: Callable[[str, bytes], None]) -> None:
        told: dict[str, bytes] = {}
        while True:
            news = self._news()
            for topic, value in news.items():
                if told.get(topic) != value:
                    tell(topic, value)
            told = news
            await asyncio.sleep(_NEWS_POLL_S)


class _Host:
    """The process around it: what the supervisor can ask for before and after the start."""

    def __init__(self) -> None:
        self._process: _DataProcess | None = None
        self._is_asked_to_stop = False
        self._listener: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    async def run(self, end: socket.socket) -> None:
        """Until the supervisor says so, or is gone, or this process was told to end by a signal."""
        self._channel = await Channel.over(
            end,
            answers={
                "start": self._start,
                "members": self._take_members,
                "settings": self._take_settings,
                "keys": self._take_keys,
                "metrics": lambda _: self._started.metrics(),
                "decisions": lambda _: self._started.decisions(),
            },
            hears={
                "members": self._take_members,
                "settings": self._take_settings,
                "keys": self._take_keys,
                "peers": lambda data: self._started.set_peers(IDS.decode(data)),
                "stop": lambda _: self.stop(),
            },
        )
        hearing = asyncio.create_task(self._channel.run())
        hearing.add_done_callback(lambda _: self._supervisor_gone())
        try:
            await asyncio.wait({self._listener})
            if not self._listener.cancelled():
                await self._started.serve(self._listener.result(), self._channel.post)
        finally:
            if self._process is not None:
                await self._process.aclose()
            self._channel.close()
            await hearing

    def stop(self) -> None:
        """Asked again, it waits for no answer that still runs."""
        if self._process is not None:
            self._process.server.stop()
        self._listener.cancel()

    def _supervisor_gone(self) -> None:
        if self._process is None or not self._process.server.is_stopping:
            self.stop()

    @property
    def _started(self) -> _DataProcess:
        assert self._process is not None, "not started"
        return self._process

    def _start(self, payload: bytes) -> Awaitable[bytes]:
        """What can be done at once is done before the next frame is read."""
        ledger = RemoteLedger(lambda message: self._channel.call("ledger", message, _LEDGER_S), self._tell_ledger)
        self._process = _DataProcess(decode_start(payload), ledger)
        self._process.join()
        return self._listen(self._process)

    def _tell_ledger(self, message: bytes) -> None:
        """Raises OSError."""
        if self._channel.is_closed:
            raise ChannelClosed("the supervisor is gone")
        self._channel.post("ledger", message)

    async def _listen(self, process: _DataProcess) -> bytes:
        listener = await process.listen()
        if not self._listener.done():
            self._listener.set_result(listener)
        return b""

    def _take_members(self, data: bytes) -> bytes:
        self._started.take_members(MEMBERS.decode(data))
        return b""

    def _take_settings(self, data: bytes) -> bytes:
        self._started.take_settings(data)
        return b""

    def _take_keys(self, data: bytes) -> bytes:
        self._started.take_keys(data)
        return b""


async def _run(descriptor: int) -> None:
    raise_descriptor_limit()
    host = _Host()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, host.stop)
    await host.run(socket.socket(fileno=descriptor))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of a terminal; the supervisor decides
    descriptor, log_level, log_format = sys.argv[1:]
    configure_logging(log_level, log_format)
    uvloop.run(_run(int(descriptor)))
