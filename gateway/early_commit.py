"""A stream that waits long for its first token: it is committed early and kept alive with comments."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gateway.server.exchange import Header
from gateway.server.reply import Reply

__all__ = ["STREAM_HEADERS", "EarlyCommit"]

STREAM_HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EarlyCommit:
    """For as long as a stream waits for its first token: after a while its status line goes out, then a comment now and then.

    Proxies and clients give up on a connection that is silent for a minute or so, and a long prompt in a long queue takes more.
    """

    def __init__(self, reply: Reply, commit_after_s: float, ping_s: float) -> None:
        self._reply = reply
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self._pinging: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(commit_after_s, self._begin)  # most streams begin sooner: no task for those

    def end(self) -> None:
        self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

    def _begin(self) -> None:
        self._pinging = self._loop.create_task(self._ping())

    async def _ping(self) -> None:
        """Whoever answers meets a fault of the client's connection at its own next write, and tells of it."""
        with contextlib.suppress(Exception):
            await self._reply.start(200, STREAM_HEADERS)
            while True:
                await self._reply.chunk(b": ping\n\n")
                await asyncio.sleep(self._ping_s)
