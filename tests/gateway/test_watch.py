"""The watcher over real workers: simulated engines behind their real server, followed over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from gateway.health import ProbeRules
from gateway.model_cards import ModelCards
from gateway.prepare import Prompters
from gateway.upstream.contract import UpstreamResponse
from gateway.upstream.http1 import Http1Upstream
from gateway.watch import Watcher
from router import ReplicaView, Router, Trust
from router.prompt import TokenizerFiles
from router.wire import ReplicaSpec
from tests.gateway.stub import MODEL, StubReplica, says, stub
from tests.replicas import CREDENTIAL, Replica, running, simulated_engine
from tests.serving import eventually


class Watched:
    """A router, and a watcher that fills it."""

    def __init__(self) -> None:
        self.router = Router()
        self.upstream = Http1Upstream()
        self.prompters = Prompters()
        self.watcher = Watcher(
            self.router,
            self.upstream,
            self.prompters,
            ModelCards(),
            clock=time.monotonic,
            probes=ProbeRules(every_s=0.02, timeout_s=5.0),
        )

    def watch(self, spec: ReplicaSpec, replica_id: str = "r") -> None:
        self.router.add(replica_id, spec, time.monotonic())
        self.watcher.start(replica_id, spec)

    @property
    def view(self) -> ReplicaView:
        return next(view for view in self.router.replicas() if view.id == "r")

    async def until(self, condition: Callable[[ReplicaView], bool]) -> None:
        await eventually(lambda: condition(self.view), within_s=30)


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    made = Watched()
    try:
        yield made
    finally:
        await made.watcher.aclose()
        await made.upstream.aclose()


def worker() -> contextlib.AbstractAsyncContextManager[Replica]:
    return running(simulated_engine(), TokenizerFiles(kind="trivial"))


def spec_of(url: str, **fields: str) -> ReplicaSpec:
    return ReplicaSpec(**{"url": url, "model": "simulated", "credential": CREDENTIAL, **fields})  # type: ignore[arg-type]


async def complete(replica: Replica, prompt: str) -> None:
    async with httpx.AsyncClient(base_url=replica.base_url) as client:
        body = {"model": replica.model, "prompt": prompt, "max_tokens": 1}
        (await client.post("/v1/completions", json=body)).raise_for_status()


async def test_a_worker_is_healthy_once_its_stream_speaks_and_its_blocks_become_known(watched: Watched) -> None:
    async with worker() as replica:
        watched.watch(spec_of(replica.base_url))
        await watched.until(lambda view: view.healthy and view.trust is Trust.EXACT)

        await complete(replica, "a" * 640)

        await watched.until(lambda view: view.confirmed_blocks == 10)
        pool = watched.router.pool("simulated")
        assert pool is not None
        assert watched.prompters.get(pool.tokenizer_digest) is not None


async def test_what_a_worker_held_before_is_known_too(watched: Watched) -> None:
    async with worker() as replica:
        await complete(replica, "b" * 640)

        watched.watch(spec_of(replica.base_url))

        await watched.until(lambda view: view.confirmed_blocks == 10 and view.trust is Trust.EXACT)


async def test_a_worker_that_is_gone_is_down_and_one_that_comes_back_holds_nothing(watched: Watched) -> None:
    async with worker() as replica:
        url = replica.base_url
        watched.watch(spec_of(url))
        await complete(replica, "c" * 640)
        await watched.until(lambda view: view.confirmed_blocks == 10)
    await watched.until(lambda view: not view.healthy)

    async with running(simulated_engine(), TokenizerFiles(kind="trivial"), port=httpx.URL(url).port or 0):
        await watched.until(lambda view: view.healthy and view.trust is Trust.EXACT)

        assert watched.view.confirmed_blocks == 0


async def test_a_worker_that_serves_another_model_is_kept_out(watched: Watched) -> None:
    async with worker() as replica:
        watched.watch(spec_of(replica.base_url, model="something-else"))

        await watched.until(lambda view: "simulated" in view.mismatch)

        assert not watched.view.healthy


async def test_a_wrong_credential_keeps_a_worker_out(watched: Watched) -> None:
    async with worker() as replica:
        watched.watch(spec_of(replica.base_url, credential="wrong"))

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await watched.until(lambda view: view.healthy)


async def test_a_foreign_replica_is_healthy_by_its_list_of_models_and_named_by_it(watched: Watched) -> None:
    async with stub(says("hi"), models=["its-own-name", "another"]) as replica:
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai"))

        await watched.until(lambda view: view.healthy)

        assert watched.router.models() == ["its-own-name"]
        assert watched.view.trust is Trust.LEARNING


async def test_a_foreign_replica_without_the_model_it_was_registered_with_gets_nothing(watched: Watched) -> None:
    async with stub(says("hi"), models=["another"]) as replica:
        watched.watch(ReplicaSpec(url=replica.url, model="m", kind="openai"))
        await watched.until(lambda view: "does not list" in view.mismatch)
        assert not watched.view.healthy

        replica.models = ["m"]

        await watched.until(lambda view: view.healthy and not view.mismatch)


async def test_a_foreign_replica_that_changes_its_model_in_place_gets_nothing(watched: Watched) -> None:
    async with stub(says("hi")) as replica:
        replica.health = [200]
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai"))
        await watched.until(lambda view: view.healthy)

        replica.models = ["another"]

        await watched.until(lambda view: not view.healthy and "does not list" in view.mismatch)
        replica.models = ["another", MODEL]
        await watched.until(lambda view: view.healthy and not view.mismatch)


async def test_one_bad_answer_in_between_moves_no_traffic_and_three_in_a_row_do(watched: Watched) -> None:
    async with stub(says("hi")) as replica:
        replica.health = [200]
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai"))
        await watched.until(lambda view: view.healthy)
        replica.health = [503, 503, 200] * 20
        await eventually(lambda: len(replica.health) <= 1)
        assert watched.watcher.transitions == {(MODEL, "up"): 1}

        replica.health = [503]
        await watched.until(lambda view: not view.healthy)
        replica.health = [200]
        await watched.until(lambda view: view.healthy)

        assert watched.watcher.transitions == {(MODEL, "up"): 2, (MODEL, "down"): 1}


async def test_a_health_check_that_hangs_is_a_bad_answer(watched: Watched) -> None:
    watched.watcher.configure(ProbeRules(every_s=0.02, timeout_s=0.05, fall=1))
    async with stub(says("hi")) as replica:
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai"))
        await watched.until(lambda view: view.healthy)

        replica.health = [0]

        await watched.until(lambda view: not view.healthy)


async def test_a_probe_follows_no_redirect(watched: Watched) -> None:
    async with stub(says("hi")) as replica:
        replica.health = [302]
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai"))

        await eventually(lambda: replica.asked.count("/health") > 2)

        assert set(replica.asked) == {"/health"}
        assert not watched.view.healthy


async def test_probes_carry_the_replicas_credential(watched: Watched) -> None:
    async with stub(says("hi")) as replica:
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai", credential="s3cret"))
        await eventually(lambda: "/health" in replica.asked)

        assert set(replica.credentials) == {"Bearer s3cret"}


async def test_a_foreign_replica_that_is_gone_is_down(watched: Watched) -> None:
    async with stub(says("hi")) as replica:
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai"))
        await watched.until(lambda view: view.healthy)

    await watched.until(lambda view: not view.healthy)


async def test_a_name_that_points_elsewhere_later_is_followed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica of the settings is called by name, so each new connection asks again where that is."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo
    addresses = {"replica.test": "127.0.0.1"}

    async def by_table(host: str, port: int, **how: Any) -> Any:
        return await resolve(addresses.get(host, host), port, **how)

    monkeypatch.setattr(loop, "getaddrinfo", by_table)
    async with stub(says("old")) as old:
        port = old.port
        watched.watch(ReplicaSpec(url=f"http://replica.test:{port}", model="", kind="openai"))
        await watched.until(lambda view: view.healthy)
    await watched.until(lambda view: not view.healthy)
    new = StubReplica(says("new"), [MODEL], host="127.0.0.2")
    new.port = port
    await new.listen()
    try:
        addresses["replica.test"] = "127.0.0.2"
        await watched.until(lambda view: view.healthy)
    finally:
        await new.stop()


async def test_a_foreign_replica_that_does_not_fit_is_asked_again(watched: Watched) -> None:
    async with stub(says("hi"), models=["simulated"]) as foreign, worker() as own:
        watched.watch(spec_of(own.base_url), "own")
        watched.watch(ReplicaSpec(url=foreign.url, model="", kind="openai"))
        await eventually(lambda: len(foreign.asked) > 1)
        assert not watched.view.healthy

        watched.watcher.stop("own")
        watched.router.remove("own")

        await watched.until(lambda view: view.healthy)


async def test_a_dead_replica_is_told_of_once_each_time_it_dies(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.watch._FIRST_RETRY_S", 0.005)
    asked: list[str] = []
    get = watched.watcher._get

    async def count(spec: ReplicaSpec, path: str) -> UpstreamResponse:
        asked.append(spec.kind)
        return await get(spec, path)

    monkeypatch.setattr(watched.watcher, "_get", count)
    async with stub(says("hi")) as replica:
        watched.watch(ReplicaSpec(url=replica.url, model="", kind="openai"))
        await watched.until(lambda view: view.healthy)
    watched.watch(spec_of(replica.url), "own")

    await eventually(lambda: asked.count("warmpath") > 4 and asked.count("openai") > 6)

    refused = [message for message in caplog.messages if "Connect" in message]
    assert sorted(message.split(":")[0] for message in refused) == ["replica own", "replica r"]


async def test_a_replica_that_is_no_longer_watched_costs_nothing(watched: Watched) -> None:
    async with worker() as replica:
        watched.watch(spec_of(replica.base_url))
        await watched.until(lambda view: view.healthy)

        watched.watcher.stop("r")

        await eventually(lambda: watched.upstream.in_use == 0)
