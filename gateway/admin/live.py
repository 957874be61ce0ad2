"""The fleet as it changes, for a dashboard: one full state, then what differs, as server-sent events.

    event: state     everything (`StateEvent`)
    event: change    replicas that differ from before, whole, ids of those that left, and the rates (`ChangeEvent`)
    : ping           a comment now and then, for proxies that cut what is silent

What must hold: however many watch, the state is made and encoded once a tick, and not at all while nobody does. A client
holds a bounded number of events, shared with the others; one that does not take them is cut, and begins anew with a full
state. All streams end when the gateway is to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admin.bodies import ChangeEvent, ReplicaBody, RequestRates, StateEvent
from gateway.api_error import ApiError
from gateway.repeating import repeat
from gateway.server.asgi import AsgiExchange
from gateway.server.exchange import ClientGone, Header
from gateway.server.headers import request_id
from gateway.server.reply import Reply, while_connected

__all__ = ["EventStream", "Live", "RateMeter", "ServerSentEvents"]

_log = logging.getLogger("warmpath.live")

_TICK_S: Final = 0.2
"""Five times a second is as often as a person sees a difference."""
_PING_S: Final = 10.0
_MAX_STREAMS: Final = 64
_MAX_WAITING: Final = 32
"""Events that a client may be behind: six seconds' worth."""
_STALL_S: Final = 5.0
"""How long one event may take to be taken."""
_WINDOW_S: Final = 10
_HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class RateMeter:
    """How many requests ended lately, in a slot for each second: counting costs the same at any rate. Pure."""

    def __init__(self) -> None:
        self._slots = [(0, 0, 0)] * _WINDOW_S  # second, requests, of those failed
        self.requests = 0
        """All there ever were, as `failures`."""
        self.failures = 0

    def add(self, new_requests: int, new_failures: int, now: float) -> None:
        """So many that have ended about now, and how many of them failed."""
        self.requests += new_requests
        self.failures += new_failures
        second = int(now)
        at, requests, failures = self._slots[second % _WINDOW_S]
        if at != second:
            requests = failures = 0
        self._slots[second % _WINDOW_S] = (second, requests + new_requests, failures + new_failures)

    def per_s(self, now: float) -> tuple[float, float]:
        """Requests and failures a second. The second that has begun is left out until it is over."""
        second, over = int(now), _WINDOW_S - 1
        whole = [slot for slot in self._slots if second - over <= slot[0] < second]
        return sum(slot[1] for slot in whole) / over, sum(slot[2] for slot in whole) / over


class EventStream:
    """What one client has yet to take."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_WAITING + 1)
        self.is_behind = False

    def offer(self, event: bytes) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            self.is_behind = True
            self.end()
        else:
            self._waiting.put_nowait(event)

    def end(self) -> None:
        """After what waits."""
        with contextlib.suppress(asyncio.QueueFull):  # it has been ended before
            self._waiting.put_nowait(None)

    async def take(self) -> bytes | None:
        """The next event, or a comment; None at the end."""
        try:
            async with asyncio.timeout(_PING_S):
                return await self._waiting.get()
        except TimeoutError:
            return b": ping\n\n"


class Live:
    """Whoever watches, and the one task that tells them; it runs while there are any."""

    def __init__(
        self,
        read: Callable[[], tuple[Sequence[ReplicaBody], RequestRates]],
        unix_time: Callable[[], float],
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        """`read`: how everything is now."""
        self._read = read
        self._unix_time = unix_time
        self._tick_s = tick_s
        self._streams: set[EventStream] = set()
        self._known: dict[str, ReplicaBody] = {}
        self._rates: RequestRates | None = None
        self._telling: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._streams)

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[EventStream]:
        """Raises `ApiError` 503 when too many watch, or the gateway is about to stop."""
        if self._closed or len(self._streams) >= _MAX_STREAMS:
            raise ApiError(503, "too_many_streams", "Nobody more can watch now.", retry_after_s=5.0)
        stream = EventStream()
        if not self._streams:
            self._take_in(*self._read())
            telling = repeat(self._tell, self._tick_s, _log, "telling the live state")
            self._telling = asyncio.create_task(telling, name="live state")
        self._streams.add(stream)
        try:
            state = StateEvent(time=self._unix_time(), replicas=list(self._known.values()), requests=self._rates_now())
            stream.offer(_event("state", state))
            yield stream
        finally:
            self._streams.discard(stream)
            if not self._streams and self._telling is not None:
                self._telling.cancel()
                self._telling = None

    def close(self) -> None:
        """End every stream; nobody may watch from now on."""
        self._closed = True
        for stream in self._streams:
            stream.end()

    async def _tell(self) -> None:
        event = self._change()
        if event is not None:
            for stream in self._streams:
                stream.offer(event)

    def _change(self) -> bytes | None:
        before, rates_before = self._known, self._rates
        self._take_in(*self._read())
        changed = [replica for replica in self._known.values() if before.get(replica.id) != replica]
        left = sorted(before.keys() - self._known.keys())
        if not changed and not left and self._rates == rates_before:
            return None
        change = ChangeEvent(time=self._unix_time(), replicas=changed, left=left, requests=self._rates_now())
        return _event("change", change)

    def _take_in(self, replicas: Sequence[ReplicaBody], rates: RequestRates) -> None:
        self._known = {replica.id: replica for replica in replicas}
        self._rates = rates

    def _rates_now(self) -> RequestRates:
        assert self._rates is not None
        return self._rates


class ServerSentEvents(Response):
    """The answer that carries a stream, for as long as its client takes it."""

    media_type = "text/event-stream"

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, receive, send)
        reply = Reply(exchange, request_id(scope))
        with contextlib.suppress(ClientGone):  # how most streams end
            async with self._live.watch() as stream:
                with while_connected(exchange, reply):
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    if scope["method"] == "HEAD":
                        stream.end()
                    await self._pass_on(stream, reply)

    async def _pass_on(self, stream: EventStream, reply: Reply) -> None:
        while (event := await stream.take()) is not None:
            try:
                async with asyncio.timeout(_STALL_S):
                    await reply.chunk(event)
            except TimeoutError:
                stream.is_behind = True
                break
        if stream.is_behind:
            _log.warning("one who watched the live state did not take it, and was cut")
            return  # without an end, the server breaks the connection
        await reply.end()


def _event(name: str, body: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(body))
