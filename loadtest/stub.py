"""Replicas that compute nothing: OpenAI's shapes from memory, so that what a gateway costs is all that is left.

    python -m loadtest.stub --ports 9001,9002 --chunks 100 --gap-ms 10

A body with ``"stream":true`` gets `chunks` events, one every `gap-ms`; any other a whole answer at once.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
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
_TEXT: Final = _chunk({"content": " sea"}, None)
_END: Final = b"".join(
    (_chunk({}, "stop"), _event({"choices": [], "usage": _USAGE}), _framed(b"data: [DONE]\n\n"), b"0\r\n\r\n")
)


class _Replica(asyncio.Protocol):
    """Requests one after the other, as gateways send them."""

    def __init__(self, chunks: int, gap_s: float) -> None:
        self._chunks = chunks
        self._gap_s = gap_s
        self._received = bytearray()
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

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
        elif _STREAM.search(body):
            self._streaming = asyncio.get_running_loop().create_task(self._stream())
        else:
            self._transport.write(_ANSWER)

    async def _stream(self) -> None:
        self._transport.write(_STREAM_HEAD + _TEXT)
        for _ in range(self._chunks - 1):
            await asyncio.sleep(self._gap_s)
            self._transport.write(_TEXT)
        self._transport.write(_END)


async def _serve(ports: Sequence[int], chunks: int, gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: _Replica(chunks, gap_s), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


@click.command()
@click.option("--ports", required=True, help="Separated by commas.")
@click.option("--chunks", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--gap-ms", type=click.FloatRange(min=0), default=10.0, show_default=True)
def main(ports: str, chunks: int, gap_ms: float) -> None:
    """Serve on loopback until ended."""
    uvloop.run(_serve([int(port) for port in ports.split(",")], chunks, gap_ms / 1000))


if __name__ == "__main__":
    main()
