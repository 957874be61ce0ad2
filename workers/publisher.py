"""Carries the engine's reports to whoever listens: changes and the load frame after them together, at most 20 times a second.
Each time wakes every listener, which is most of what events cost a gateway.

It owns the listeners' queues and one timer, and decides nothing about content (`workers.events`) or HTTP
(`workers.server`). Frames are encoded once, however many listen.

What must hold: a listener gets every batch after the point it asked for, in order and without a gap, or its stream ends.
One that does not read is cut; it comes back and catches up from the ring or by a snapshot.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from router.wire import Hello, encode_frame
from workers.events import LOAD_MAX_INTERVAL_S, LOAD_MIN_INTERVAL_S, EventLog, LoadThrottle, snapshot_batches
from workers.protocol import StepReport

__all__ = ["Listener", "Publisher"]

MAX_BACKLOG_BYTES: Final = 4 << 20
"""What one listener may leave unread, on top of what its socket holds: minutes of a busy replica."""
_MAX_UNSENT_BYTES: Final = 64 << 10
"""So much is sent at once: listeners take it in by turns, and a large turn holds others up."""


class Listener:
    """The queue of one event stream."""

    def __init__(self, frames: Iterable[bytes]) -> None:
        self._frames = deque(frames)
        self._bytes = 0
        self._filled = asyncio.Event()
        self._closed = False

    def push(self, frame: bytes) -> bool:
        """False: the listener has fallen too far behind and is closed."""
        if self._bytes + len(frame) > MAX_BACKLOG_BYTES:
            self.close()
            return False
        self._frames.append(frame)
        self._bytes += len(frame)
        self._filled.set()
        return True

    def close(self) -> None:
        """Drop what is unread: a stream with a hole in it is worth less than its end."""
        self._closed = True
        self._frames.clear()
        self._filled.set()

    async def read(self) -> bytes | None:
        """All frames that are there, at least one; None when the stream is over."""
        if not self._frames and not self._closed:
            self._filled.clear()
            await self._filled.wait()
        if self._closed:
            return None
        data = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        return data


class Publisher:
    def __init__(self, hello: Callable[[int], Hello], first: StepReport, is_healthy: Callable[[], bool]) -> None:
        """`hello` makes the greeting for a seq; `first` stands in until the engine has reported."""
        self._hello = hello
        self._is_healthy = is_healthy
        self._log = EventLog()
        self._throttle = LoadThrottle(first)
        self._listeners: set[Listener] = set()
        self._unsent: list[bytes] = []  # batches, for those who listen already
        self._unsent_bytes = 0
        self._sent_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False
        self.on_leave: Callable[[], None] | None = None
        """Called when a listener has left, as a gateway does that restarts."""

    def report(self, report: StepReport) -> None:
        """Every step of the engine passes here."""
        if self.closed:
            return
        for batch in self._log.append(report, time.time()):
            self._unsent.append(batch)
            self._unsent_bytes += len(batch)
        self._throttle.note(report)
        self._send_when_due()

    def listen(self, epoch: str, after: int) -> Listener | None:
        """A listener that first gets the greeting and all after `after`; None when that is no longer to be had.

        With an `epoch` other than ours `after` counts for nothing: the listener starts at the beginning.
        """
        hello = self._hello(self._log.seq)
        replay = self._log.replay(after if epoch in ("", hello.epoch) else 0)
        if replay is None or self.closed:
            return None
        self._send_batches()  # or they would come to this one a second time
        load = self._throttle.peek(seq=self._log.seq, ts=time.time())
        listener = Listener([encode_frame(hello), *replay, encode_frame(load)])
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if self.on_leave is not None and not self.closed:
            self.on_leave()

    async def snapshot(self) -> AsyncIterator[bytes]:
        """The whole cache as frames, true for the seq it names, whatever the engine does meanwhile.

        Only the copy of the mirror is made at one stroke (about 20 ns a block); the encoding of each batch is short.
        """
        seq, ts = self._log.seq, time.time()
        load = self._throttle.peek(seq=seq, ts=ts)
        links = self._log.mirror.links()
        yield encode_frame(self._hello(seq))
        for batch in snapshot_batches(links, seq, ts):
            yield encode_frame(batch)
            await asyncio.sleep(0)
        yield encode_frame(load)

    def close(self) -> None:
        """End every stream and take nothing more."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for listener in self._listeners:
            listener.close()

    def _broadcast(self, frame: bytes) -> None:
        behind = [listener for listener in self._listeners if not listener.push(frame)]
        self._listeners.difference_update(behind)

    def _send_batches(self) -> None:
        for batch in self._unsent:
            self._broadcast(batch)
        self._unsent.clear()
        self._unsent_bytes = 0

    def _send_when_due(self) -> None:
        """Send now, or set the timer for when it is due. A silent engine sends no load: that is how its death shows."""
        if self._timer is not None:
            self._timer.cancel()
        now, is_healthy = time.monotonic(), self._is_healthy()
        if now >= self._due_at(is_healthy) or self._unsent_bytes > _MAX_UNSENT_BYTES:
            self._sent_at = now
            self._send_batches()
            if is_healthy and (self._throttle.changed or now >= self._throttle.due_at()):
                self._broadcast(encode_frame(self._throttle.take(seq=self._log.seq, now=now, ts=time.time())))
        wait_s = min(self._due_at(is_healthy) - now, LOAD_MAX_INTERVAL_S)
        self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._send_when_due)

    def _due_at(self, is_healthy: bool) -> float:
        soon = self._sent_at + LOAD_MIN_INTERVAL_S
        if self._unsent:
            return soon
        return max(self._throttle.due_at(), soon) if is_healthy else math.inf
