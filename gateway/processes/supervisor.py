"""Starts the data processes of a gateway, tells them what they must know, and starts one anew that dies.

It gets no clients itself: it has the keys, the leases, the admin API, and a router that hears what all processes do, so that
one look at it is a look at the gateway. Another process always stands by, with all its code loaded, and takes the place of one
that dies within a fraction of a second.

What must hold: what an admin's request changed is known to every process before that request is answered (`published`); a
process that dies takes nothing with it but its own requests, neither promises nor what was counted; every process that was
started here has ended when `run` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from msgspec.msgpack import Decoder
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admin.bodies import DecisionBody
from gateway.processes.bus import SUPERVISOR
from gateway.processes.channel import Channel, ChannelClosed, ChannelError
from gateway.processes.control import DECISIONS, FAMILIES, Start, encode
from gateway.processes.merged_metrics import MergedMetrics
from gateway.repeating import repeat

__all__ = ["Supervisor", "announcing"]

_log = logging.getLogger("warmpath.processes")

_START_S: Final = 30.0
_ANSWER_S: Final = 1.0
"""For what a data process answers without waiting for anything. It learns the rest when it is back."""
_POLL_S: Final = 2.0
"""What a process counted after the last time it was asked is lost with it."""
_HUNG_S: Final = 20.0
"""One that answers nothing for so long has no use for anybody."""
_PUBLISH_S: Final = 0.25
"""What changes by itself, such as a lease that ends, is told so late."""
_KILL_AFTER_S: Final = 5.0
"""More than the grace that running answers have."""
_SOON_S: Final = 5.0
"""A process that dies sooner after its start than this will most likely do so again:"""
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
_KEPT_DECISIONS: Final = 256

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Child:
    """A process that was started, whether it serves or stands by."""

    id: int
    """Among the gateway's processes, in order, and never given again. The supervisor itself is 0."""
    process: asyncio.subprocess.Process
    channel: Channel
    hearing: asyncio.Task[None]
    is_started: bool = False
    """False while it stands by."""
    serves: bool = False
    """Whether it takes connections."""
    unready: str = "A process starts."
    in_flight: int = 0
    """Requests that are answered there."""
    queued: int = 0
    """Those of them that wait for a replica."""
    answered_at: float = 0.0

    @property
    def name(self) -> str:
        return str(self.id)


