"""What an operator does on a bad day, with the commands of a shell, while clients stream: none of them may notice."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.stub import MODEL as FOREIGN_MODEL
from tests.gateway.stub import says, stub
from tests.serving import eventually
from tests.system.processes import WARMPATH
from tests.system.test_processes import (
    ADMIN_KEY,
    Served,
    eventually_answers,
    fleet,
    in_thread,
    serving_processes,
)

pytestmark = pytest.mark.system

NUM_STREAMS = 12
ANSWER_TOKENS = 16


class Clients:
    """Ask without a pause until they are told to stop, each with the key that is current; most of them take streams."""

    def __init__(self, gateway: Served) -> None:
        self.key = gateway.keys[0]
        self.model = "simulated"
        self.bad: list[str] = []
        self.decisions: list[tuple[str, str]] = []
        """Request ids and what the header said of where they went."""
        self._client = gateway.client()
        self._stopped = False
        self._answered = [0] * (NUM_STREAMS + 2)
        self._tasks = [
            asyncio.create_task(self._go_on(number, self._stream if number < NUM_STREAMS else self._complete))
            for number in range(NUM_STREAMS + 2)
        ]

    async def _go_on(self, number: int, ask: Any) -> None:
        while not self._stopped:
            try:
                await ask(f"{number}: {self._answered[number]} ")
            except httpx.HTTPError as error:
                self.bad.append(repr(error))
            self._answered[number] += 1

    async def _stream(self, prompt: str) -> None:
        body = {"model": self.model, "prompt": prompt * 20, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        async with self._client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers=self._auth()
        ) as answer:
            text = (await answer.aread()).decode()
        if answer.status_code != 200 or text.count('"text"') < ANSWER_TOKENS or not text.endswith("data: [DONE]\n\n"):
            self.bad.append(f"{answer.status_code} {text[-300:]}")
        else:
            self.decisions.append((answer.headers["x-request-id"], answer.headers["x-warmpath-decision"]))

    async def _complete(self, prompt: str) -> None:
        """At the foreign replicas."""
        body = {"model": FOREIGN_MODEL, "messages": [{"role": "user", "content": prompt}]}
        answer = await self._client.post("/v1/chat/completions", json=body, headers=self._auth())
        if answer.status_code != 200:
            self.bad.append(f"{answer.status_code} {answer.text}")

    def _auth(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    async def some_more(self) -> list[tuple[str, str]]:
        """One more answer for each of them at least; their decisions."""
        known, before = len(self.decisions), list(self._answered)
        await eventually(lambda: all(map(int.__gt__, self._answered, before)), within_s=60)
        return self.decisions[known:]

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()


def replica_of(decision: str) -> str:
    found = re.search(r'replica="([^"]+)"', decision)
    assert found
    return found[1]


async def test_nothing_that_operators_do_costs_a_client_an_answer(tmp_path: Path) -> None:
    access_log = tmp_path / "access.log"
    async with stub(says("one")) as one, stub(says("two")) as two:
        env: dict[str, Any] = {
            "WARMPATH_REPLICAS": json.dumps([{"url": one.url, "id": "one"}]),
            "WARMPATH_LOG__ACCESS": str(access_log),
        }
        async with in_thread(serving_processes(tmp_path, processes=2, **env)) as gateway:
            config = tmp_path / f"{gateway.state.name.replace('state', 'gateway')}.yaml"

            async def warmpath(*args: str, code: int = 0) -> str:
                process = await asyncio.create_subprocess_exec(
                    *(WARMPATH, *args),
                    cwd=tmp_path,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, "WARMPATH_ADMIN_URL": gateway.admin_url, "WARMPATH_ADMIN_KEY": ADMIN_KEY},
                )
                output, _ = await process.communicate()
                assert process.returncode == code, output.decode()
                return output.decode()

            with fleet(tmp_path, gateway.admin_url):
                await eventually_answers(f"{gateway.admin_url}/ready")
                await _healthy(gateway, {"one", "r-0", "r-1", "r-2"})
                clients = Clients(gateway)
                try:
                    await _rehearse(gateway, clients, warmpath, config, two.url)
                    assert two.seen, "the one that was added by hand got its share"
                    await clients.stop()
                    await _one_story(clients, warmpath, access_log)
                finally:
                    await clients.stop()
            assert clients.bad == []


async def _rehearse(gateway: Served, clients: Clients, warmpath: Any, config: Path, by_hand: str) -> None:
    await warmpath("replicas", "add", by_hand, "--id", "by-hand", "--model", FOREIGN_MODEL)
    await warmpath("replicas", "cordon", "r-0")
    await warmpath("replicas", "drain", "r-1", "--wait")
    await clients.some_more()  # those that were under way when it was cordoned
    assert {replica_of(decision) for _, decision in await clients.some_more()} == {"r-2"}
    with gateway.admin as admin:
        admin.patch("/replicas/one", json={"cordoned": True}).raise_for_status()
    await _healthy(gateway, {"one", "by-hand", "r-0", "r-1", "r-2"})

    await asyncio.to_thread(config.write_text, "routing: {polcy: random}\nstream: {idle_s: -1}\n")
    told = await warmpath("reload", code=1)
    assert "routing.polcy" in told
    assert "stream.idle_s" in told
    await asyncio.to_thread(config.write_text, "aliases: {gpt: simulated}\n")
    await warmpath("reload")  # unless it was seen that the file changed
    clients.model = "gpt"

    old = clients.key
    clients.key = (await warmpath("keys", "rotate", old.split("-")[1], "--overlap", "3s")).strip()
    async with gateway.client(old) as last:
        assert (await last.get("/v1/models")).status_code == 200
        await clients.some_more()
        async with asyncio.timeout(20):
            while (await last.get("/v1/models")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    await clients.some_more()


async def _one_story(clients: Clients, warmpath: Any, access_log: Path) -> None:
    """Why a request went where it went: said alike by the header, the ring of decisions, the log, and a question now."""
    request_id, header = clients.decisions[-1]
    told, explained = await asyncio.gather(
        warmpath("decisions", "--limit", "100", "--json"),
        warmpath("explain", "--prompt", "once upon a time", "--model", "simulated", "--json"),
    )
    decision = next(each for each in json.loads(told) if each["request_id"] == request_id)
    await eventually(lambda: request_id in access_log.read_text())
    lines = map(json.loads, (await asyncio.to_thread(access_log.read_text)).splitlines())
    line = next(line for line in lines if line["request_id"] == request_id)

    assert header == (
        f'replica="{decision["chosen"]}", matched={decision["matched_tokens"]}, '
        f'prompt={decision["prompt_tokens"]}, reason="{decision["reason"]}"'
    )
    assert (line["replica"], line["reason"], line["policy"], line["tries"], line["status"]) == (
        *(decision["chosen"], decision["reason"], decision["policy"]),
        *(decision["tries"], decision["status"]),
    )
    assert (line["predicted_cached_tokens"], line["model"]) == (decision["matched_tokens"], "simulated")
    candidates = {each["replica"]: each["why_not"] for each in json.loads(explained)["candidates"]}
    assert candidates == {"r-0": "cordoned", "r-1": "draining", "r-2": ""}


async def _healthy(gateway: Served, expected: set[str]) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False, headers=headers) as client:
        while True:
            found = (await client.get(f"{gateway.admin_url}/admin/v1/replicas")).json()["replicas"]
            if {replica["id"] for replica in found if replica["healthy"]} == expected:
                return
            await asyncio.sleep(0.05)
