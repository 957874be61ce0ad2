"""Sends requests when they are due, whether or not earlier ones were answered, as users do.

Every time is counted from the moment that a request was due, not from when it was sent: a client that falls behind would
otherwise hide just the waits that matter. How far it fell behind is in each answer, for the report to judge.

One connection a request, HTTP/1.1 by hand: a general client takes more CPU for a stream than the gateway that it measures.
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from loadtest.workloads import Request

__all__ = ["Answer", "answer_lags", "send_all"]

_CACHED: Final = re.compile(rb'"cached_tokens": ?(\d+)')
_COMPLETION: Final = re.compile(rb'"completion_tokens": ?(\d+)')
_USAGE_BYTES: Final = 4096
"""Of a stream's end: more than its usage event takes, whole, so that chunk borders can be cut out."""
_CHUNK_BORDER: Final = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")


@dataclass(slots=True)
class Answer:
    """Real seconds after the request was due."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


async def send_all(
    port: int, model: str, requests: Sequence[Request], speedup: float, timeout_s: float
) -> list[Answer]:
    """One answer for each request. None takes more than `timeout_s`."""
    payloads = [_payload(model, request) for request in requests]
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Task[Answer]] = []
    gc.collect()
    gc.freeze()  # a collection over all those prompts would be a lag of its own
    start = time.monotonic() + 0.1
    try:
        for request, payload in zip(requests, payloads, strict=True):
            due = start + request.at_s / speedup
            if (wait_s := due - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            answers.append(loop.create_task(_send(port, payload, due, timeout_s)))
        return await asyncio.gather(*answers)
    finally:
        for task in answers:
            task.cancel()
        gc.unfreeze()


def _payload(model: str, request: Request) -> bytes:
    body = msgspec.json.encode(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _send(port: int, payload: bytes, due: float, timeout_s: float) -> Answer:
    answer = Answer(sent_s=time.monotonic() - due)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(payload)
                await _receive(reader, answer, due)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        answer.error = type(error).__name__
    return answer


async def _receive(reader: asyncio.StreamReader, answer: Answer, due: float) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode()
    tail = b""
    while data := await reader.read(1 << 16):
        now = time.monotonic() - due
        tail = (tail + data)[-_USAGE_BYTES:]
        if not answer.first_s and b"data:" in tail:
            answer.first_s = now
        answer.last_s = now
    tail = _CHUNK_BORDER.sub(b"", tail)
    cached, completion = _CACHED.search(tail), _COMPLETION.search(tail)
    if status != "200":
        answer.error = status
    elif b"[DONE]" not in tail or completion is None:
        answer.error = "cut"
    else:
        answer.cached_tokens = int(cached[1]) if cached else 0
        answer.completion_tokens = int(completion[1])


async def answer_lags(port: int, path: str, every_s: float, lags: list[float]) -> None:
    """Ask for something that costs nothing, for ever, and note how long each answer took: how late that loop is."""
    asked = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode()
    while True:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(asked)
            await reader.readuntil(b"\r\n")
        finally:
            writer.close()
        lags.append(time.monotonic() - began)
        await asyncio.sleep(every_s)
