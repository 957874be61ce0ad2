"""Sends requests when they are due, whether or not earlier ones were answered, as users do.

Every time is counted from the moment that a request was due, not from when it was sent: a client that falls behind would
otherwise hide just the waits that matter. How far it fell behind is in each answer, for the report to judge.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from loadtest.connection import Connections, Exchange, Lost
from loadtest.workloads import Request

__all__ = ["Answer", "encode_request", "send_all"]

_CACHED: Final = re.compile(rb'"cached_tokens": ?(\d+)')
_COMPLETION: Final = re.compile(rb'"completion_tokens": ?(\d+)')
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
    ports: Sequence[int], model: str, requests: Sequence[Request], speedup: float, timeout_s: float, start: float
) -> list[Answer]:
    """One answer for each request, the times of which begin at `start` (`time.monotonic`). None takes over `timeout_s`.

    Of several `ports` each gets every so-manieth request.
    """
    loop = asyncio.get_running_loop()
    connections = [Connections(port) for port in ports]
    answers: list[asyncio.Task[Answer]] = []
    gc.collect()
    gc.disable()  # a collection over all those prompts would be a lag of its own
    try:
        for request, taken in zip(requests, itertools.cycle(connections), strict=False):
            due = start + request.at_s / speedup
            payload = encode_request(model, request)
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            answers.append(loop.create_task(_send(taken, payload, due, timeout_s)))
        return await asyncio.gather(*answers)
    finally:
        for task in answers:
            task.cancel()
        for each in connections:
            each.close()
        gc.enable()


def encode_request(model: str, request: Request) -> bytes:
    """Head and body, for a server on this machine."""
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
        f"x-session-id: {request.session}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _send(connections: Connections, payload: bytes, due: float, timeout_s: float) -> Answer:
    answer = Answer(sent_s=time.monotonic() - due)
    try:
        async with asyncio.timeout(timeout_s):
            exchange = await connections.ask(payload)
    except (OSError, TimeoutError, Lost) as error:
        answer.error = type(error).__name__
    else:
        _read(exchange, answer, due)
    return answer


def _read(exchange: Exchange, answer: Answer, due: float) -> None:
    answer.last_s = exchange.last_at - due
    tail = _CHUNK_BORDER.sub(b"", exchange.tail)
    cached, completion = _CACHED.search(tail), _COMPLETION.search(tail)
    if exchange.status != 200:
        answer.error = str(exchange.status)
    elif exchange.first_at is None or b"[DONE]" not in tail or completion is None:
        answer.error = "cut"
    else:
        answer.first_s = exchange.first_at - due
        answer.cached_tokens = int(cached[1]) if cached else 0
        answer.completion_tokens = int(completion[1])
