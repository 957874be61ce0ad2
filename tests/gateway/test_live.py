"""The live state: how many watch costs nothing more, who does not take it is cut, and nothing is left of anybody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Message

from gateway.admin import live as live_module
from gateway.admin.bodies import ReplicaBody, RequestRates
from gateway.admin.live import Live, RateMeter, ServerSentEvents
from gateway.api_error import ApiError
from gateway.processes.control import Ended, encode
from gateway.processes.supervising import counting
from tests.gateway.stub import Running, gateway, says, stub
from tests.serving import eventually

IDLE = RequestRates(0, 0, 0.0, 0.0)


def a_replica(replica_id: str, inflight: int = 0) -> ReplicaBody:
    defaults: dict[str, Any] = dict.fromkeys(ReplicaBody.__struct_fields__)
    return ReplicaBody(**defaults | {"id": replica_id, "inflight": inflight})


class Fleet:
    """What there is to see, and how often it was looked at."""

    def __init__(self) -> None:
        self.replicas = {"a": a_replica("a"), "b": a_replica("b")}
        self.rates = IDLE
        self.reads = 0
        self.live = Live(self.read, lambda: 0.0, tick_s=0.001)

    def read(self) -> tuple[list[ReplicaBody], RequestRates]:
        self.reads += 1
        return list(self.replicas.values()), self.rates


class Client:
    """The far end of one stream; takes what it is given unless told not to."""

    def __init__(self, live: Live) -> None:
        self.messages: list[Message] = []
        self.taking = asyncio.Event()
        self.taking.set()
        self.leave = asyncio.Event()
        self._task = asyncio.create_task(ServerSentEvents(live)(SCOPE, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.taking.wait()
        self.messages.append(message)

    @property
    def events(self) -> list[tuple[str, Any]]:
        lines = [message["body"].decode().split("\n") for message in self.messages[1:] if message["body"]]
        return [
            (name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: ")))
            for name, data, *_ in lines
            if name.startswith("event: ")
        ]

    @property
    def ended(self) -> bool:
        return not self.messages[-1].get("more_body", True)

    async def over(self) -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(self._task, return_exceptions=True)


SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "headers": []}


async def test_first_everything_then_only_what_differs() -> None:
    fleet = Fleet()
    client = Client(fleet.live)
    await eventually(lambda: len(client.events) == 1)
    fleet.replicas["b"] = a_replica("b", inflight=3)
    await eventually(lambda: len(client.events) == 2)
    del fleet.replicas["a"]
    fleet.replicas["c"] = a_replica("c")
    await eventually(lambda: len(client.events) == 3)
    fleet.rates = RequestRates(1, 2, 3.0, 0.5)
    await eventually(lambda: len(client.events) == 4)
    reads = fleet.reads
    await eventually(lambda: fleet.reads > reads + 5)  # looked at again, and nothing to say
    client.leave.set()
    await client.over()

    (state, first), (change, second), (_, third), (_, fourth) = client.events
    assert (state, change) == (first["type"], second["type"]) == ("state", "change")
    assert [replica["id"] for replica in first["replicas"]] == ["a", "b"]
    assert [(replica["id"], replica["inflight"]) for replica in second["replicas"]] == [("b", 3)]
    assert ([replica["id"] for replica in third["replicas"]], third["left"]) == (["c"], ["a"])
    assert (fourth["replicas"], fourth["left"]) == ([], [])
    assert fourth["requests"] == {"in_flight": 1, "queued": 2, "per_s": 3.0, "failed_per_s": 0.5}


async def test_many_who_watch_share_one_look_and_one_text() -> None:
    fleet = Fleet()
    clients = [Client(fleet.live) for _ in range(30)]
    await eventually(lambda: all(client.events for client in clients))
    reads = fleet.reads
    fleet.replicas["a"] = a_replica("a", inflight=1)
    await eventually(lambda: all(len(client.events) == 2 for client in clients))

    looks = fleet.reads - reads
    texts = {id(client.messages[-1]["body"]) for client in clients}
    for client in clients:
        client.leave.set()
        await client.over()

    assert looks < 30
    assert len(texts) == 1


async def test_nobody_watches_and_nothing_is_looked_at() -> None:
    fleet = Fleet()
    assert fleet.reads == 0
    client = Client(fleet.live)
    await eventually(lambda: bool(client.events))
    client.leave.set()
    await client.over()

    reads = fleet.reads
    await asyncio.sleep(0.02)

    assert fleet.reads == reads
    assert len(fleet.live) == 0
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "live state"]


async def test_a_slow_reader_is_cut_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_module, "_STALL_S", 0.02)
    fleet = Fleet()
    slow, quick = Client(fleet.live), Client(fleet.live)
    await eventually(lambda: bool(slow.events and quick.events))
    slow.taking.clear()

    for number in range(1, 50):
        fleet.replicas["a"] = a_replica("a", inflight=number)
        await eventually(lambda seen=number: quick.events[-1][1]["replicas"][0]["inflight"] == seen)  # type: ignore[misc]
    await slow.over()

    assert not slow.ended, "the connection is broken, not ended: what it has is not whole"
    assert "was cut" in caplog.text
    assert len(fleet.live) == 1
    quick.leave.set()
    await quick.over()


async def test_one_who_falls_behind_holds_a_bounded_number_of_events() -> None:
    fleet = Fleet()
    async with fleet.live.watch() as stream:
        for number in range(200):
            stream.offer(b"%d" % number)

        taken = [await stream.take() for _ in range(33)]

    assert taken[-1] is None
    assert stream.is_behind


async def test_all_streams_end_when_the_gateway_is_to_stop() -> None:
    fleet = Fleet()
    client = Client(fleet.live)
    await eventually(lambda: bool(client.events))

    fleet.live.close()
    await client.over()

    assert client.ended
    with pytest.raises(ApiError) as refused:
        async with fleet.live.watch():
            pass
    assert refused.value.status == 503


async def test_only_so_many_may_watch() -> None:
    fleet = Fleet()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(64):
            await stack.enter_async_context(fleet.live.watch())
        with pytest.raises(ApiError) as refused:
            await stack.enter_async_context(fleet.live.watch())

    assert (refused.value.status, refused.value.code) == (503, "too_many_streams")
    assert len(fleet.live) == 0


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "_PING_S", 0.01)
    client = Client(Fleet().live)

    await eventually(lambda: b": ping\n\n" in [message.get("body") for message in client.messages])

    client.leave.set()
    await client.over()


def test_a_rate_is_that_of_the_last_whole_seconds() -> None:
    meter = RateMeter()
    for tick in range(300):
        meter.add(1, int(tick % 3 == 0), 100 + tick / 10)

    assert meter.per_s(130.0) == pytest.approx((10.0, 10 / 3), abs=0.05)
    assert meter.per_s(135.5)[0] == pytest.approx(10 * 4 / 9)
    assert meter.per_s(1000.0) == (0.0, 0.0)


def test_a_process_that_tells_its_totals_is_counted_once_from_its_start_on() -> None:
    meter, now = RateMeter(), 100.0
    one, other = counting(meter, lambda: now), counting(meter, lambda: now)

    one(encode(Ended(9, 0)))
    one(encode(Ended(9, 0)))
    other(encode(Ended(9, 3)))
    now = 101.0
    one(encode(Ended(18, 6)))
    restarted = counting(meter, lambda: now)
    restarted(encode(Ended(9, 0)))

    assert meter.per_s(102.0) == (4.0, 1.0)
    assert (meter.requests, meter.failures) == (36, 9)


# --- over real sockets


@contextlib.asynccontextmanager
async def watching(running: Running) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    async with running.admin.stream("GET", "/admin/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()

        async def next_event() -> Any:
            async for line in lines:
                if line.startswith("data: "):
                    return msgspec.json.decode(line.removeprefix("data: "))
            return None

        yield next_event


async def test_a_dashboard_sees_requests_and_drains_as_they_happen(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running, watching(running) as next_event:
        replica_id = f"127-0-0-1-{replica.port}"
        first = await next_event()
        await running.admin.post(f"/admin/v1/replicas/{replica_id}/drain", json={})
        async with asyncio.timeout(30):
            while not (event := await next_event())["replicas"]:
                pass

        assert [found["id"] for found in first["replicas"]] == [replica_id]
        assert event["replicas"][0]["drain"]["done"]

        running.gateway.live.close()
        async with asyncio.timeout(30):
            while await next_event() is not None:
                pass


async def test_a_client_that_leaves_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        async with watching(running) as next_event:
            await next_event()
            assert len(running.gateway.live) == 1
        await eventually(lambda: len(running.gateway.live) == 0)
        head = await running.admin.head("/admin/v1/events")
        assert head.status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            await running.admin.get("/admin/v1/events", timeout=0.3)
        await eventually(lambda: len(running.gateway.live) == 0)
    assert "failed" not in caplog.text, "leaving is no fault"


async def test_a_look_that_fails_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    client = Client(fleet.live)
    await eventually(lambda: bool(client.events))
    rates, fleet.rates = fleet.rates, None  # type: ignore[assignment]
    await eventually(lambda: "telling the live state failed" in caplog.text)

    fleet.rates = rates
    fleet.replicas["a"] = a_replica("a", inflight=7)
    await eventually(lambda: client.events[-1][1]["replicas"][0]["inflight"] == 7)

    client.leave.set()
    await client.over()
