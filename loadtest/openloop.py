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

__all__ = ["Answer", "encode_request", "is_settled", "send_all"]

_LOOK_S: Final = 0.2
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
    unfinished: bool = False
    """It was not waited for: `last_s` is how long it had lasted, and of tokens nothing is known."""


@dataclass(frozen=True, slots=True)
class _Sent:
    due: float
    exchange: Exchange
    task: asyncio.Task[Answer]

    def so_far(self, now: float) -> Answer:
        if self.task.done():
            return self.task.result()
        assert self.exchange.first_at is not None, "waited for"
        return Answer(0.0, self.exchange.first_at - self.due, now - self.due, unfinished=True)


async def send_all(
    ports: Sequence[int],
    model: str,
    requests: Sequence[Request],
    speedup: float,
    timeout_s: float,
    start: float,
    *,
    to_the_end: bool = True,
) -> list[Answer]:
    """One answer for each request, the times of which begin at `start` (`time.monotonic`). None takes over `timeout_s`.

    Of several `ports` each gets every so-manieth request. Unless `to_the_end`, answers that are still going are left when all
    have begun and the rest is settled (`is_settled`).
    """
    loop = asyncio.get_running_loop()
    connections = [Connections(port) for port in ports]
    sent: list[_Sent] = []
    gc.collect()
    gc.disable()  # a collection over all those prompts would be a lag of its own
    try:
        for request, taken in zip(requests, itertools.cycle(connections), strict=False):
            due = start + request.at_s / speedup
            payload = encode_request(model, request)
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            exchange = Exchange()
            sent.append(_Sent(due, exchange, loop.create_task(_send(taken, payload, exchange, due, timeout_s))))
        if not to_the_end:
            await _settle(sent)
            now = time.monotonic()
            return [each.so_far(now) for each in sent]
        return await asyncio.gather(*(each.task for each in sent))
    finally:
        for each in sent:
            each.task.cancel()
        for taken in connections:
            taken.close()
        gc.enable()


def is_settled(lasted_s: Sequence[float], going_s: Sequence[float]) -> bool:
    """Whether no percentile up to the 99th depends on those that are still going: each has lasted longer than it already."""
    place = int((len(lasted_s) + len(going_s)) * 0.99)
    return not going_s or (place < len(lasted_s) and min(going_s) >= sorted(lasted_s)[place])


async def _settle(sent: Sequence[_Sent]) -> None:
    while going := [each for each in sent if not each.task.done()]:
        now = time.monotonic()
        lasted_s = [each.task.result().last_s for each in sent if each.task.done()]
        begun = all(each.exchange.first_at is not None for each in going)
        if begun and is_settled(lasted_s, [now - each.due for each in going]):
            return
        await asyncio.sleep(_LOOK_S)


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


async def _send(connections: Connections, payload: bytes, exchange: Exchange, due: float, timeout_s: float) -> Answer:
    answer = Answer(sent_s=time.monotonic() - due)
    try:
        async with asyncio.timeout(timeout_s):
            await connections.ask(payload, exchange)
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
