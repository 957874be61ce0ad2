"""Each fault as a client meets it, over a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.prompt import TokenizerFiles
from router.wire import Batch, Frame, FrameDecoder, Hello
from tests.replicas import CREDENTIAL, running, simulated_runner
from tests.serving import eventually
from workers.client import InProcessEngineClient
from workers.faults import parse_fault
from workers.faulty import CONTROL_PATH, FaultyReplica
from workers.simulated import SimulatedRunner, engine_over

TEXT = "/v1/completions"


class Faulty:
    def __init__(self, http: httpx.AsyncClient, runner: SimulatedRunner) -> None:
        self.http = http
        self.runner = runner
        self.deaths = 0

    def die(self) -> None:
        self.deaths += 1

    async def set(self, *faults: str) -> None:
        (await self.http.put(CONTROL_PATH, json={"faults": faults})).raise_for_status()

    async def complete(self, prompt: str = "hello", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "seed": 1, **fields}
        return await self.http.post(TEXT, json=body)

    async def running(self) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


@asynccontextmanager
async def faulty(*faults: str, speedup: float = 200.0) -> AsyncIterator[Faulty]:
    runner = simulated_runner(speedup=speedup)
    parsed = [parse_fault(text) for text in faults]
    headers = {"authorization": f"Bearer {CREDENTIAL}"}
    async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
        replica = Faulty(http, runner)
        async with running(
            InProcessEngineClient(engine_over(runner)),
            TokenizerFiles(kind="trivial"),
            finish=lambda app: FaultyReplica(app, runner, faults=parsed, credential=CREDENTIAL, die=replica.die),
        ) as served:
            http.base_url = httpx.URL(served.base_url)
            yield replica


async def pieces_until_it_breaks(replica: Faulty, timeout_s: float = 5.0) -> tuple[str, str]:
    """What a stream said, and how it ended: "end", "cut" or "silence"."""
    body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "stream": True}
    said, ending = "", "end"
    timeout = httpx.Timeout(5, read=timeout_s)
    async with replica.http.stream("POST", TEXT, json=body, timeout=timeout) as answer:
        assert answer.status_code == 200
        try:
            async for piece in answer.aiter_text():
                said += piece
        except httpx.RemoteProtocolError:
            ending = "cut"
        except httpx.ReadTimeout:
            ending = "silence"
    return said, ending


async def test_without_a_fault_it_is_the_replica_itself() -> None:
    async with faulty() as replica:
        assert (await replica.complete()).json()["usage"]["completion_tokens"] == 4
        said, ending = await pieces_until_it_breaks(replica)

    assert said.endswith("data: [DONE]\n\n")
    assert ending == "end"


@pytest.mark.parametrize(
    ("fault", "status", "retry_after"),
    [("500", 500, None), ("503", 503, None), ("503=2", 503, "2"), ("429", 429, None), ("429=0.5", 429, "1")],
)
async def test_a_refusal_has_its_status_and_openais_shape(fault: str, status: int, retry_after: str | None) -> None:
    async with faulty(fault) as replica:
        answer = await replica.complete()

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "simulated_fault"
    assert answer.headers.get("retry-after") == retry_after


async def test_garbage_comes_with_a_200() -> None:
    async with faulty("html:1", "broken-json:2", "short:3") as replica:
        page, half = await replica.complete(), await replica.complete()
        with pytest.raises(httpx.RemoteProtocolError):
            await replica.complete()
        whole = await replica.complete()

    assert page.headers["content-type"] == "text/html"
    assert half.status_code == 200
    with pytest.raises(ValueError, match="Unterminated"):
        half.json()
    assert whole.json()["usage"]


async def test_a_line_without_an_end_goes_on_until_the_client_leaves() -> None:
    async with faulty("endless-line:1") as replica:
        size = 0
        async with replica.http.stream("POST", TEXT, json={"prompt": "hello"}) as answer:
            async for piece in answer.aiter_bytes():
                assert b"\n" not in piece
                size += len(piece)
                if size > 1 << 20:
                    break
        assert (await replica.complete()).status_code == 200


@pytest.mark.parametrize(
    ("fault", "ending"), [("hang-after=2", "silence"), ("cut-after=2", "cut"), ("end-after=2", "end")]
)
async def test_a_stream_breaks_after_so_many_pieces_and_the_engine_is_free_again(fault: str, ending: str) -> None:
    async with faulty(f"{fault}:1") as replica:
        said, how = await pieces_until_it_breaks(replica, timeout_s=0.3)

        assert how == ending
        assert said.count("data: ") == 2
        assert "[DONE]" not in said
        async with asyncio.timeout(30):
            while await replica.running():  # noqa: ASYNC110 - the replica tells it only when asked
                await asyncio.sleep(0.01)


async def test_a_hung_request_is_never_answered_and_others_are() -> None:
    async with faulty("hang:1") as replica:
        with pytest.raises(httpx.ReadTimeout):
            await replica.http.post(TEXT, json={"prompt": "hello"}, timeout=0.3)
        assert (await replica.complete()).status_code == 200


async def test_death_is_asked_for_at_once_or_after_so_many_pieces() -> None:
    async with faulty("die:1", "die-after=2:2") as replica:
        await replica.complete()  # the test's process lives on
        assert replica.deaths == 1

        await pieces_until_it_breaks(replica)
        assert replica.deaths > 1


async def test_a_delay_comes_before_the_answer() -> None:
    async with faulty("delay=0.2") as replica:
        began = time.monotonic()
        answer = await replica.complete()

    assert answer.status_code == 200
    assert time.monotonic() - began >= 0.2


async def test_a_slow_replica_takes_longer_for_every_step_and_knows_it() -> None:
    async with faulty() as replica:
        await replica.complete("a" * 4000)
        before = replica.runner.clock()
        await replica.set("slow=10")
        await replica.complete("b" * 4000)
        slow_s = replica.runner.clock() - before

        await replica.set()
        await replica.complete("c" * 4000)
        again_s = replica.runner.clock() - before - slow_s

    assert slow_s == pytest.approx(10 * before, rel=0.01)
    assert again_s == pytest.approx(before, rel=0.01)


async def test_faults_change_while_it_runs_and_counting_begins_anew() -> None:
    async with faulty("503:1") as replica:
        assert (await replica.complete()).status_code == 503
        assert (await replica.complete()).status_code == 200

        await replica.set("500:1")

        assert (await replica.complete()).status_code == 500
        assert (await replica.complete()).status_code == 200
        (told,) = (await replica.http.get(CONTROL_PATH)).json()["faults"]
        assert (told["kind"], told["hits"]) == ("500", 1)


async def test_only_gateways_set_faults_and_wrong_ones_change_nothing() -> None:
    async with faulty("503") as replica:
        stranger = await replica.http.put(CONTROL_PATH, json={"faults": []}, headers={"authorization": "Bearer x"})
        wrong = await replica.http.put(CONTROL_PATH, json={"faults": ["hang", "explode"]})
        shapeless = await replica.http.put(CONTROL_PATH, json=["hang"])
        deleted = await replica.http.delete(CONTROL_PATH)

        assert [answer.status_code for answer in (stranger, wrong, shapeless, deleted)] == [401, 400, 400, 405]
        assert "'explode' is no fault" in wrong.json()["error"]["message"]
        assert (await replica.complete()).status_code == 503


# --- the event stream ------------------------------------------------------------------------------------------------


class Events:
    """The frames of an event stream, as they come."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.ended = False

    @property
    def seqs(self) -> list[int]:
        return [frame.seq for frame in self.frames if isinstance(frame, Batch)]

    @property
    def hellos(self) -> list[Hello]:
        return [frame for frame in self.frames if isinstance(frame, Hello)]


