"""What users of other gateways reported, asked of ours; and that every test which docs/gateway.md names exists."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path

from tests.gateway.stub import (
    DONE,
    MODEL,
    STREAM_HEAD,
    StubReplica,
    chunked,
    event,
    gateway,
    response,
    says,
    streams,
    stub,
    writes,
)
from tests.serving import eventually
from tests.system.processes import free_ports

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_tables_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/gateway.md").read_text()))
    written = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }

    assert len(named) > 60
    assert named - written == set()


async def test_when_all_replicas_were_down_the_first_that_is_back_is_used_within_seconds(tmp_path: Path) -> None:
    """sgl-project/sglang#7028: a router that had lost all of them never came back."""
    async with stub(says("hi")) as one, stub(says("hi")) as two, gateway(tmp_path, one, two) as running:
        await one.stop()
        await two.stop()
        for _ in range(12):  # more than a breaker needs
            assert (await running.chat()).status_code == 503
        asked_at = time.monotonic()
        assert (await running.chat()).headers["retry-after"]
        took_s = time.monotonic() - asked_at

        await two.listen()
        async with asyncio.timeout(30):
            while (await running.chat()).status_code != 200:  # noqa: ASYNC110 - only an answer tells it
                await asyncio.sleep(0.05)

    assert took_s < 5.0, "nobody is waited for when nobody is there"


async def test_a_replica_that_is_down_from_the_start_keeps_nobody_waiting(tmp_path: Path) -> None:
    """sgl-project/sglang#3802, #2392: one dead worker kept the router from starting, or got requests."""
    (dead,) = free_ports(1)
    anywhere = {"registry": {"ports": ["1024-65535"]}}
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, **anywhere) as running:
        registered = await running.admin.put(
            "/admin/v1/replicas/dead",
            json={"url": f"http://127.0.0.1:{dead}", "model": MODEL, "kind": "openai", "epoch": "1"},
        )
        answers = [await running.chat(f"hello {number}") for number in range(20)]

    assert registered.is_success, registered.text
    assert {answer.status_code for answer in answers} == {200}


async def test_two_hundred_bad_requests_eject_nobody(tmp_path: Path) -> None:
    """sgl-project/sglang#25811: clients' 400s opened the breakers of a whole fleet."""
    refusal = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":"bad"}}'
    async with stub(writes(response(400, refusal))) as replica, gateway(tmp_path, replica) as running:
        for _ in range(4):
            answers = await asyncio.gather(*(running.chat() for _ in range(50)))
            assert {answer.status_code for answer in answers} == {400}
        replica.answer = says("hi")

        assert (await running.chat()).status_code == 200


async def test_two_hundred_streams_run_at_once(tmp_path: Path) -> None:
    """production-stack#767: the HTTP client's default of 100 connections throttled everybody."""
    everybody = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(event("begun")))
        if len(replica.seen) == 200:
            everybody.set()
        await everybody.wait()
        writer.write(chunked(event("", "stop")) + chunked(DONE) + b"0\r\n\r\n")

    body = b'{"model":"%b","stream":true,"messages":[{"role":"user","content":"x"}]}' % MODEL.encode()

    async def ask(host: str, port: int, key: str) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        with contextlib.closing(writer):
            return await reader.read(-1)

    async with stub(answer) as replica, gateway(tmp_path, replica) as running:
        url = running.client.base_url
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(ask(url.host, url.port or 80, running.key) for _ in range(200)))

    assert sum(b"data: [DONE]" in each for each in answers) == 200


async def test_a_stream_is_an_event_stream_and_everything_else_is_json(tmp_path: Path) -> None:
    """production-stack#880, smg#1857: one content type for both."""
    async with stub(streams(event("x"), event("", "stop"), DONE)) as replica, gateway(tmp_path, replica) as running:
        stream = await running.chat(stream=True)
        replica.answer = says("hi")
        whole = await running.chat()
        refused = await running.chat(stream=True, model="missing")

    assert stream.headers["content-type"].startswith("text/event-stream")
    assert whole.headers["content-type"] == refused.headers["content-type"] == "application/json"


class KeyedReplica(StubReplica):
    """Asks for a key on every path."""

    refused = 0

    async def _route(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if headers.get("authorization") == "Bearer sesame":
            await super()._route(method, path, headers, body, reader, writer)
        else:
            self.refused += 1
            writer.write(response(401, b"{}"))


async def test_probes_show_the_replicas_key_as_requests_do(tmp_path: Path) -> None:
    """vllm-project/router#159: health checks went without it, so a replica with a key was never healthy."""
    replica = KeyedReplica(says("hi"), [MODEL])
    await replica.listen()
    try:
        replicas = [{"url": replica.url, "credential": "sesame"}]
        async with gateway(tmp_path, replicas=replicas) as running:
            assert (await running.chat()).status_code == 200
    finally:
        await replica.stop()

    assert replica.refused == 0


async def test_both_transports_serve_and_let_go(tmp_path: Path) -> None:
    """The same gateway over httpx: a whole answer, a stream, and a client that leaves one in the middle."""

    async def begin(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(event("begun ")))
        await asyncio.Event().wait()

    settings = {"upstream": {"transport": "httpx"}}
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, **settings) as running:
        whole = await running.chat()
        replica.answer = streams(event("x"), event("", "stop"), DONE)
        stream = await running.chat(stream=True)
        replica.answer = begin
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body, headers=running.auth) as left:
            await anext(left.aiter_lines())
        await eventually(replica.seen[-1].gone.is_set, within_s=10.0)
        await eventually(lambda: running.gateway.upstream.in_use == 0)

    assert whole.json()["choices"][0]["message"]["content"] == "hi"
    assert stream.text.endswith("data: [DONE]\n\n")
