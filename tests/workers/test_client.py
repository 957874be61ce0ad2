"""One set of promises over both clients: an engine in its own process, and one in this event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvloop

from router.wire import unpack_ids
from tests.workers.fake_engine_process import BehavingRunner, make_args
from tests.workers.fake_runner import VOCAB, answer, make_info, make_submit
from workers.client import (
    EngineBusy,
    EngineClient,
    EngineDead,
    Generation,
    InProcessEngineClient,
    ProcessEngineClient,
    QueueLimits,
)
from workers.engine import Engine
from workers.protocol import Abort, Output, StepReport, Submit, ToEngine
from workers.simulated import SimulatedRunner, TimeModel, simulated_info

DEADLINE_S = 10.0
PROMPT = list(range(10))

Start = Callable[..., Awaitable[EngineClient]]


def make_process_client(model: str = "fake", **options: object) -> ProcessEngineClient:
    return ProcessEngineClient(make_args(model), module="tests.workers.fake_engine_process", **options)  # type: ignore[arg-type]


def make_in_process_client(model: str = "fake", **options: object) -> InProcessEngineClient:
    return InProcessEngineClient(Engine(BehavingRunner(model)), **options)  # type: ignore[arg-type]


@pytest.fixture(params=[make_process_client, make_in_process_client], ids=["process", "in_process"])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    clients: list[EngineClient] = []

    async def start_one(model: str = "fake", **options: object) -> EngineClient:
        client: EngineClient = request.param(model, **options)
        clients.append(client)
        assert await client.start() == make_info()
        assert client.alive
        return client

    yield start_one
    for client in clients:
        await client.stop()


@asynccontextmanager
async def running(client: EngineClient) -> AsyncIterator[EngineClient]:
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


class Reports:
    """The last report, and a way to wait for one."""

    def __init__(self, client: EngineClient) -> None:
        self.last: StepReport | None = None
        self._came = asyncio.Event()
        client.listen(self._take)

    def _take(self, report: StepReport) -> None:
        self.last = report
        self._came.set()

    async def wait_for(self, condition: Callable[[StepReport], bool]) -> StepReport:
        async with asyncio.timeout(DEADLINE_S):
            while self.last is None or not condition(self.last):
                self._came.clear()
                await self._came.wait()
        return self.last


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what it waits for tells nobody
            await asyncio.sleep(0.005)


async def read(generation: Generation) -> tuple[list[int], Output]:
    ids: list[int] = []
    async with asyncio.timeout(DEADLINE_S), generation:
        async for output in generation:
            ids += output.ids
    return ids, output


def expected(submit: Submit) -> list[int]:
    return answer(unpack_ids(submit.prompt), submit.sampling, 10_000)


async def test_requests_at_once_each_get_their_answer(start: Start) -> None:
    client = await start()
    submits = [make_submit(rid, range(rid, rid + 12), max_tokens=9, seed=rid) for rid in range(12)]

    answers = await asyncio.gather(*(read(client.submit(submit)) for submit in submits))

    assert [ids for ids, _ in answers] == [expected(submit) for submit in submits]


async def test_a_rejected_request_gets_one_output_that_says_why(start: Start) -> None:
    client = await start()

    ids, last = await read(client.submit(make_submit(1, [VOCAB])))

    assert (ids, last.finish_reason) == ([], "rejected")
    assert "vocabulary" in last.message


async def test_leaving_early_aborts(start: Start) -> None:
    client = await start("slow")
    reports = Reports(client)

    async with client.submit(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True)) as generation:
        async for _ in generation:
            break

    idle = await reports.wait_for(lambda report: report.running == 0 and report.generated_tokens_total > 0)
    assert idle.kv_used_blocks == 0
    assert idle.generated_tokens_total < 200
    assert [output async for output in generation] == []


class RecordingClient(InProcessEngineClient):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.sent: list[ToEngine] = []

    def _send(self, message: ToEngine) -> None:
        self.sent.append(message)
        super()._send(message)


async def test_a_request_that_has_ended_is_not_aborted_and_one_left_early_only_once() -> None:
    async with running(client := RecordingClient(Engine(BehavingRunner("fake")))):
        ended, left = make_submit(1, PROMPT), make_submit(2, PROMPT)
        await read(client.submit(ended))
        async with client.submit(left) as generation:
            pass
        await generation.__aexit__(None, None, None)

        assert client.sent == [ended, left, Abort(rid=2)]


async def test_a_cancelled_reader_aborts(start: Start) -> None:
    client = await start("slow")
    reports = Reports(client)
    reader = asyncio.create_task(read(client.submit(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True))))
    await reports.wait_for(lambda report: report.running == 1)

    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader

    await reports.wait_for(lambda report: report.running == 0)


async def test_a_full_queue_is_busy_until_somebody_begins(start: Start) -> None:
    client = await start("slow", limits=QueueLimits(max_requests=2))
    waiting = [client.submit(make_submit(rid, PROMPT, max_tokens=2)) for rid in range(2)]

    with pytest.raises(EngineBusy) as caught:
        client.submit(make_submit(2, PROMPT))
    assert caught.value.retry_after_s >= 1.0
    assert str(caught.value) == "2 requests with 20 prompt tokens are waiting"

    await asyncio.gather(*(read(generation) for generation in waiting))
    await read(client.submit(make_submit(3, PROMPT)))


async def test_one_prompt_over_the_bound_of_tokens_is_taken_when_nobody_waits(start: Start) -> None:
    client = await start("slow", limits=QueueLimits(max_prompt_tokens=5))

    async with client.submit(make_submit(1, PROMPT)):
        with pytest.raises(EngineBusy):
            client.submit(make_submit(2, [1]))
    async with client.submit(make_submit(3, PROMPT)):  # whoever left is no longer in the queue
        pass


async def test_the_choices_of_a_prompt_count_it_once(start: Start) -> None:
    client = await start("slow", limits=QueueLimits(max_prompt_tokens=2 * len(PROMPT) - 1))
    first, second, other = (make_submit(rid, PROMPT) for rid in (1, 2, 3))
    second = msgspec.structs.replace(second, sampling=msgspec.structs.replace(second.sampling, choice=1))

    async with client.submit(first), client.submit(second):
        with pytest.raises(EngineBusy):
            client.submit(other)


async def test_a_listener_hears_a_report_before_its_outputs_are_handed_out(start: Start) -> None:
    client = await start()
    heard: set[int] = set()

    def broken(report: StepReport) -> None:
        raise RuntimeError("a bug in a listener")

    client.listen(broken)
    client.listen(lambda report: heard.update(output.rid for output in report.outputs))
    async with client.submit(make_submit(7, PROMPT)) as generation:
        async for output in generation:
            assert output.rid in heard


async def test_an_idle_engine_keeps_reporting(start: Start) -> None:
    client = await start()
    times: list[float] = []
    client.listen(lambda _: times.append(client.last_tick))

    await wait_until(lambda: len(times) == 3)

    assert times[1] - times[0] < 2.0
    assert times[0] < times[1] <= time.monotonic()


async def test_stop_ends_open_generations_and_later_requests_are_refused(start: Start) -> None:
    client = await start("slow")
    async with client.submit(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True)) as generation:
        await anext(generation)
        await client.stop()
        last = [output async for output in generation][-1]
        await client.stop()

    assert (last.finish_reason, last.message) == ("error", "the engine was stopped")
    assert not client.alive
    with pytest.raises(EngineDead, match="was stopped"):
        client.submit(make_submit(2, PROMPT))


async def test_an_engine_whose_steps_fail_says_why_it_ended(start: Start) -> None:
    client = await start("fails")
    _, first = await read(client.submit(make_submit(1, PROMPT)))

    assert first.message == "MemoryError: no room for activations"
    await wait_until(lambda: not client.alive)  # its own probe has failed too
    with pytest.raises(EngineDead, match="2 steps in a row failed, the last one with MemoryError"):
        client.submit(make_submit(2, PROMPT))


async def test_a_request_before_the_start_is_refused() -> None:
    with pytest.raises(EngineDead, match="has not started"):
        make_process_client().submit(make_submit(1, PROMPT))


def pid_of(client: ProcessEngineClient) -> int:
    assert client._process is not None
    return client._process.pid


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("model", "reason"),
    [("cannot start", "^the model file is broken$"), ("dies at start", "^the engine process exited with 3$")],
)
async def test_an_engine_process_that_cannot_start_says_why(model: str, reason: str) -> None:
    client = make_process_client(model)

    with pytest.raises(EngineDead, match=reason):
        await client.start()

    assert is_gone(pid_of(client))


async def test_an_engine_process_that_does_not_get_ready_is_killed() -> None:
    client = make_process_client("hangs at start", start_timeout_s=0.5, stop_timeout_s=0.2)

    with pytest.raises(EngineDead, match=r"not ready after 0\.5 s"):
        await client.start()

    assert is_gone(pid_of(client))


async def test_a_cancelled_start_leaves_no_process() -> None:
    client = make_process_client("hangs at start", stop_timeout_s=0.2)
    starting = asyncio.create_task(client.start())
    await wait_until(lambda: client._process is not None)

    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert is_gone(pid_of(client))


async def test_a_killed_engine_process_ends_open_generations_with_the_reason() -> None:
    async with running(client := make_process_client("slow")):
        async with client.submit(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True)) as generation:
            await anext(generation)
            os.kill(pid_of(client), signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                last = [output async for output in generation][-1]

        assert (last.finish_reason, last.message) == ("error", "the engine process was killed by signal 9")
        assert not client.alive
    with pytest.raises(EngineDead, match="killed by signal 9"):  # also after it was stopped
        client.submit(make_submit(2, PROMPT))


async def test_stop_kills_an_engine_process_that_hangs_in_a_step() -> None:
    client = make_process_client("hangs", stop_timeout_s=0.2)
    await client.start()
    generation = client.submit(make_submit(1, PROMPT))
    stopping = asyncio.create_task(client.stop())

    _, last = await read(generation)
    await asyncio.wait_for(stopping, DEADLINE_S)

    assert last.finish_reason == "error"
    assert is_gone(pid_of(client))


def test_the_loop_of_the_server_does_as_well() -> None:
    """uvloop has subprocesses and streams of its own."""

    async def answer_and_hang() -> None:
        async with running(client := make_process_client()):
            submit = make_submit(1, PROMPT)
            ids, _ = await read(client.submit(submit))
            assert ids == expected(submit)
        assert is_gone(pid_of(client))
        await test_a_killed_engine_process_ends_open_generations_with_the_reason()
        await test_stop_kills_an_engine_process_that_hangs_in_a_step()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(answer_and_hang())


def make_simulated_client(time_model: TimeModel) -> InProcessEngineClient:
    runner = SimulatedRunner(simulated_info(kv_tokens=4096), time_model)
    return InProcessEngineClient(Engine(runner, token_budget=2048, clock=runner.clock))


async def test_a_simulated_engine_shows_tokens_at_its_pace() -> None:
    async with running(client := make_simulated_client(TimeModel(prefill_s=0.05, decode_s=0.01))):
        began = time.monotonic()
        async with client.submit(make_submit(1, PROMPT, max_tokens=11, ignore_eos=True)) as generation:
            times = [time.monotonic() - began async for _ in generation]

    early = 0.002  # timers of event loops have milliseconds
    assert times[0] >= 0.05 - early
    assert times[-1] >= 0.05 + 10 * 0.01 - early


async def test_many_simulated_engines_share_a_loop() -> None:
    clients = [make_simulated_client(TimeModel(speedup=50)) for _ in range(32)]
    for client in clients:
        await client.start()

    answers = await asyncio.gather(*(read(client.submit(make_submit(1, PROMPT, max_tokens=20))) for client in clients))
    await asyncio.gather(*(client.stop() for client in clients))

    assert {tuple(ids) for ids, _ in answers} == {tuple(answers[0][0])}


async def test_who_finds_the_queue_full_is_told_when_half_of_it_will_be_done() -> None:
    runner = SimulatedRunner(simulated_info(), TimeModel(prefill_s=0.0, prefill_token_s=0.001))  # 1000 tokens a second
    engine = Engine(runner, token_budget=64, clock=runner.clock)
    async with running(client := InProcessEngineClient(engine, limits=QueueLimits(max_prompt_tokens=8000))):
        await read(client.submit(make_submit(1, range(16), max_tokens=1)))

        async with client.submit(make_submit(2, range(8000))):
            with pytest.raises(EngineBusy) as caught:
                client.submit(make_submit(3, [1]))

    assert caught.value.retry_after_s == pytest.approx(4.0)


async def test_a_simulated_engine_hands_out_its_first_token_at_once_and_then_chunks() -> None:
    runner = SimulatedRunner(simulated_info(), TimeModel(speedup=1000))
    client = InProcessEngineClient(Engine(runner, clock=runner.clock), tokens_per_chunk=4)
    async with running(client), client.submit(make_submit(1, PROMPT, max_tokens=11)) as generation:
        outputs = [output async for output in generation]

    assert [len(output.ids) for output in outputs] == [1, 4, 4, 2]
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