@asynccontextmanager
async def events_of(replica: Faulty, query: str = "") -> AsyncIterator[Events]:
    events = Events()

    async def read() -> None:
        decoder = FrameDecoder()
        try:
            async with replica.http.stream("GET", f"/kv_events{query}") as answer:
                async for data in answer.aiter_raw():
                    events.frames += decoder.feed(data)
        except httpx.RemoteProtocolError:
            pass
        events.ended = True

    task = asyncio.create_task(read())
    try:
        await eventually(lambda: bool(events.hellos))
        yield events
    finally:
        task.cancel()
        await asyncio.wait([task])


async def make_batches(replica: Faulty, count: int) -> None:
    """Each prompt of a whole block is stored in a step of its own: one batch."""
    for number in range(count):
        await replica.complete(f"{number:04} " + "x" * 60, max_tokens=1)


@pytest.mark.parametrize(
    ("fault", "seqs"),
    [
        ("drop-events:2-3", [1, 4, 5]),
        ("repeat-events:2", [1, 2, 2, 3, 4, 5]),
        ("reorder-events:*/2", [1, 3, 2, 5, 4]),
        ("cut-events:3", [1, 2]),
        ("slow-events=0.1:1", [1, 2, 3, 4, 5]),
    ],
)
async def test_batches_are_lost_repeated_swapped_late_or_the_end(fault: str, seqs: list[int]) -> None:
    async with faulty() as replica, events_of(replica) as events:
        await replica.set(fault)  # while the stream is open
        await make_batches(replica, 5)

        await eventually(lambda: events.seqs == seqs)
        if fault.startswith("cut"):
            await eventually(lambda: events.ended)


async def test_a_restart_is_a_new_epoch_that_begins_at_the_first_batch() -> None:
    async with faulty() as replica:
        await make_batches(replica, 3)
        async with events_of(replica) as before:
            await eventually(lambda: before.seqs == [1, 2, 3])
        epoch = before.hellos[0].epoch

        await replica.set("new-epoch:1")
        async with events_of(replica, f"?epoch={epoch}&after=3") as restarted:
            await eventually(lambda: restarted.seqs == [1, 2, 3])
        async with events_of(replica, f"?epoch={epoch}&after=3") as after:
            assert after.seqs == []

    assert restarted.hellos[0].epoch != epoch == after.hellos[0].epoch
