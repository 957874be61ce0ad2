"""What a replica's server does where it is not like the one of the contract tests: shut to strangers, busy, hung or dead."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message

from router.prompt import TokenizerFiles, load_prompter
from router.trivial import TrivialTokenizer
from router.wire import unpack_ids
from tests.serving import eventually, serving
from workers.client import EngineClient, InProcessEngineClient, QueueLimits
from workers.engine import Engine
from workers.protocol import EngineInfo
from workers.server import ReplicaApp
from workers.simulated import SimulatedRunner, TimeModel, simulated_info
from workers.step import RowResult, ScheduledSeq

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
    "ignore_eos": True,
    "seed": 1,
}


def engine_over(runner: SimulatedRunner, limits: QueueLimits | None = None) -> InProcessEngineClient:
    return InProcessEngineClient(Engine(runner, clock=runner.clock), limits=limits or QueueLimits())


def quick_runner(speedup: float = 1000.0) -> SimulatedRunner:
    return SimulatedRunner(simulated_info(kv_tokens=1 << 12, max_model_len=1024), TimeModel(speedup=speedup))


@asynccontextmanager
async def replica(
    engine: EngineClient, *, on_loopback: bool = True
) -> AsyncIterator[tuple[httpx.AsyncClient, ReplicaApp]]:
    """A client without the credential, and the app behind it."""
    files = TokenizerFiles(kind="trivial")
    info = await engine.start()
    try:
        with ThreadPoolExecutor(1) as executor:
            app = ReplicaApp(
                engine=engine,
                info=info,
                files=files,
                prompter=load_prompter(files),
                executor=executor,
                credential="secret",
                on_loopback=on_loopback,
            )
            async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                yield http, app
                app.close_streams()
    finally:
        await engine.stop()


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


def data_of(answer: httpx.Response) -> list[str]:
    return [event.partition("data: ")[2] for event in answer.text.split("\n\n") if event]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/simulated"])
async def test_away_from_loopback_only_gateways_see_the_models(path: str) -> None:
    async with replica(engine_over(quick_runner()), on_loopback=False) as (http, _):
        refused = await http.get(path)
        taken = await http.get(path, headers={"authorization": "Bearer secret"})

    assert (refused.status_code, code_of(refused)) == (401, "invalid_api_key")
    assert taken.status_code == 200


async def test_away_from_loopback_only_gateways_may_generate() -> None:
    async with replica(engine_over(quick_runner()), on_loopback=False) as (http, _):
        for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
            refused = await http.post(path, json=BODY)
            assert (refused.status_code, code_of(refused)) == (401, "invalid_api_key")
        taken = await http.post(CHAT, json=BODY, headers={"authorization": "Bearer secret"})
        probes = [(await http.get(path)).status_code for path in ("/health", "/metrics")]

    assert taken.status_code == 200
    assert probes == [200, 200]


async def test_a_full_queue_says_when_to_come_back() -> None:
    engine = engine_over(quick_runner(speedup=0.01), QueueLimits(max_requests=1))
    async with replica(engine) as (http, app):
        first = asyncio.create_task(http.post(CHAT, json=BODY))
        await eventually(lambda: app.find_fault() is None and engine.alive and bool(engine._queued))

        refused = await http.post(CHAT, json={**BODY, "stream": True})

        assert refused.status_code == 503
        assert code_of(refused) == "engine_busy"
        assert int(refused.headers["retry-after"]) >= 1
        first.cancel()


async def test_of_several_choices_all_are_taken_or_none() -> None:
    engine = engine_over(quick_runner(), QueueLimits(max_requests=2))
    async with replica(engine) as (http, _):
        refused = await http.post(CHAT, json={**BODY, "n": 3})

        assert refused.status_code == 503
        assert not engine._queued
        assert (await http.post(CHAT, json={**BODY, "n": 2})).status_code == 200


async def test_a_dead_engine_is_unhealthy_and_refuses() -> None:
    engine = engine_over(quick_runner())
    async with replica(engine) as (http, _):
        await engine.stop()

        health = await http.get("/health")
        answers = [await http.post(CHAT, json={**BODY, "stream": stream}) for stream in (False, True)]

    assert (health.status_code, code_of(health)) == (503, "unhealthy")
    assert [(answer.status_code, code_of(answer)) for answer in answers] == [(503, "engine_dead")] * 2


async def test_an_engine_that_dies_ends_a_stream_with_an_error_and_without_done() -> None:
    engine = engine_over(quick_runner(speedup=1.0))
    body = {**BODY, "max_tokens": 900, "stream": True}
    async with replica(engine) as (http, _), http.stream("POST", CHAT, json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        await engine.stop()
        rest = [line async for line in lines if line]

    assert answer.status_code == 200
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert "data: [DONE]" not in rest


async def test_an_engine_that_hangs_when_idle_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(quick_runner())
    async with replica(engine) as (_, app):
        assert app.find_fault() is None

        monkeypatch.setattr(type(engine), "last_tick", property(lambda _: -1e9))

        fault = app.find_fault()
    assert fault is not None
    assert "not reported" in fault


async def test_a_request_does_not_make_a_hung_engine_look_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(quick_runner())
    async with replica(engine) as (http, app):
        monkeypatch.setattr(type(engine), "last_tick", property(lambda _: time.monotonic() - 3))

        answers = [await http.post(CHAT, json={**BODY, "stream": stream}) for stream in (False, True)]

        assert app.find_fault() is not None
    assert [(answer.status_code, code_of(answer)) for answer in answers] == [(503, "unhealthy")] * 2


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize"])
async def test_a_client_that_leaves_within_its_body_is_no_fault_of_ours(path: str) -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """As the server does when the connection is closed."""

    async with replica(engine_over(quick_runner())) as (_, app):
        await app(scope, receive, send)  # what it raises the server logs as a bug


class _Scripted(SimulatedRunner):
    """Says what a test wants, by position in the answer."""

    def __init__(self, info: EngineInfo, say: Callable[[int], int]) -> None:
        super().__init__(info, TimeModel(speedup=1000))
        self._say = say

    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        super().step(batch)
        return [
            RowResult(self._say(row.start + len(row.tokens) - row.prompt_len) if row.sample else None) for row in batch
        ]


def scripted(say: Callable[[int], int]) -> InProcessEngineClient:
    return engine_over(_Scripted(simulated_info(kv_tokens=1 << 12, max_model_len=1024), say))


def fails_at(place: int) -> Callable[[int], int]:
    def say(position: int) -> int:
        if position == place:
            raise RuntimeError("out of memory")
        return 300

    return say


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status(stream: bool) -> None:
    async with replica(scripted(fails_at(0))) as (http, _):
        answer = await http.post(CHAT, json={**BODY, "stream": stream})

    assert (answer.status_code, code_of(answer)) == (500, "engine_error")


@pytest.mark.parametrize("n", [1, 2])
async def test_an_error_after_the_first_token_is_an_event(n: int) -> None:
    async with replica(scripted(fails_at(3))) as (http, _):
        answer = await http.post(CHAT, json={**BODY, "stream": True, "n": n})

    events = data_of(answer)
    assert answer.status_code == 200
    assert json.loads(events[-1])["error"]["code"] == "engine_error"
    assert "[DONE]" not in events


async def test_a_character_that_lies_across_two_tokens_is_sent_whole() -> None:
    ids = unpack_ids(TrivialTokenizer().encode("ab世界cd", add_special_tokens=False))

    async with replica(scripted(lambda place: ids[place])) as (http, _):
        answer = await http.post(CHAT, json={**BODY, "stream": True, "max_tokens": len(ids)})

    events = data_of(answer)
    contents = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(contents) == "ab世界cd"
    assert not any("\ufffd" in content for content in contents)


async def test_an_open_stream_says_nothing_before_its_first_token() -> None:
    engine = engine_over(quick_runner(speedup=0.001))
    async with replica(engine) as (http, _):
        request = http.build_request("POST", CHAT, json={**BODY, "stream": True})

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await http.send(request, stream=True)
        await eventually(lambda: not engine._queued)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_a_simulated_model_obeys_no_grammar_and_says_so(change: dict[str, Any], param: str) -> None:
    async with replica(engine_over(quick_runner())) as (http, _):
        refused = await http.post(CHAT, json={**BODY, **change})
        taken = await http.post(CHAT, json={**BODY, "response_format": {"type": "text"}})

    assert (refused.status_code, code_of(refused)) == (400, "unsupported_parameter")
    assert refused.json()["error"]["param"] == param
    assert taken.status_code == 200


async def test_a_bug_is_a_500_in_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replica(engine_over(quick_runner())) as (http, app):
        monkeypatch.setattr(app._completions, "answer", lambda *_: 1 / 0)
        monkeypatch.setattr(app, "find_fault", lambda: 1 / 0)

        generated = await http.post(CHAT, json=BODY)
        asked = await http.get("/health")

    assert (generated.status_code, code_of(generated)) == (500, "internal_error")
    assert (asked.status_code, code_of(asked)) == (500, "internal_error")
    assert asked.headers["x-request-id"]
