"""The hot path behind a server that knows nothing of it: plain ASGI, here uvicorn's own protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.stub import DONE, MODEL, Answer, Running, event, gateway, hangs, says, streams, stub
from tests.serving import eventually, serving

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def answer() -> Answer:
    return says("hi")


@pytest.fixture
async def running(tmp_path: Path, answer: Answer) -> AsyncIterator[Running]:
    async with stub(answer) as replica, gateway(tmp_path, replica) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(running.gateway.public) as url,
        httpx.AsyncClient(base_url=url, headers=running.auth, verify=False) as client,
    ):
        yield client


async def test_an_answer_is_the_same(running: Running, client: httpx.AsyncClient) -> None:
    ours, theirs = await running.chat("hello"), await client.post("/v1/chat/completions", json=CHAT)

    assert theirs.status_code == ours.status_code == 200
    assert theirs.content == ours.content
    drawn = {"x-request-id", "openai-processing-ms", "date", "server"}
    assert {name for name in theirs.headers if name not in drawn} == {
        name for name in ours.headers if name not in drawn
    }


async def test_refusals_are_the_same(running: Running, client: httpx.AsyncClient) -> None:
    nobody = await client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer x"})
    nothing = await client.post("/v1/chat/completions", content=b"{")
    long = await client.post(
        "/v1/chat/completions", content=b" " * (5 << 20), headers={"content-type": "application/json"}
    )

    assert nobody.status_code == 401
    assert nothing.status_code == 415
    assert long.status_code == 413
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL


@pytest.mark.parametrize("answer", [streams(event("a"), event("b", "stop"), DONE)])
async def test_a_stream_is_relayed(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})

    assert answer.content == event("a") + event("b", "stop") + DONE


@pytest.mark.parametrize("answer", [hangs])
async def test_a_client_that_leaves_ends_its_request(running: Running, client: httpx.AsyncClient) -> None:
    asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
    decisions = running.gateway.data.decisions
    await eventually(lambda: running.gateway.upstream.in_use == 1)

    asking.cancel()

    await eventually(lambda: len(decisions) == 1)
    assert decisions[0].status == 499
    assert running.gateway.upstream.in_use == 0
