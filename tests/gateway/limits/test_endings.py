"""Every way a call can end, against every limit: what it is charged for, and that the next call is let through.

A real gateway over sockets, a replica that does what the row says. Key, tenant and model have all five limits each; of
parallel requests only one, so that a place that was not given back refuses whatever comes next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.limits import LocalLimiter, Measure
from gateway.limits.ledger import Limit
from tests.gateway.stub import (
    DONE,
    MODEL,
    STREAM_HEAD,
    USAGE,
    Answer,
    Running,
    StubReplica,
    chunked,
    dies,
    event,
    gateway,
    hangs,
    response,
    says,
    streams,
    stub,
    writes,
)

QUOTA = {
    "requests_per_minute": 1000,
    "tokens_per_minute": 1_000_000,
    "parallel_requests": 1,
    "tokens_per_day": 10_000_000,
    "usd_per_day": 100.0,
}
SETTINGS: dict[str, Any] = {
    "limits": {**QUOTA, "reserved_output_tokens": 100},
    "tenants": {"blue": {"quota": QUOTA}},
    "models": {MODEL: {"quota": QUOTA, "input_usd": 1.0, "cached_input_usd": 0.5, "output_usd": 2.0}},
    "stream": {"first_byte_s": 0.2, "idle_s": 0.3},
}
USED = (1, 9 + 2, 0, 9 + 2, 9 * 1 + 2 * 2)
NO_TOKENS = (1, 0, 0, 0, 0)
NOTHING = (0, 0, 0, 0, 0)
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@dataclass(frozen=True)
class Estimated:
    """By the prompt's estimate, and so many output tokens."""

    output: int


@dataclass(frozen=True)
class Case:
    answer: Answer
    status: int
    charged: tuple[int, int, int, int, int] | Estimated
    body: bytes = msgspec.json.encode(HELLO)
    stream: bool = False
    client: Callable[[Running, StubReplica, bytes], Awaitable[int]] | None = None


