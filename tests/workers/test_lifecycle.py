from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

import workers.lifecycle
from router.prompt import TokenizerFiles, load_prompter
from router.wire import ReplicaSpec
from tests.serving import eventually, serving
from tests.workers.test_register import QUICK, Gateway
from workers.client import InProcessEngineClient
from workers.engine import Engine
from workers.lifecycle import bind, is_loopback, reachable_url, serve
from workers.register import Registration
from workers.server import ReplicaApp
from workers.simulated import SimulatedRunner, TimeModel, simulated_info

LONG_STREAM = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}


@dataclass
class Running:
    engine: InProcessEngineClient
    http: httpx.AsyncClient
    stop: asyncio.Event
    serving: asyncio.Task[bool]


@asynccontextmanager
async def running(*, registrations: list[Registration] | None = None, grace_s: float = 0.2) -> AsyncIterator[Running]:
    runner = SimulatedRunner(simulated_info(kv_tokens=1 << 12, max_model_len=1024), TimeModel(speedup=2))
    engine = InProcessEngineClient(Engine(runner, clock=runner.clock))
    info = await engine.start()
    files = TokenizerFiles(kind="trivial")
    stop = asyncio.Event()
    sock = bind("127.0.0.1", 0)
    sock.listen()
    url = reachable_url(sock)
    with ThreadPoolExecutor(1) as executor:
        app = ReplicaApp(
            engine=engine,
            info=info,
            files=files,
            prompter=load_prompter(files),
            executor=executor,
            credential="secret",
            on_loopback=is_loopback(sock),
        )
        task = asyncio.create_task(
            serve(app, engine, sock, stop=stop, registrations=registrations or [], grace_s=grace_s)
        )
        try:
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                yield Running(engine, http, stop, task)
        finally:
            stop.set()
            async with asyncio.timeout(30):
                await task


async def test_a_replica_serves_until_it_is_told_to_stop() -> None:
    async with running() as replica:
        assert (await replica.http.get("/health")).status_code == 200

        replica.stop.set()

        async with asyncio.timeout(30):
            assert await replica.serving
        assert not replica.engine.alive
        with pytest.raises(httpx.ConnectError):
            await replica.http.get("/health")


async def test_an_open_event_stream_does_not_hold_up_the_end() -> None:
    async with running(grace_s=60) as replica:
        headers = {"authorization": "Bearer secret"}
        async with replica.http.stream("GET", "/kv_events", headers=headers) as answer:
            events = answer.aiter_raw()
            await anext(events)
            replica.stop.set()
            async with asyncio.timeout(20):
                assert await replica.serving
                async for _ in events:
                    pass


async def test_an_answer_that_ends_within_the_grace_is_whole() -> None:
    async with running(grace_s=5) as replica:
        body = {**LONG_STREAM, "max_tokens": 20}
        async with replica.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            replica.stop.set()
            rest = [line async for line in lines if line]

    assert rest[-1] == "data: [DONE]"


async def test_an_answer_that_does_not_ends_with_an_error() -> None:
    async with running() as replica:
        async with replica.http.stream("POST", "/v1/completions", json=LONG_STREAM) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            replica.stop.set()
            rest = [line async for line in lines if line]
        async with asyncio.timeout(20):
            assert await replica.serving

    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"


async def test_a_replica_does_not_outlive_its_engine() -> None:
    async with running() as replica:
        await replica.http.get("/health")

        await replica.engine.stop()

        async with asyncio.timeout(30):
            assert not await replica.serving


async def test_it_says_goodbye_to_its_gateways() -> None:
    gateway = Gateway()
    spec = ReplicaSpec(url="http://127.0.0.1:1", model="m", epoch="e")
    async with serving(gateway.app) as url:
        registration = Registration(gateway=url, replica_id="r", spec=spec, join_token="t", pace=QUICK)
        async with running(registrations=[registration]) as replica:
            await eventually(lambda: gateway.known)

            replica.stop.set()
            await replica.serving

        assert gateway.count("DELETE") == 1
        assert not gateway.known


async def test_a_client_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.lifecycle, "STALLED_READER_S", 1)
    async with running() as replica:
        body = json.dumps(LONG_STREAM).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((replica.http.base_url.host, replica.http.base_url.port or 0))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            await eventually(lambda: bool(replica.engine._open))

            await eventually(lambda: not replica.engine._open)

        metrics = (await replica.http.get("/metrics")).text.splitlines()
    (aborted,) = (line for line in metrics if 'finished_reason="abort"' in line)
    assert aborted.endswith(" 1.0")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: ten\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_in_openais_shape(data: bytes) -> None:
    async with running() as replica:
        reader, writer = await asyncio.open_connection(replica.http.base_url.host, replica.http.base_url.port)
        writer.write(data)
        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nx-request-id: req-" in head
    assert b"\r\ncontent-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_taken_port_shows_before_the_long_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_loopback_is_judged_by_the_address_that_was_bound(host: str, loopback: bool) -> None:
    with bind(host, 0) as sock:
        assert is_loopback(sock) is loopback


def test_a_wildcard_is_reached_by_this_machines_name() -> None:
    with bind("0.0.0.0", 0) as sock:
        assert reachable_url(sock) == f"http://{socket.gethostname()}:{sock.getsockname()[1]}"
    with bind("127.0.0.1", 0) as sock:
        assert reachable_url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
