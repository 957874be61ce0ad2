"""A gateway that is told to stop, as a process: who is served to the end, who is told that the end came first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.gateway.stub import MODEL, STREAM_HEAD, StubReplica, chunked, event, stub
from tests.system.processes import WARMPATH, free_ports

pytestmark = pytest.mark.system


@contextlib.asynccontextmanager
async def stopping_gateway(
    folder: Path, replica: StubReplica, **server: float
) -> AsyncIterator[tuple[subprocess.Popen[bytes], httpx.AsyncClient, httpx.AsyncClient]]:
    """An open gateway that is ready, and clients of its two listeners."""
    port, admin_port = free_ports(2)
    (folder / "gateway.yaml").write_text(json.dumps({"server": server}))
    command = [WARMPATH, "serve", "--open", "--config", "gateway.yaml", "--replicas", replica.url]
    with running([*command, "--port", str(port), "--admin-port", str(admin_port)], folder) as process:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", trust_env=False, timeout=20) as admin,
        ):
            await until(lambda: _status(admin, "/ready"), 200)
            yield process, client, admin


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until(ask: Callable[[], Awaitable[int | None]], wanted: int | None) -> None:
    async with asyncio.timeout(20):
        while await ask() != wanted:  # noqa: ASYNC110 - another process has no event for it
            await asyncio.sleep(0.02)


async def _status(client: httpx.AsyncClient, path: str) -> int | None:
    try:
        return (await client.get(path, headers={"connection": "close"})).status_code
    except httpx.TransportError:
        return None


async def exit_code(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 20)


def body(*, stream: bool) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": stream}


async def streams_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(chunked(event("word ")))
        await writer.drain()
        await asyncio.sleep(0.01)


async def test_what_still_runs_when_the_grace_is_over_is_told_so(tmp_path: Path) -> None:
    waiting = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if replica.seen[-1].json["stream"]:
            await streams_for_ever(reader, writer)
        waiting.set()
        await asyncio.Event().wait()

    async with (
        stub(answer) as replica,
        stopping_gateway(tmp_path, replica, grace_s=1.0) as (gateway, client, _),
        client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as stream,
    ):
        lines = stream.aiter_lines()
        first = await anext(lines)
        whole = asyncio.create_task(client.post("/v1/chat/completions", json=body(stream=False)))
        await waiting.wait()

        gateway.send_signal(signal.SIGTERM)
        rest = [line async for line in lines if line]
        refused = await whole

        assert await exit_code(gateway) == 0

    assert "word" in first
    assert "data: [DONE]" not in rest
    assert all("word" in line for line in rest[:-1])
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "gateway_shutdown"
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "gateway_shutdown"
    assert int(refused.headers["retry-after"]) >= 1
    assert [seen.gone.is_set() for seen in replica.seen] == [True, True]


async def test_while_it_drains_it_takes_new_connections_and_says_that_it_is_not_ready(tmp_path: Path) -> None:
    finish = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(event("begun ")))
        await finish.wait()
        writer.write(chunked(event("", "stop")) + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with (
        stub(answer) as replica,
        stopping_gateway(tmp_path, replica, grace_s=20.0, drain_s=1.5) as (gateway, client, admin),
        client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        kept = await client.get("/v1/models")

        gateway.send_signal(signal.SIGTERM)
        await until(lambda: _status(admin, "/ready"), 503)
        on_an_old_connection = await client.get("/v1/models")
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False) as newcomer:
            on_a_new_one = await newcomer.get("/v1/models")
        await until(lambda: _status(client, "/health"), None)
        still_running = gateway.poll() is None
        unready = await _status(admin, "/ready")
        finish.set()
        rest = [line async for line in lines if line]

        assert await exit_code(gateway) == 0

    assert "connection" not in kept.headers
    assert [answer.status_code for answer in (on_an_old_connection, on_a_new_one)] == [200, 200]
    assert {answer.headers["connection"] for answer in (on_an_old_connection, on_a_new_one)} == {"close"}
    assert still_running
    assert unready == 503, "the admin listener says how it goes until the end"
    assert rest[-1] == "data: [DONE]"
