"""In which order replicas compute, as processes: what a gateway asks for is what they do."""

from __future__ import annotations

import asyncio
import re
import time

import httpx
import pytest

from loadtest.arms import Ours
from loadtest.system import MODEL, FleetShape, Order, running_system
from tests.system.processes import free_ports

pytestmark = pytest.mark.system

_LONG = 20 * 2048
"""Whole steps: in what its last one leaves over, a short prompt would be computed beside it."""
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting){.*} ([0-9]+)", re.MULTILINE)


async def first_byte_at(http: httpx.AsyncClient, num_tokens: int, word: str) -> float:
    body = {"model": MODEL, "prompt": f"{word:4}" * num_tokens, "max_tokens": 2, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_raw():
            return time.monotonic()
    raise AssertionError("no answer")


async def is_passed(http: httpx.AsyncClient, replica: str) -> bool:
    """Whether a short prompt has its first token before a long one that came sooner, and waits for another long one."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(first_byte_at(http, _LONG, "one"))
        await until_there_are(1, http, replica)
        long = tasks.create_task(first_byte_at(http, _LONG, "two"))
        await until_there_are(2, http, replica)
        short = tasks.create_task(first_byte_at(http, 100, "abc"))
    return short.result() < long.result() - 0.5


async def until_there_are(count: int, http: httpx.AsyncClient, replica: str) -> None:
    async with asyncio.timeout(10):
        while count != sum(map(int, _REQUESTS.findall((await http.get(f"{replica}/metrics")).text))):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("knowledge", ["exact", "plain"])
@pytest.mark.parametrize(("order", "passed"), [("asked", True), ("arrival", False)])
async def test_short_prompts_pass_long_ones_where_replicas_do_as_they_are_asked(
    knowledge: str, order: Order, passed: bool
) -> None:
    shape = FleetShape(replicas=1, processes=1, speedup=1.0, kv_tokens=1 << 20, tokens_per_chunk=4, order=order)
    arm = Ours("cost", "exact" if knowledge == "exact" else "plain")
    with running_system(arm, shape, free_ports(5)[0]) as system:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{system.ports[0]}", timeout=30) as http:
            assert await is_passed(http, f"http://127.0.0.1:{system.replica_ports[0]}") is passed
