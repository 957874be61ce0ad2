"""What clients see when replicas go wrong: a gateway over real sockets in front of faulty simulated replicas in processes.

A prompt that one replica holds goes there, so a fault of that replica is met for sure; the other one is sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import build_gateway
from gateway.keys.opening import open_key_store
from gateway.settings import Settings
from tests.serving import serving

pytestmark = pytest.mark.system

CREDENTIAL = "fleet-credential"
SPEEDUP = 10
PROMPT_TOKENS = 4000
"""Its prefill takes as long as nine steps of decoding: a replica that holds it is clearly the better one."""


@contextlib.contextmanager
def fleet(replicas: int, *, speedup: int = SPEEDUP) -> Iterator[list[str]]:
    """The URLs of simulated replicas that share a process."""
    command = [sys.executable, "-m", "workers", "simulated", "--credential", CREDENTIAL, "--speedup", str(speedup)]
    with subprocess.Popen(
        [*command, "--replicas", str(replicas), "--grace", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield [process.stdout.readline().decode().split()[-1] for _ in range(replicas)]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    with fleet(2) as found:
        yield found


@dataclass
class System:
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    urls: list[str]

    async def set(self, replica: int, *faults: str) -> None:
        (await self.faults(replica, "PUT", json={"faults": faults})).raise_for_status()

    async def hits(self, replica: int) -> int:
        """How often the replica's faults have struck."""
        return sum(fault["hits"] for fault in (await self.faults(replica, "GET")).json()["faults"])

    async def faults(self, replica: int, method: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {CREDENTIAL}"}
        return await self.client.request(method, f"{self.urls[replica]}/simulate/faults", headers=headers, **options)

    async def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=body_of(prompt, **fields))

    async def warm(self, replica: int, prompt: str) -> None:
        """Let this replica compute the prompt, and wait until the gateway knows."""
        blocks = (await self.view(replica))["indexed_blocks"]
        await self.cordon_others(replica, True)
        (await self.complete(prompt)).raise_for_status()
        await self.cordon_others(replica, False)
        await self.until(replica, lambda view: view["indexed_blocks"] >= blocks + PROMPT_TOKENS // 16)

    async def cordon_others(self, replica: int, cordoned: bool) -> None:
        for other in range(len(self.urls)):
            if other != replica:
                await self.admin.patch(f"/admin/v1/replicas/r{other}", json={"cordoned": cordoned})

    async def view(self, replica: int) -> dict[str, Any]:
        views = (await self.admin.get("/admin/v1/replicas")).json()["replicas"]
        return next(view for view in views if view["id"] == f"r{replica}")

    async def until(self, replica: int, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition(await self.view(replica)):  # noqa: ASYNC110 - the gateway tells it only when asked
                await asyncio.sleep(0.02)


def body_of(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "prompt": prompt, "max_tokens": 4, "seed": 1, "ignore_eos": True, **fields}


@contextlib.asynccontextmanager
async def system(folder: Path, urls: list[str], *, silence_s: float = 10.0) -> AsyncIterator[System]:
    """A gateway that believes all replicas, each without a fault, and waits for them `silence_s`."""
    replicas = [
        {"id": f"r{number}", "url": url, "model": "simulated", "kind": "warmpath", "credential": CREDENTIAL}
        for number, url in enumerate(urls)
    ]
    stream = {"first_byte_s": silence_s, "idle_s": silence_s}
    # Without a queue: what is shown is what comes of the faults, not when a busy replica is free again.
    values = {"state_dir": folder, "replicas": replicas, "stream": stream, "admission": {"max_queued": 0}}
    settings = Settings.model_validate(values)
    gateway = build_gateway(settings, await open_key_store(settings))
    _, admin_key = await gateway.keys.create("admin", name="test")
    _, key = await gateway.keys.create("client", name="test", debug=True)
    async with (
        gateway.background(),
        serving(gateway.public) as url,
        serving(gateway.admin) as admin_url,
        http(url, key) as client,
        http(admin_url, admin_key) as admin,
    ):
        made = System(client, admin, urls)
        for number in range(len(urls)):
            await made.set(number)
            await made.until(number, lambda view: view["healthy"] and view["trust"] == "exact")
        yield made


def http(url: str, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False)


def prompt_named(name: str) -> str:
    return f"{name:64}" + "and so on  " * ((4 * PROMPT_TOKENS - 64) // 11)


def replica_of(answer: httpx.Response) -> int:
    """Which replica gave the answer."""
    return int(answer.headers["x-warmpath-decision"].removeprefix('replica="r')[0])


def streamed(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def silence_s(fault: str) -> float:
    """How long the gateway waits: short only where it waits in vain, so that no sound replica on a busy machine is given up."""
    return 2.0 if "hang" in fault else 10.0


BEFORE_THE_FIRST_BYTE = [
    "500",
    "503",
    "503=30",
    "429=30",
    "html",
    "broken-json",
    "short",
    "hang",
    "cut-after=0",
    "end-after=0",
]


BUSY = ["503=30", "429=30"]
"""The second prompt does not ask a replica that said so."""


@pytest.mark.parametrize("fault", [*BEFORE_THE_FIRST_BYTE, "endless-line", "hang-after=0"])
async def test_a_second_try_saves_what_fails_before_its_first_byte(tmp_path: Path, urls: list[str], fault: str) -> None:
    async with system(tmp_path, urls, silence_s=silence_s(fault)) as running:
        prompts = [prompt_named(f"{fault} {number}") for number in range(2)]
        for prompt in prompts:
            await running.warm(0, prompt)
        await running.set(0, fault)

        whole = await running.complete(prompts[0])
        stream = await running.complete(prompts[1], stream=True)
        after, hits = await running.view(0), await running.hits(0)

    assert hits == (1 if fault in BUSY else 2)
    assert whole.status_code == stream.status_code == 200
    assert replica_of(whole) == replica_of(stream) == 1
    assert whole.json()["usage"]["completion_tokens"] == 4
    assert streamed(stream.text)[-1] == "[DONE]"
    assert after["inflight"] == after["promised_tokens"] == 0


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("500", 502, "bad_upstream"),
        ("503", 502, "bad_upstream"),
        ("503=7", 429, "capacity"),
        ("429", 429, "capacity"),
        ("html", 502, "bad_upstream"),
        ("cut-after=0", 500, "request_quarantined"),
        ("hang", 504, "upstream_timeout"),
    ],
)
async def test_where_no_try_can_save_it_the_status_says_why(
    tmp_path: Path, urls: list[str], fault: str, status: int, code: str
) -> None:
    async with system(tmp_path, urls, silence_s=silence_s(fault)) as running:
        for replica in range(2):
            await running.set(replica, fault)

        answers = [await running.complete("hello", stream=stream) for stream in (False, True)]
        views = [await running.view(replica) for replica in range(2)]

    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        if status == 429:
            assert 0 < float(answer.headers["retry-after"]) <= 7
    assert [view["inflight"] for view in views] == [0, 0]
    assert {view["breaker"] for view in views} == {"closed"}, "busy is no fault, and two failures are too few"


def assert_continued_or_loud(stream: httpx.Response, whole_text: str) -> None:
    """A stream that lost its replica goes on elsewhere without a seam, or ends with an error event: never in silence."""
    *chunks, last = streamed(stream.text)
    assert stream.status_code == 200
    if last == "[DONE]":
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == whole_text
    else:
        assert json.loads(last)["error"]["code"]
        told = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
        assert whole_text.startswith(told)
        assert told


@pytest.mark.parametrize("fault", ["cut-after=3", "end-after=3", "hang-after=3"])
async def test_a_stream_that_breaks_in_the_middle_goes_on_or_says_so(
    tmp_path: Path, urls: list[str], fault: str
) -> None:
    async with system(tmp_path, urls, silence_s=silence_s(fault)) as running:
        prompt = prompt_named(fault)
        await running.warm(0, prompt)
        whole = (await running.complete(prompt, max_tokens=12)).json()["choices"][0]["text"]
        await running.set(0, f"{fault}:1")

        stream = await running.complete(prompt, max_tokens=12, stream=True)
        assert await running.hits(0) == 1
        views = [await running.view(replica) for replica in range(2)]

    assert_continued_or_loud(stream, whole)
    assert [view["inflight"] for view in views] == [0, 0]


async def test_a_death_under_load_costs_the_streams_that_were_open_there(tmp_path: Path, urls: list[str]) -> None:
    with fleet(1) as doomed:
        async with system(tmp_path, [urls[0], *doomed]) as running:
            prompts = [prompt_named(f"death {number}") for number in range(6)]
            for number, prompt in enumerate(prompts):
                await running.warm(number % 2, prompt)
            whole = [(await running.complete(prompt, max_tokens=90)).json()["choices"][0]["text"] for prompt in prompts]

            await running.set(1, "slow=10")  # so that its streams are under way when it dies
            streams = [asyncio.create_task(running.complete(each, max_tokens=90, stream=True)) for each in prompts]
            await running.until(1, lambda view: view["inflight"] == 3 and view["promised_tokens"] == 0)
            await running.set(1, "die")
            asked = [asyncio.create_task(running.complete(f"{number}")) for number in range(8)]
            answers = await asyncio.gather(*streams)
            others = await asyncio.gather(*asked)
            later = [await running.complete(prompt) for prompt in prompts]

    for number, (answer, text) in enumerate(zip(answers, whole, strict=True)):
        assert_continued_or_loud(answer, text)
        if number % 2 == 0:
            assert streamed(answer.text)[-1] == "[DONE]", "it ran on the replica that lives"
    assert {answer.status_code for answer in (*others, *later)} == {200}
    assert {replica_of(answer) for answer in later} == {0}


# --- what a replica tells about its cache ----------------------------------------------------------------------------


async def test_lost_events_make_a_replica_learning_until_a_snapshot_makes_it_exact(
    tmp_path: Path, urls: list[str]
) -> None:
    async with system(tmp_path, urls) as running:
        before = (await running.view(0))["indexed_blocks"]
        await running.set(0, "drop-events:1", "delay=0.5@/kv_snapshot")
        await running.cordon_others(0, True)
        lost = await running.complete(prompt_named("lost"))  # its blocks are in the batch that is dropped
        seen = await running.complete(prompt_named("seen"))  # the next batch shows the gap

        await running.until(0, lambda view: view["trust"] == "learning")
        meanwhile = await running.complete("meanwhile")
        await running.until(0, lambda view: view["trust"] == "exact")
        await running.cordon_others(0, False)
        again = await running.complete(prompt_named("lost"))
        after = await running.view(0)

    assert [answer.status_code for answer in (lost, seen, meanwhile, again)] == [200] * 4
    assert replica_of(again) == 0
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert f"matched={cached}," in again.headers["x-warmpath-decision"], "what was lost is known again"
    assert cached >= PROMPT_TOKENS - 32
    assert after["indexed_blocks"] - before >= 2 * (PROMPT_TOKENS // 16)


@pytest.mark.parametrize(
    "faults", [["repeat-events"], ["reorder-events:1"], ["cut-events:2"], ["cut-events:2", "new-epoch:1"]]
)
async def test_events_that_come_twice_or_swapped_or_from_a_restart_leave_the_picture_exact(
    tmp_path: Path, urls: list[str], faults: list[str]
) -> None:
    async with system(tmp_path, urls) as running:
        await running.set(0, *faults)
        prompts = [prompt_named(f"{faults} {number}") for number in range(3)]
        await running.cordon_others(0, True)
        for prompt in prompts:
            await running.complete(prompt)
        held = 3 * (PROMPT_TOKENS // 16)
        await running.until(0, lambda view: view["trust"] == "exact" and view["indexed_blocks"] >= held)
        answers = [await running.complete(prompt) for prompt in prompts]
        after = await running.view(0)

    for answer in answers:
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert f"matched={cached}," in answer.headers["x-warmpath-decision"]
        assert cached >= PROMPT_TOKENS - 32
    assert after["cached_tokens_precision"] == 1.0
