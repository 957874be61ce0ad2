"""What one tenant cached tells another nothing: its prompt, sent by somebody else, is as slow as one that nobody ever sent.

Both halves are needed: an engine without any cache would pass the first one. So the same tenant, and another one of the same
sharing group, must hit. Everything between is real: gateway, HTTP, worker, scheduler, block pool, prefix cache.

A measure that needs no unit: AUC, the chance that a prompt of one sort is slower than one of the other. 0.5 is what guessing
gives; its standard error for 1,000 pairs is 0.013, for 200 it is 0.029.

On the simulated worker the time to the first token is the simulator's own, which nothing else on this machine disturbs, with
noise of a fixed seed. On the real engine it is what a client's clock sees.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from router.prompt import TokenizerFiles
from tests.gateway.stub import Running, gateway
from tests.replicas import Replica, running, start_torch
from workers.client import InProcessEngineClient
from workers.simulated import SimulatedRunner, TimeModel, engine_over, simulated_info

PAIRS = int(os.environ.get("WARMPATH_TESTS_SIMULATED_PAIRS", "250"))
"""1,000 for the whole proof."""
REAL_PAIRS = int(os.environ.get("WARMPATH_TESTS_PAIRS", "8"))
"""200 for the whole proof, which takes two minutes."""


@dataclass
class Tenant:
    """Asks in its name, and knows how long it waited for the first token and how much of the prompt was cached."""

    app: ASGIApp
    model: str
    key: str | None
    clock: Callable[[], float]

    async def ask(self, prompt: str) -> tuple[float, int]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "temperature": 0}
        sent = msgspec.json.encode(body)
        headers = [(b"content-type", b"application/json")]
        if self.key is not None:
            headers.append((b"authorization", f"Bearer {self.key}".encode()))
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": headers,
        }
        answer = bytearray()
        messages = [{"type": "http.request", "body": sent}]

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()  # nobody leaves here
            return messages.pop()

        async def send(message: Message) -> None:
            answer.extend(message.get("body", b""))

        began = self.clock()
        await self.app(scope, receive, send)
        took = self.clock() - began
        usage = msgspec.json.decode(answer)["usage"]
        return took, usage["prompt_tokens_details"]["cached_tokens"]


@dataclass
class Measured:
    """Times by the sort of prompt."""

    same_tenant: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    """Of the first tenant, to compare its repetitions with."""
    other_tenants: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    """Of the second tenant: prompts of the same length that nobody ever sent."""
    cached_of_others: list[int] = field(default_factory=list)
    cached_of_own: list[int] = field(default_factory=list)


async def measure(one: Tenant, other: Tenant, pairs: int, words: int) -> Measured:
    draw = random.Random(7)
    measured = Measured()
    for number in range(pairs):
        prompt, unseen = a_prompt(draw, words), a_prompt(draw, words)
        measured.fresh.append((await one.ask(prompt))[0])
        turns = [(prompt, measured.other_tenants), (unseen, measured.cold)]
        draw.shuffle(turns)  # what the first of two requests leaves behind helps neither sort
        for text, times in turns:
            took, cached = await other.ask(text)
            times.append(took)
            measured.cached_of_others.append(cached)
        if number % 4:  # that the cache works needs no thousand proofs
            continue
        took, cached = await one.ask(prompt)
        measured.same_tenant.append(took)
        measured.cached_of_own.append(cached)
    return measured


def a_prompt(draw: random.Random, words: int) -> str:
    return " ".join(f"{draw.getrandbits(24):06x}" for _ in range(words))


def auc(slow: list[float], fast: list[float]) -> float:
    """The chance that one of `slow` is greater than one of `fast`, equal ones counted as half."""
    ranked = sorted([(value, 1) for value in slow] + [(value, 0) for value in fast])
    wins = below = 0.0
    place = 0
    while place < len(ranked):
        end = place
        while end < len(ranked) and ranked[end][0] == ranked[place][0]:
            end += 1
        here = [sort for _, sort in ranked[place:end]]
        of_fast = here.count(0)
        wins += here.count(1) * (below + of_fast / 2)
        below += of_fast
        place = end
    return wins / (len(slow) * len(fast))


def test_the_measure_itself() -> None:
    assert auc([2, 3], [0, 1]) == 1.0
    assert auc([0, 1], [2, 3]) == 0.0
    assert auc([1, 1], [1, 1]) == 0.5
    assert auc([1, 3], [2, 2]) == 0.5


@asynccontextmanager
async def simulated(folder: Path, **settings: Any) -> AsyncIterator[tuple[Running, str, Callable[[], float]]]:
    """A gateway before one simulated worker; the worker's model and clock."""
    time_model = TimeModel(speedup=1e6, jitter=0.15)
    runner = SimulatedRunner(simulated_info(kv_tokens=1 << 20, max_model_len=2048), time_model, seed=3)
    engine = InProcessEngineClient(engine_over(runner))
    async with (
        running(engine, TokenizerFiles(kind="trivial")) as replica,
        gateway(folder, replicas=[own(replica)], **settings) as front,
    ):
        yield front, replica.model, lambda: runner.clock() * 1e6