class Supervisor:
    """`run` it; everything else may be called meanwhile."""

    def __init__(
        self,
        *,
        count: int,
        grace_s: float,
        log: tuple[str, str],
        start_of: Callable[[int, Sequence[int]], Start],
        state: Callable[[], Mapping[str, bytes]],
        on_processes: Callable[[Sequence[int]], None],
        asked: Callable[[int], Mapping[str, Callable[[bytes], bytes]]],
        on_gone: Callable[[int], None],
    ) -> None:
        """`log`: level and format. `start_of`: what the process of an id must know, given the ids of the others. `state`: what
        all must know, by topic; it is told whenever it changes. `on_processes` is called with the ids of those that serve, when
        they change, and `on_gone` once for each that ended. `asked`: what the process of an id may ask or
        tell, by topic.
        """
        self._count = count
        self._grace_s = grace_s
        self._log = log
        self._start_of = start_of
        self._state = state
        self._on_processes = on_processes
        self._asked = asked
        self._on_gone = on_gone
        self._serving: list[_Child] = []
        self._standby: asyncio.Task[_Child] | None = None
        self._last_id = 0
        self._told: Mapping[str, bytes] = {}
        self._publishing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._metrics = MergedMetrics()
        self._was_whole = False
        """Whether all processes served at once; from then on the rest serves while one starts anew."""

    # --- the processes

    async def run(self) -> None:
        """Until `stop`, and all processes have ended."""
        try:
            async with asyncio.TaskGroup() as group:
                slots = [group.create_task(self._keep_one()) for _ in range(self._count)]
                watching = [
                    group.create_task(repeat(self._poll, _POLL_S, _log, "looking after the processes")),
                    group.create_task(repeat(self.published, _PUBLISH_S, _log, "telling the processes")),
                ]
                await asyncio.wait(slots)
                for task in watching:
                    task.cancel()
        finally:
            await self._end_standby()

    def stop(self) -> None:
        """Let all end: they take no new connections, and give running answers their time. Asked again, they do not."""
        self._stopping.set()
        for child in self._serving:
            child.channel.post("stop", b"")

    async def _keep_one(self) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            began = time.monotonic()
            await self._serve_once()
            died_soon = time.monotonic() - began < _SOON_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S) if died_soon else 0.0

    async def _serve_once(self) -> None:
        """One process from its start to its end."""
        try:
            child = await self._take_standby()
        except OSError as error:
            _log.error("cannot start a process: %s", error.strerror)
            return
        ending = asyncio.create_task(self._wait_for_end(child))
        try:
            await self._start(child)
            await ending
        except ChannelError as error:
            if not self._stopping.is_set():
                _log.error("process %d does not start: %s", child.process.pid, error)
        finally:
            await self._end(child, ending)

    async def _start(self, child: _Child) -> None:
        """Raises `ChannelError`."""
        self._serving.append(child)
        self._tell_processes()
        start = self._start_of(child.id, self._ids())
        child.is_started = True  # what is said from now on comes after its start
        await child.channel.call("start", encode(start), _START_S)
        child.serves, child.answered_at = True, time.monotonic()
        if self._standby is None and not self._stopping.is_set():
            self._standby = asyncio.create_task(self._spawn())

    async def _wait_for_end(self, child: _Child) -> None:
        """It ends by itself; when it was told to and does not, or has closed its channel, it is made to."""
        ended = asyncio.create_task(child.process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping, child.hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                patience_s = _KILL_AFTER_S if child.hearing.done() else self._grace_s + _KILL_AFTER_S
                await asyncio.wait({ended}, timeout=patience_s)
        finally:
            stopping.cancel()
            with contextlib.suppress(ProcessLookupError):
                if not ended.done():
                    _log.error("process %d did not end", child.process.pid)
                    child.process.kill()
            await ended

    async def _end(self, child: _Child, ending: asyncio.Task[None]) -> None:
        """However it came to this, nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            if not ending.done():
                child.process.kill()
        await ending
        if not self._stopping.is_set():
            _log.error("process %d ended with %s", child.process.pid, child.process.returncode)
        child.channel.close()
        await child.hearing
        self._serving.remove(child)
        self._metrics.ended(child.name)
        self._on_gone(child.id)
        self._tell_processes()

    def _tell_processes(self) -> None:
        ids = self._ids()
        self._on_processes(ids)
        for child in self._serving:
            if child.is_started:
                child.channel.post("peers", encode(ids))

    def _ids(self) -> list[int]:
        return [SUPERVISOR, *(child.id for child in self._serving)]

    # --- one that stands by

    async def _take_standby(self) -> _Child:
        """Raises OSError."""
        standby, self._standby = self._standby, None
        if standby is not None:
            child = await standby
            if child.process.returncode is None and not child.hearing.done():
                return child
            await self._reap(child)
        return await self._spawn()

    async def _end_standby(self) -> None:
        if self._standby is not None:
            with contextlib.suppress(OSError):
                await self._reap(await self._standby)

    async def _reap(self, child: _Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()
        child.channel.close()
        await child.hearing

    async def _spawn(self) -> _Child:
        """A process that loads its code and waits. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "gateway.processes", str(theirs.fileno()), *self._log),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        number = self._last_id = self._last_id + 1
        asked = self._asked(number)
        channel = await Channel.over(
            ours,
            answers=asked,
            hears={
                **asked,
                "unready": lambda reason: setattr(child, "unready", reason.decode()),
                "in_flight": lambda number: setattr(child, "in_flight", int(number)),
                "queued": lambda number: setattr(child, "queued", int(number)),
            },
        )
        child = _Child(number, process, channel, asyncio.create_task(channel.run()))
        return child

    # --- what all must know

    async def published(self) -> None:
        """All processes know what is so now; one that does not answer in time learns it when it does."""
        async with self._publishing:
            state = self._state()
            changed = {topic: data for topic, data in state.items() if self._told.get(topic) != data}
            if not changed:
                return
            self._told = state
            for child in self._serving:
                if child.is_started and not child.serves:
                    for topic, data in changed.items():
                        child.channel.post(topic, data)
            await self._ask_all(changed)

    async def _ask_all(self, questions: Mapping[str, bytes]) -> list[tuple[_Child, bytes]]:
        """The answers of those that give one in time."""
        asked = [(child, topic, data) for child in self._serving if child.serves for topic, data in questions.items()]
        results = await asyncio.gather(
            *(child.channel.call(topic, data, _ANSWER_S) for child, topic, data in asked), return_exceptions=True
        )
        answers: list[tuple[_Child, bytes]] = []
        for (child, topic, _), result in zip(asked, results, strict=True):
            if isinstance(result, bytes):
                child.answered_at = time.monotonic()
                answers.append((child, result))
            elif isinstance(result, ChannelClosed):
                pass  # whoever waits for its end says so
            elif isinstance(result, ChannelError):
                _log.warning("process %d: %s: %s", child.process.pid, topic, result)
            else:
                raise result
        return answers

    async def _poll(self) -> None:
        """So that what a process counted is not lost with it; and one that hangs is found."""
        await self.take_metrics()
        for child in self._serving:
            if child.serves and child.answered_at + _HUNG_S <= time.monotonic():
                _log.error("process %d answers nothing any more", child.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()

    # --- what is to be seen

    def unready(self) -> str | None:
        """Why clients should wait; None when every process that takes connections can answer."""
        if self._stopping.is_set():
            return "The gateway is stopping."
        serving = [child for child in self._serving if child.serves]
        self._was_whole |= len(serving) == self._count
        if not serving or not self._was_whole:
            return "The processes start."
        return next((child.unready for child in serving if child.unready), None)

    def in_flight(self) -> int:
        """Requests that are answered, of all processes."""
        return sum(child.in_flight for child in self._serving)

    def queued(self) -> int:
        """Requests that wait for a replica, of all processes."""
        return sum(child.queued for child in self._serving)

    async def take_metrics(self) -> MergedMetrics:
        """What all processes have counted until now."""
        for child, families in self._decoded(FAMILIES, await self._ask_all({"metrics": b""})):
            if child in self._serving:
                self._metrics.take(child.name, families)
        return self._metrics

    async def decisions(self) -> list[DecisionBody]:
        """The last ones, of all processes."""
        told = self._decoded(DECISIONS, await self._ask_all({"decisions": b""}))
        found = [body for _, bodies in told for body in bodies]
        return sorted(found, key=lambda body: body.time)[-_KEPT_DECISIONS:]

    def _decoded(self, decoder: Decoder[T], answers: Iterable[tuple[_Child, bytes]]) -> Iterator[tuple[_Child, T]]:
        """Those that can be read: what one process says wrongly hides nothing of what the others say."""
        for child, answer in answers:
            try:
                yield child, decoder.decode(answer)
            except msgspec.MsgspecError as error:
                _log.error("what process %d answers cannot be read: %s", child.process.pid, error)


def announcing(app: ASGIApp, supervisor: Supervisor) -> ASGIApp:
    """The same app, whose answers to what may have changed something go out after all processes know of it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_later(message: Message) -> None:
            if message["type"] == "http.response.start":
                await supervisor.published()
            await send(message)

        changes = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD") and not _is_beat(scope["path"])
        await app(scope, receive, send_later if changes else send)

    return call


def _is_beat(path: str) -> bool:
    """It changes nothing that another process knows, and comes from every replica, every few seconds."""
    return path.endswith(("/heartbeat", "/explain"))
