"""The queue before a saturated fleet, through a gateway over real sockets. A replica here computes one token a second by what
the gateway is told, so one unanswered prompt saturates it for as long as a test runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router import GateSettings, Reservation
from tests.gateway.stub import (
    DONE,
    MODEL,
    STREAM_HEAD,
    Answer,
    Running,
    StubReplica,
    chunked,
    event,
    gateway,
    response,
    says,
    stub,
    writes,
)
from tests.serving import eventually

SLOW = {"prefill_tok_s": 1}


def is_measured(running: Running) -> None:
    """What is only a setting holds nobody up."""
    for replica in running.gateway.knowledge.router._replicas.values():
        replica.rate = 1.0


class Gated:
    """Answers one request after the other, each when it is told to."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._may = asyncio.Semaphore(0)

    def next(self, count: int = 1) -> None:
        for _ in range(count):
            self._may.release()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._may.acquire()
        await self._answer(reader, writer)


@contextlib.asynccontextmanager
async def saturated(folder: Path, **admission: Any) -> AsyncIterator[tuple[Running, StubReplica, Gated]]:
    """A gateway whose only replica has a request that it does not answer."""
    gated = Gated(says("hi"))
    async with stub(gated) as replica, gateway(folder, replica, routing=SLOW, admission=admission) as running:
        is_measured(running)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(running.chat("first " * 200))
            await eventually(lambda: len(replica.seen) == 1)
            try:
                yield running, replica, gated
            finally:
                gated.next(100)
        assert first.result().status_code == 200
        await nothing_is_left(running)


async def nothing_is_left(running: Running) -> None:
    await eventually(lambda: len(running.gateway.data.admission) == 0)
    replicas = (await running.admin.get("/admin/v1/replicas")).json()["replicas"]
    assert [(replica["inflight"], replica["promised_tokens"]) for replica in replicas] == [(0, 0)] * len(replicas)


async def key_of(running: Running, tenant: str) -> str:
    _, key = await running.gateway.keys.create("client", name=tenant, tenant=tenant)
    return key


async def ask(running: Running, key: str, content: str, **headers: str) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content * 100}]}
    return await running.client.post(
        "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}", **headers}
    )


async def queued(running: Running, count: int) -> None:
    await eventually(lambda: len(running.gateway.data.admission) == count)


async def test_a_tenant_that_floods_does_not_make_another_wait_for_all_of_it(tmp_path: Path) -> None:
    async with saturated(tmp_path) as (running, replica, gated), asyncio.TaskGroup() as tasks:
        flood, quiet = await key_of(running, "flood"), await key_of(running, "quiet")
        for number in range(8):
            tasks.create_task(ask(running, flood, f"flood {number} "))
        await queued(running, 8)
        answer = tasks.create_task(ask(running, quiet, "quiet "))
        await queued(running, 9)

        for served in range(2, 11):
            gated.next()
            await eventually(lambda served=served: len(replica.seen) >= min(served, 10))  # type: ignore[misc]
        gated.next()

    assert answer.result().status_code == 200
    order = [seen.json["messages"][0]["content"].split()[0] for seen in replica.seen]
    assert order.index("quiet") <= 2, "after the one that was there and at most one of the flood"


async def test_what_finds_no_room_is_refused_with_a_time_to_come_back(tmp_path: Path) -> None:
    async with saturated(tmp_path, max_queued=1) as (running, _, gated), asyncio.TaskGroup() as tasks:
        flood, quiet = await key_of(running, "flood"), await key_of(running, "quiet")
        waiting = tasks.create_task(ask(running, flood, "one "))
        await queued(running, 1)
        refused = await ask(running, flood, "two ")
        other = tasks.create_task(ask(running, quiet, "q"))
        displaced = await waiting

        for answer in (refused, displaced):
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "capacity")
            assert 1 <= float(answer.headers["retry-after"]) <= 60
        gated.next(2)
        assert (await other).status_code == 200
        metrics = (await running.admin.get("/metrics")).text
        assert f'warmpath_queue_refusals_total{{model="{MODEL}",reason="full"}} 1.0' in metrics
        assert f'warmpath_queue_refusals_total{{model="{MODEL}",reason="displaced"}} 1.0' in metrics
        assert f'warmpath_wanted_replicas{{model="{MODEL}"}}' in metrics


async def test_nobody_waits_longer_than_the_deadline(tmp_path: Path) -> None:
    async with saturated(tmp_path, deadline_s=0.2) as (running, _, _gated):
        answer = await running.chat("late")

        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "capacity")


