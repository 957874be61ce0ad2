"""Replicas that compute nothing: OpenAI's shapes from memory, so that what a gateway costs is all that is left.

    python -m loadtest.stub --ports 9001,9002 --chunks 100 --gap-ms 10

A body with ``"stream":true`` gets `chunks` events, one every `gap-ms`, whose texts are their numbers, so that a reader sees
what was lost or came twice; any other a whole answer at once. With `fail` and `cut`, a share of the requests is answered with
500, or with a connection that breaks: of streams half before the answer, half in the middle.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import click
import uvloop

__all__ = ["MODEL"]

MODEL: Final = "stub"

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM: Final = re.compile(rb'"stream": ?true')
_USAGE: Final = {
    "prompt_tokens": 300,
    "completion_tokens": 8,
    "total_tokens": 308,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def _whole(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def _chunk(delta: dict[str, str], reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return _event({"choices": [choice]})


def _event(fields: dict[str, Any]) -> bytes:
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, **fields}
    return _framed(b"data: %b\n\n" % json.dumps(body, separators=(",", ":")).encode())


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_MESSAGE: Final = {"role": "assistant", "content": "The sea is old and the sky is new."}
_ANSWER: Final = _whole(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
)
_MODELS: Final = _whole(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "stub"}]}
)
_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FAILED: Final = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\noops"
_END: Final = b"".join(
    (_chunk({}, "stop"), _event({"choices": [], "usage": _USAGE}), _framed(b"data: [DONE]\n\n"), b"0\r\n\r\n")
)


@dataclass(frozen=True, slots=True)
class _Manner:
    """How all replicas of a process answer."""

    chunks: Sequence[bytes]
    gap_s: float
    fail: float
    cut: float
    draw: Callable[[], float]


class _Replica(asyncio.Protocol):
    """Requests one after the other, as gateways send them."""

    def __init__(self, manner: _Manner) -> None:
        self._manner = manner
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._sent = 0
        self._end = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(received, 0, end + 2)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(received) < size:
            return
        head, body = bytes(received[:end]), bytes(received[end + 4 : size])
        del received[:size]
        if head.startswith(b"GET"):
            self._transport.write(_MODELS)
        else:
            self._answer(is_stream=_STREAM.search(body) is not None)

    def _answer(self, *, is_stream: bool) -> None:
        manner = self._manner
        chance = manner.draw() if manner.fail or manner.cut else 1.0
        if chance < manner.fail:
            self._transport.write(_FAILED)
        elif chance < manner.fail + manner.cut / (2 if is_stream else 1):
            self._transport.abort()
        elif is_stream:
            is_cut = chance < manner.fail + manner.cut
            self._sent, self._end = 1, len(manner.chunks) // 2 if is_cut else len(manner.chunks)
            self._transport.write(_STREAM_HEAD + manner.chunks[0])
            self._timer = self._loop.call_later(manner.gap_s, self._next)
        else:
            self._transport.write(_ANSWER)

    def _next(self) -> None:
        """One timer a chunk, since a task that sleeps takes twice as long."""
        manner = self._manner
        if self._sent < self._end:
            self._transport.write(manner.chunks[self._sent])
            self._sent += 1
            self._timer = self._loop.call_later(manner.gap_s, self._next)
        elif self._end < len(manner.chunks):
            self._transport.abort()
        else:
            self._transport.write(_END)


async def _serve(ports: Sequence[int], manner: _Manner) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: _Replica(manner), "127.0.0.1", port, backlog=2048)
    await asyncio.Event().wait()


@click.command()
@click.option("--ports", required=True, help="Separated by commas.")
@click.option("--chunks", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--gap-ms", type=click.FloatRange(min=0), default=10.0, show_default=True)
@click.option("--fail", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Share answered with 500.")
@click.option(
    "--cut", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Share whose connection breaks."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of which ones.")
def main(ports: str, chunks: int, gap_ms: float, fail: float, cut: float, seed: int) -> None:
    """Serve on loopback until ended."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    manner = _Manner(
        chunks=[_chunk({"content": f" {number}"}, None) for number in range(chunks)],
        gap_s=gap_ms / 1000,
        fail=fail,
        cut=cut,
        draw=random.Random(seed).random,
    )
    uvloop.run(_serve([int(port) for port in ports.split(",")], manner))


if __name__ == "__main__":
    main()
