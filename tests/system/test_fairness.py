"""Two tenants at a real gateway before simulated replicas in a process: one floods, the other one hardly notices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from gateway.app import build_gateway
from gateway.keys.opening import open_key_store
from gateway.settings import Settings
from tests.serving import eventually, serving
from tests.system.test_faults import CREDENTIAL, body_of, fleet, http, prompt_named

pytestmark = pytest.mark.system

FLOOD = 90
"""Prompts, fewer than the client has connections; two replicas compute them in seven seconds."""


async def test_a_tenant_that_asks_for_little_is_answered_while_a_flood_waits(tmp_path: Path) -> None:
    with fleet(2, speedup=1) as urls:
        replicas = [
            {"id": f"r{number}", "url": url, "model": "simulated", "kind": "warmpath", "credential": CREDENTIAL}
            for number, url in enumerate(urls)
        ]
        settings = Settings.model_validate({"state_dir": tmp_path, "replicas": replicas})
        gateway = build_gateway(settings, await open_key_store(settings))
        keys = [(await gateway.keys.create("client", name=name, tenant=name))[1] for name in ("flood", "quiet")]
        async with gateway.background(), serving(gateway.public) as url:
            async with http(url, keys[0]) as flood, http(url, keys[1]) as quiet, asyncio.TaskGroup() as tasks:
                await eventually(lambda: all(view.healthy for view in gateway.knowledge.router.replicas()))
                (await ask(quiet, "first")).raise_for_status()
                flooding = [tasks.create_task(ask(flood, f"flood {number}")) for number in range(FLOOD)]
                await eventually(lambda: len(gateway.data.admission) > FLOOD * 2 // 3)

                answers = [await ask(quiet, f"quiet {number}") for number in range(2)]

                assert [answer.status_code for answer in answers] == [200, 200]
                assert len(gateway.data.admission) > 0, "the flood still waits"
                for each in flooding:
                    each.cancel()
            await eventually(lambda: all(view.inflight == 0 for view in gateway.knowledge.router.replicas()))


async def ask(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/completions", json=body_of(prompt_named(name)), timeout=60)