def own(replica: Replica) -> dict[str, Any]:
    return {"url": replica.base_url, "model": replica.model, "kind": "warmpath", "credential": replica.credential}


async def tenant(front: Running, model: str, clock: Callable[[], float], name: str, group: str | None = None) -> Tenant:
    _, key = await front.gateway.keys.create("client", name=name, tenant=name, group=group)
    return Tenant(front.gateway.public, model, key, clock)


def told(measured: Measured) -> str:
    """For those who run it with -s."""
    return (
        f"{len(measured.cold)} pairs: other tenant's against cold {auc(measured.other_tenants, measured.cold):.3f}, "
        f"fresh against own {auc(measured.fresh, measured.same_tenant):.3f}, "
        f"cached tokens of others {sum(measured.cached_of_others)}, of own {sum(measured.cached_of_own)}"
    )


async def test_a_simulated_fleet_does_not_tell_what_others_asked(tmp_path: Path) -> None:
    async with simulated(tmp_path) as (front, model, clock):
        one, other = [await tenant(front, model, clock, name) for name in ("one", "other")]
        measured = await measure(one, other, PAIRS, words=100)
    print(told(measured))

    assert not any(measured.cached_of_others)
    assert all(measured.cached_of_own)
    assert abs(auc(measured.other_tenants, measured.cold) - 0.5) < 0.05 * max(1.0, (1000 / PAIRS) ** 0.5)
    assert auc(measured.fresh, measured.same_tenant) > 0.9


async def test_a_sharing_group_of_two_tenants_hits_and_a_third_does_not(tmp_path: Path) -> None:
    async with simulated(tmp_path) as (front, model, clock):
        one = await tenant(front, model, clock, "one", group="both")
        two = await tenant(front, model, clock, "two", group="both")
        third = await tenant(front, model, clock, "third")
        prompt = a_prompt(random.Random(1), 100)

        cached = [(await who.ask(prompt))[1] for who in (one, two, third)]

    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


async def test_an_open_gateway_is_one_group(tmp_path: Path) -> None:
    async with simulated(tmp_path, server={"open": True}) as (front, model, clock):
        prompt = a_prompt(random.Random(1), 100)

        cached = [(await Tenant(front.gateway.public, model, None, clock).ask(prompt))[1] for _ in range(2)]

    assert cached[0] == 0
    assert cached[1] > 0


async def test_a_real_engine_does_not_tell_what_others_asked(tmp_path: Path) -> None:
    async with start_torch() as replica, gateway(tmp_path, replicas=[own(replica)]) as front:
        one, other = [await tenant(front, replica.model, time.perf_counter, name) for name in ("one", "other")]
        measured = await measure(one, other, REAL_PAIRS, words=300)
    print(told(measured))

    assert not any(measured.cached_of_others)
    assert all(measured.cached_of_own)
    if REAL_PAIRS >= 200:  # with fewer, a busy machine tells more than the cache
        assert abs(auc(measured.other_tenants, measured.cold) - 0.5) < 0.09
        assert auc(measured.fresh, measured.same_tenant) > 0.9