async def leaves(running: Running, content: bytes, when: Callable[[bytes], Awaitable[bool]], announced: int = 0) -> int:
    """A client that sends `content` and closes its connection as soon as `when`, given what it received, says so."""
    url = running.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {running.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {announced or len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    received = b""
    async with asyncio.timeout(30):
        while not await when(received):
            try:
                received += await asyncio.wait_for(reader.read(1 << 16), 0.01)
            except TimeoutError:
                continue
    writer.transport.abort()
    return 499


async def leaves_before_the_first_byte(running: Running, replica: StubReplica, body: bytes) -> int:
    seen = len(replica.seen)

    async def reached(_: bytes) -> bool:
        return len(replica.seen) > seen

    return await leaves(running, body, reached)


async def leaves_within_the_stream(running: Running, replica: StubReplica, body: bytes) -> int:
    async def begun(received: bytes) -> bool:
        return received.count(b"data: ") >= 2

    return await leaves(running, body, begun)


async def leaves_within_its_body(running: Running, replica: StubReplica, body: bytes) -> int:
    async def at_once(_: bytes) -> bool:
        await asyncio.sleep(0)
        return True

    return await leaves(running, body[:5], at_once, announced=len(body))


async def meets_a_bug(running: Running, replica: StubReplica, body: bytes) -> int:
    dispatcher: Any = running.gateway.public._dispatcher
    dispatcher._router, router = None, dispatcher._router
    try:
        return await calls(running, body)
    finally:
        dispatcher._router = router


async def calls(running: Running, body: bytes) -> int:
    headers = {**running.auth, "content-type": "application/json"}
    return (await running.client.post("/v1/chat/completions", content=body, headers=headers)).status_code


def without_usage(*_: object) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    return msgspec.json.encode({"id": "c", "choices": [choice]})


TWO_EVENTS = (event("a"), event("b"))
CASES = {
    "answered": Case(says("hi"), 200, USED),
    "answered, without a usage": Case(writes(response(200, without_usage())), 200, Estimated(100)),
    "streamed": Case(streams(*TWO_EVENTS, event(finish_reason="stop"), USAGE, DONE), 200, USED, stream=True),
    "streamed, without a usage": Case(
        streams(*TWO_EVENTS, event(finish_reason="stop"), DONE), 200, Estimated(3), stream=True
    ),
    "refused by the replica": Case(writes(response(400, b'{"error":{"code":"x"}}')), 400, NO_TOKENS),
    "the replica is broken": Case(writes(response(500, b"{}")), 502, NOTHING),
    "the replica is busy": Case(writes(response(429, b"{}", "retry-after: 0.001")), 429, NOTHING),
    "the replica gives nonsense": Case(writes(response(200, b"<html>")), 502, NOTHING),
    "the replica dies": Case(dies, 502, NOTHING),
    "the replica is silent": Case(hangs, 504, NOTHING),
    "the stream breaks off": Case(
        writes(STREAM_HEAD, *map(chunked, TWO_EVENTS), close=True), 200, Estimated(2), stream=True
    ),
    "the stream stops": Case(writes(STREAM_HEAD, chunked(event("a"))), 200, Estimated(1), stream=True),
    "the stream dies before its first event": Case(writes(STREAM_HEAD, close=True), 502, NOTHING, stream=True),
    "a bad body": Case(says("hi"), 400, NOTHING, body=b'{"model": 1}'),
    "an unknown model": Case(says("hi"), 404, NOTHING, body=msgspec.json.encode({**HELLO, "model": "none"})),
    "larger than a whole limit": Case(
        says("hi"), 429, NOTHING, body=msgspec.json.encode({**HELLO, "max_tokens": 1_000_000})
    ),
    "a bug": Case(says("hi"), 500, NOTHING, client=meets_a_bug),
    "the client leaves within its body": Case(says("hi"), 499, NOTHING, client=leaves_within_its_body),
    "the client leaves before the first byte": Case(hangs, 499, Estimated(0), client=leaves_before_the_first_byte),
    "the client leaves within the stream": Case(
        writes(STREAM_HEAD, *map(chunked, TWO_EVENTS)), 499, Estimated(2), stream=True, client=leaves_within_the_stream
    ),
}


def used_by(running: Running, subject: str) -> tuple[int, ...]:
    limiter = running.gateway.data.limiter
    assert isinstance(limiter, LocalLimiter)
    now = time.monotonic(), time.time()
    return tuple(
        limiter.ledger.used(Limit(f"{subject}:{measure.name.lower()}", measure, 1), *now) for measure in Measure
    )


@pytest.mark.parametrize("ending", CASES)
async def test_what_each_ending_is_charged_for(tmp_path: Path, ending: str) -> None:
    case = CASES[ending]
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, **SETTINGS) as running:
        key, running.key = await running.gateway.keys.create("client", name="ending", tenant="blue", debug=True)
        prompt_tokens = prompt_tokens_of(await running.chat())
        body = case.body[:-1] + b',"stream":true}' if case.stream else case.body
        replica.answer = case.answer

        status = await (case.client(running, replica, body) if case.client is not None else calls(running, body))

        async with asyncio.timeout(30):
            while running.gateway.public.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert status == case.status
        charged = case.charged
        if isinstance(charged, Estimated):
            tokens = prompt_tokens + charged.output
            charged = (1, tokens, 0, tokens, prompt_tokens + 2 * charged.output)
        for subject in (f"key:{key.id}", "tenant:blue", f"model:{MODEL}"):
            assert used_by(running, subject) == tuple(map(sum, zip(USED, charged, strict=True))), subject
        replica.answer = says("hi")
        async with asyncio.timeout(30):  # a replica that was busy is left alone for a moment
            while (status := await calls(running, CASES["answered"].body)) == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert status == 200


def prompt_tokens_of(answer: httpx.Response) -> int:
    """As the gateway estimated it."""
    return int(answer.headers["x-warmpath-decision"].partition("prompt=")[2].partition(",")[0])
