"""A stream that has begun, on its way from replica to client.

Where transport and server are our own, a piece goes from one socket to the other inside the callback that brought it, and no
task wakes up for it: that is most of what a piece costs. A client that does not keep up, or a server or a transport of
another make, gets its pieces through the task, one after the other, so that whoever is slow slows the replica down.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.server.reply import Reply
from gateway.sse import EventRelay
from gateway.upstream.contract import UpstreamResponse

__all__ = ["Forwarding"]


class Forwarding:
    __slots__ = ("_clock", "_model", "_on_gap", "_relay", "_reply", "_unsent", "last_at")

    def __init__(
        self,
        relay: EventRelay,
        reply: Reply,
        model: str,
        clock: Callable[[], float],
        on_gap: Callable[[str, float], None],
    ) -> None:
        """Made when the stream's first output is here, at `last_at`. `on_gap`: see `gateway.dispatch.Dispatcher`."""
        self._relay = relay
        self._reply = reply
        self._model = model
        self._clock = clock
        self._on_gap = on_gap
        self._unsent = b""
        self.last_at = clock()

    async def run(self, response: UpstreamResponse) -> None:
        """Until the relay is done or the replica's body is over. Raises `UpstreamError`."""
        while not self._relay.done:
            await response.forward(self._take)
            data, self._unsent = self._unsent or self._last_output(), b""
            if not data:
                return
            await self._reply.chunk(data)

    def _take(self, piece: bytes) -> bool:
        """Whether more is wanted without the task's waiting for anything."""
        data = self._relay.feed(piece)
        if data:
            self._note_gap()
            if not self._reply.try_chunk(data):
                self._unsent = data
                return False
        return not self._relay.done

    def _last_output(self) -> bytes:
        """When nothing more comes from the replica or nothing more is wanted."""
        data = b"" if self._relay.done else self._relay.flush()
        if data:
            self._note_gap()
        return data

    def _note_gap(self) -> None:
        now = self._clock()
        self._on_gap(self._model, now - self.last_at)
        self.last_at = now
