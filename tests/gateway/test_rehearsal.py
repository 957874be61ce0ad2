"""What an operator does on a bad day, all of it while clients ask: none of them may notice."""

from __future__ import annotations

import asyncio
import operator
from pathlib import Path

import msgspec

from tests.gateway.stub import MODEL, says, stub
from tests.gateway.test_reload import Served, at, served
from tests.serving import eventually


class Clients:
    """Ask without a pause until they are told to stop, each with the key that is current."""

    def __init__(self, running: Served, key: str) -> None:
        self.key = key
        self.bad: list[str] = []
        self.answered = [0] * 4
        self._running = running
        self._stopped = False
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(4)]

    async def _ask(self, number: int) -> None:
        while not self._stopped:
            body = {"model": MODEL, "messages": [{"role": "user", "content": f"{number}: {self.answered[number]}"}]}
            answer = await self._running.client.post(
                "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {self.key}"}
            )
            self.answered[number] += 1
            if answer.status_code != 200:
                self.bad.append(answer.text)

    async def some_more(self) -> None:
        """From each of them."""
        enough = [answered + 3 for answered in self.answered]
        await eventually(lambda: all(map(operator.ge, self.answered, enough)), within_s=20)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)


async def test_nothing_that_operators_do_costs_a_client_an_answer(tmp_path: Path) -> None:
    async with (
        stub(says("one")) as one,
        stub(says("two")) as two,
        stub(says("three")) as three,
        served(tmp_path, replicas=[at(one, "one"), at(two, "two")]) as running,
    ):
        admin = running.admin
        await running.healthy("one", "two")
        first = (await admin.post("/admin/v1/keys", json={"name": "first"})).json()
        clients = Clients(running, first["key"])
        await clients.some_more()

        by_hand = {"url": three.url, "model": MODEL, "kind": "openai", "lease_s": 15}
        (await admin.put("/admin/v1/replicas/three", json=by_hand)).raise_for_status()
        await running.healthy("one", "two", "three")
        (await admin.patch("/admin/v1/replicas/one", json={"cordoned": True})).raise_for_status()
        await clients.some_more()
        (await admin.post("/admin/v1/replicas/two/drain", json={"deadline_s": 10})).raise_for_status()
        async with asyncio.timeout(20):
            while not (await admin.get("/admin/v1/replicas/two")).json()["drain"]["done"]:
                pass
        asked_before = len(one.seen), len(two.seen)
        await clients.some_more()
        assert (len(one.seen), len(two.seen)) == asked_before, "all went to the one that was registered by hand"

        (await admin.delete("/admin/v1/replicas/two/drain")).raise_for_status()
        running.file.write_text("routing: {polcy: random}")
        assert (await running.reload()).status_code == 400
        await clients.some_more()
        running.write(replicas=[at(one, "one"), at(two, "two")], routing={"policy": "round_robin"})
        assert (await running.reload()).json()["changed"] == ["routing.policy"]
        await clients.some_more()

        second = (await admin.post("/admin/v1/keys", json={"name": "second"})).json()
        clients.key = second["key"]
        await clients.some_more()  # those that had begun with the first one
        (await admin.delete(f"/admin/v1/keys/{first['id']}")).raise_for_status()
        await clients.some_more()

        decision = (await admin.get("/admin/v1/decisions")).json()["decisions"][-1]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        explained = await admin.post(
            "/admin/v1/explain", content=msgspec.json.encode(body), headers={"content-type": "application/json"}
        )
        await clients.stop()

        assert clients.bad == []
        assert decision["policy"] == explained.json()["policy"] == "round_robin"
        why_not = {candidate["replica"]: candidate["why_not"] for candidate in explained.json()["candidates"]}
        assert why_not == {"one": "cordoned", "two": "", "three": ""}