async def test_a_client_that_leaves_the_queue_leaves_nothing_in_it(tmp_path: Path) -> None:
    async with saturated(tmp_path) as (running, replica, _):
        leaving = asyncio.create_task(running.chat("leaves"))
        await queued(running, 1)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving

        await queued(running, 0)
        assert len(replica.seen) == 1


async def test_a_bug_in_a_decision_ends_the_request_that_met_it_and_nobody_elses_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saturated(tmp_path) as (running, replica, gated), asyncio.TaskGroup() as tasks:
        router, met = running.gateway.knowledge.router, False
        unlucky = tasks.create_task(running.chat("unlucky"))
        await queued(running, 1)
        lucky = tasks.create_task(running.chat("luckier"))  # no shorter, or it would pass
        await queued(running, 2)
        begin = router.begin

        def begins(*asked: Any) -> Reservation:
            nonlocal met
            if met:
                return begin(*asked)
            met = True
            raise RuntimeError("a bug")

        monkeypatch.setattr(router, "begin", begins)
        gated.next()

        assert (await unlucky).status_code == 500
        await eventually(lambda: len(replica.seen) == 2)
        gated.next()
        assert (await lucky).status_code == 200


async def test_explain_says_that_a_request_would_wait(tmp_path: Path) -> None:
    async with saturated(tmp_path) as (running, _, _gated):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        asked = await running.admin.post("/admin/v1/explain", json=body)

        assert asked.json()["queued"] is True


async def test_a_request_that_met_a_busy_replica_waits_until_it_is_not(tmp_path: Path) -> None:
    async with stub(writes(response(429, b"{}", "retry-after: 1"))) as replica, gateway(tmp_path, replica) as running:
        answer = asyncio.create_task(running.chat())
        await queued(running, 1)
        replica.answer = says("at last")

        assert (await answer).json()["choices"][0]["message"]["content"] == "at last"
        assert len(replica.seen) == 2
        await nothing_is_left(running)


async def test_a_stream_that_waits_is_kept_alive_and_its_refusal_is_an_event(tmp_path: Path) -> None:
    gated = Gated(writes(STREAM_HEAD, chunked(event("hi", "stop")), chunked(DONE), b"0\r\n\r\n"))
    stream = {"commit_after_s": 0.05, "ping_s": 0.05}
    async with (
        stub(gated) as replica,
        gateway(tmp_path, replica, routing=SLOW, stream=stream, admission={"deadline_s": 0.5}) as running,
    ):
        is_measured(running)
        first = asyncio.create_task(running.chat("first " * 200, stream=True))
        await eventually(lambda: len(replica.seen) == 1)
        waited = await running.chat(stream=True)
        gated.next()

        assert waited.status_code == 200
        assert b": ping" in waited.content
        assert b'"code":"capacity"' in waited.content
        assert b"[DONE]" not in waited.content
        assert (await first).status_code == 200
        await nothing_is_left(running)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({"x-warmpath-priority": "urgent"}, 400), ({"x-gateway-inference-objective": "anything"}, 200)],
)
async def test_a_priority_that_is_none_is_refused_but_an_objective_may_have_any_name(
    tmp_path: Path, asked: dict[str, str], expected: int
) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        answer = await ask(running, running.key, "hi", **asked)

        assert answer.status_code == expected


async def test_batch_waits_for_the_rest_and_nobody_gets_above_its_tenant(tmp_path: Path) -> None:
    async with saturated(tmp_path) as (running, replica, gated), asyncio.TaskGroup() as tasks:
        asked = [("batch", "batch"), ("plain", "default"), ("pushy", "interactive")]
        for number, (name, priority) in enumerate(asked):
            tasks.create_task(ask(running, running.key, f"{name} ", **{"x-warmpath-priority": priority}))
            await queued(running, number + 1)
        for served in range(2, 5):
            gated.next()
            await eventually(lambda served=served: len(replica.seen) >= served)  # type: ignore[misc]
        gated.next()

    order = [seen.json["messages"][0]["content"].split()[0] for seen in replica.seen]
    assert order[1:] == ["plain", "pushy", "batch"]


async def test_new_settings_hold_for_who_waits_already(tmp_path: Path) -> None:
    async with saturated(tmp_path) as (running, replica, gated), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(ask(running, await key_of(running, "a"), "one "))
        await queued(running, 1)

        running.gateway.data.admission.configure(GateSettings(ahead_s=1e6, max_wait_s=1e6))

        await eventually(lambda: len(replica.seen) == 2)
        assert not waiting.done(), "the replica has it, and does not answer yet"
        gated.next(2)
