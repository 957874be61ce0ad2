"""A replica with faults on request: an ASGI app around the real one, for simulated replicas only.

    PUT /simulate/faults {"faults": ["503:25%"]}    replaces them and counts anew; needs the replica's credential
    GET /simulate/faults                            what is set, and how often each has struck

To the replica inside, an answer that is cut or falls silent is a client that leaves: it releases what it held.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from starlette.types import Message, Receive, Scope, Send

from workers.access import Access
from workers.api_error import ApiError, decode_json, invalid_value
from workers.asgi import ClientGone, Header, Reply, read_json_body
from workers.faults import EVENTS_PATH, Fault, FaultPlan, parse_fault
from workers.faulty_events import FaultyEvents
from workers.server import ReplicaApp, new_request_id
from workers.simulated import SimulatedRunner

__all__ = ["CONTROL_PATH", "EXIT_CODE", "FaultyReplica"]

_log = logging.getLogger(__name__)

CONTROL_PATH: Final = "/simulate/faults"
EXIT_CODE: Final = 70
"""Of a process that died on request."""

_HTML: Final = b"<!doctype html><html><body><h1>It works!</h1></body></html>\n"
_HALF_JSON: Final = b'{"id": "cmpl-1", "choices": [{"index": 0, "te'
_LINE_PIECE: Final = b"data: " + b"x" * (64 << 10)


class _Faults(msgspec.Struct, forbid_unknown_fields=True):
    faults: list[str]


_decoder: Final = msgspec.json.Decoder(_Faults)


class FaultyReplica:
    def __init__(
        self,
        app: ReplicaApp,
        runner: SimulatedRunner,
        *,
        faults: Sequence[Fault],
        credential: str,
        seed: int = 0,
        die: Callable[[], None] = lambda: os._exit(EXIT_CODE),
    ) -> None:
        """`die` does not come back; it is called in the middle of a request."""
        self._app = app
        self._runner = runner
        self._access = Access(credential, on_loopback=False)
        self._seed = seed
        self._die = die
        self._set(faults)

    @property
    def epoch(self) -> str:
        return self._app.epoch

    def close_streams(self) -> None:
        self._app.close_streams()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == CONTROL_PATH:
            await self._control(scope, receive, Reply(send, new_request_id()))
            return
        fault = self._plan.of_request(scope["method"], scope["path"])
        if scope["path"] == EVENTS_PATH:
            await self._follow_events(fault, scope, receive, send)
        elif fault is None:
            await self._app(scope, receive, send)
        else:
            await self._spoil(fault, scope, receive, send)

    def _set(self, faults: Sequence[Fault]) -> None:
        self._plan = FaultPlan(faults, seed=self._seed)
        self._runner.slowdown = self._plan.slowdown

    async def _control(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        try:
            self._access.require_gateway(scope)
            if scope["method"] == "PUT":
                texts = decode_json(_decoder, await read_json_body(scope, receive)).faults
                try:
                    self._set([parse_fault(text) for text in texts])
                except ValueError as error:
                    raise invalid_value(str(error), "faults") from error
            elif scope["method"] != "GET":
                raise ApiError(405, "method_not_allowed", f"{CONTROL_PATH} takes GET and PUT.")
            await reply.json(200, self._told())
        except ApiError as error:
            await reply.error(error)
        except ClientGone:
            pass

    def _told(self) -> bytes:
        told = [
            {**msgspec.to_builtins(fault), "hits": hits}
            for fault, hits in zip(self._plan.faults, self._plan.hits, strict=True)
        ]
        return msgspec.json.encode({"faults": told})

    async def _follow_events(self, fault: Fault | None, scope: Scope, receive: Receive, send: Send) -> None:
        events = FaultyEvents(send, lambda: self._plan, restarted=fault is not None and fault.kind == "new-epoch")
        scope = events.greet(scope)
        if fault is None or fault.kind == "new-epoch":
            await self._app(scope, receive, events.send)
        else:
            await self._spoil(fault, scope, receive, events.send)

    async def _spoil(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        _log.info("%s %s: %s on request", scope["method"], scope["path"], fault.kind)
        pieces = int(fault.value or 0)
        match fault.kind:
            case "hang-after":
                await self._app(scope, receive, _after(pieces, send, lambda: _leave_hanging(receive)))
            case "cut-after":
                await self._app(scope, receive, _after(pieces, send, _cut))
            case "end-after":
                await self._app(scope, receive, _after(pieces, send, lambda: _end(send)))
            case "die-after":
                await self._app(scope, receive, _after(pieces, send, self._die_now))
            case "delay":
                await asyncio.sleep(fault.value or 0.0)
                await self._app(scope, receive, send)
            case "die":
                self._die()
            case _:
                await _answer_instead(fault, receive, send)

    async def _die_now(self) -> None:
        self._die()


async def _answer_instead(fault: Fault, receive: Receive, send: Send) -> None:
    """What the replica inside never hears of."""
    match fault.kind:
        case "hang":
            await _until_gone(receive)
        case "429" | "500" | "503":
            retry_after_s = None if fault.value is None else math.ceil(fault.value)
            error = ApiError(int(fault.kind), "simulated_fault", "Refused on request.", retry_after_s=retry_after_s)
            await Reply(send, new_request_id()).error(error)
        case "html":
            await _answer(send, b"text/html", _HTML)
        case "broken-json":
            await _answer(send, b"application/json", _HALF_JSON)
        case "short":
            await _begin(send, b"application/json", (b"content-length", b"%d" % (2 * len(_HALF_JSON))))
            await send({"type": "http.response.body", "body": _HALF_JSON, "more_body": True})
        case "endless-line":
            await _never_end_a_line(receive, send)
        case _:
            raise AssertionError(f"{fault.kind} spoils no request")


def _after(num_pieces: int, send: Send, then: Callable[[], Awaitable[None]]) -> Send:
    """A `send` that lets the head and so many pieces of the body pass."""
    left = num_pieces

    async def counted(message: Message) -> None:
        nonlocal left
        if message["type"] == "http.response.body":
            if not left:
                await then()
            left -= 1
        await send(message)

    return counted


async def _cut() -> None:
    raise ClientGone  # an answer without an end makes the server close the connection


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    raise ClientGone


async def _leave_hanging(receive: Receive) -> None:
    await _until_gone(receive)
    raise ClientGone


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(send: Send, content_type: bytes, *headers: Header) -> None:
    head = [(b"content-type", content_type), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": head})


async def _answer(send: Send, content_type: bytes, body: bytes) -> None:
    await _begin(send, content_type, (b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _never_end_a_line(receive: Receive, send: Send) -> None:
    """Ends when the client leaves: the server's own flow control slows it down to what is read."""
    await _begin(send, b"text/event-stream")
    gone = asyncio.create_task(_until_gone(receive))
    try:
        while not gone.done():
            await send({"type": "http.response.body", "body": _LINE_PIECE, "more_body": True})
            await asyncio.sleep(0)
    finally:
        gone.cancel()
