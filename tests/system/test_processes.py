"""`warmpath serve --processes N` from outside: one gateway, whatever process a connection meets, and whichever dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.stub import MODEL as STUB_MODEL
from tests.gateway.stub import StubReplica, response, stub
from tests.serving import eventually
from tests.system.processes import HAS_HUGE_PAGES, WARMPATH, alive, free_ports, huge_kb, wait_until

pytestmark = pytest.mark.system

PROCESSES = 4
JOIN_TOKEN = f"wpj-fleet-{secrets.token_urlsafe(24)}"
ADMIN_KEY = f"wpa-test-{secrets.token_urlsafe(24)}"


@dataclass
class Served:
    """A gateway of several processes."""

    process: subprocess.Popen[bytes]
    url: str
    admin_url: str
    state: Path
    keys: list[str] = field(default_factory=list)

    @property
    def admin(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.Client(base_url=f"{self.admin_url}/admin/v1", headers=headers, timeout=30, trust_env=False)

    def new_key(self, **fields: Any) -> dict[str, Any]:
        body = {"name": f"test-{secrets.token_hex(4)}", **fields}
        with self.admin as admin:
            made: dict[str, Any] = admin.post("/keys", json=body).raise_for_status().json()
        return made

    def client(self, key: str = "") -> httpx.AsyncClient:
        """Each request takes a new connection, so any process may get it."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key or self.keys[0]}"},
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=0),
            timeout=30,
            verify=False,
            trust_env=False,
        )

    def metrics_text(self) -> str:
        return httpx.get(f"{self.admin_url}/metrics", timeout=30).text

    def metrics(self) -> dict[str, float]:
        found = re.findall(r"^([^#\s]\S*) (\S+)$", self.metrics_text(), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def served(self) -> float:
        """Requests that were answered well."""
        metrics = self.metrics().items()
        return sum(value for name, value in metrics if name.startswith("warmpath_requests_total") and '"200"' in name)

    def numbers(self) -> set[str]:
        """Of the data processes that count."""
        found = {
            re.search(r'process="(\w+)"', name) for name in self.metrics() if name.startswith("process_start_time")
        }
        return {match[1] for match in found if match} - {"supervisor"}

    def data_processes(self) -> list[int]:
        """Process ids, the one that stands by among them."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sorted(map(int, children))

    def in_flight(self) -> int:
        with self.admin as admin:
            return sum(replica["inflight"] for replica in admin.get("/replicas").json()["replicas"])


@contextlib.contextmanager
def serving_processes(
    folder: Path, *, processes: int = PROCESSES, secrets_of: Path | None = None, **env: str
) -> Iterator[Served]:
    """`secrets_of`: another gateway's state folder, to share its replicas' caches."""
    port, admin_port = free_ports(2)
    environment = {
        "WARMPATH_ADMIN__KEY": ADMIN_KEY,
        "WARMPATH_ADMIN__JOIN_TOKEN": JOIN_TOKEN,
        "WARMPATH_HUGE_PAGES": "on",
        **env,
    }
    ports = ("--port", str(port), "--admin-port", str(admin_port), "--processes", str(processes))
    state, log = folder / f"state-{port}", folder / f"gateway-{port}.log"
    config = folder / f"gateway-{port}.yaml"
    config.touch()
    if secrets_of is not None:
        state.mkdir(mode=0o700)
        shutil.copy(secrets_of / "secrets.json", state)
    sockets = tempfile.TemporaryDirectory(prefix="wp")  # short, as their paths must be; one that is killed leaves them
    with log.open("wb") as output:
        process = subprocess.Popen(
            [WARMPATH, "serve", *ports, "--state-dir", str(state), "--config", str(config)],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": sockets.name, **environment},
        )
    served = Served(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", state)
    children: list[int] = []
    try:
        wait_until(lambda: _answers(f"{served.admin_url}/health"), 30, "the supervisor answers")
        served.keys.append(served.new_key(debug=True)["key"])
        yield served
        children = served.data_processes() if process.poll() is None else []
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
            sockets.cleanup()
    assert not any(map(alive, children)), "no process is left"


@contextlib.contextmanager
def fleet(folder: Path, *gateways: str, replicas: int = 3) -> Iterator[None]:
    """Simulated replicas that register with these gateways."""
    command = [sys.executable, "-m", "workers", "simulated", "--replicas", str(replicas), "--grace", "0"]
    for gateway in gateways:
        command += ["--gateway", gateway]
    command += ["--join-token", JOIN_TOKEN, "--replica-id", "r"]
    with (folder / "fleet.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def in_thread(manager: contextlib.AbstractContextManager[Served]) -> AsyncIterator[Served]:
    """The same while the loop runs on, for what in it must answer."""
    served = await asyncio.to_thread(manager.__enter__)
    try:
        yield served
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def eventually_answers(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
        while not (await client.get(url)).is_success:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).is_success
    return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("processes")
    with serving_processes(folder) as gateway, fleet(folder, gateway.admin_url):
        wait_until(
            lambda: _answers(f"{gateway.admin_url}/ready"), 60, "replicas have registered and all processes serve"
        )
        wait_until(lambda: len(gateway.numbers()) == PROCESSES, 60, "all processes count")
        wait_until(lambda: _healthy(gateway) == 3, 60, "all replicas are well")
        yield gateway


def _healthy(served: Served) -> int:
    with served.admin as admin:
        return sum(replica["healthy"] for replica in admin.get("/replicas").json()["replicas"])


async def complete(client: httpx.AsyncClient, prompt: str = "hello", **fields: Any) -> httpx.Response:
    return await client.post(
        "/v1/completions", json={"model": "simulated", "prompt": prompt, "max_tokens": 2, **fields}
    )


async def test_a_new_key_opens_every_process_at_once_and_a_revoked_one_none(served: Served) -> None:
    made = await asyncio.to_thread(served.new_key)

    async with served.client(made["key"]) as client:
        before = [answer.status_code for answer in await asyncio.gather(*(complete(client) for _ in range(24)))]
        with served.admin as admin:
            admin.delete(f"/keys/{made['id']}").raise_for_status()
        after = [answer.status_code for answer in await asyncio.gather(*(complete(client) for _ in range(24)))]

    assert before == [200] * 24
    assert after == [401] * 24


async def test_metrics_and_decisions_are_those_of_all_processes(served: Served) -> None:
    before = served.served()
    async with served.client() as client:
        answers = await asyncio.gather(*(complete(client, f"metrics {number}") for number in range(40)))

    assert {answer.status_code for answer in answers} == {200}
    await eventually(lambda: served.served() >= before + 40)
    assert served.served() == before + 40
    with served.admin as admin:
        decisions = admin.get("/decisions").json()["decisions"]
    ids = {decision["request_id"] for decision in decisions}
    assert {answer.headers["x-request-id"] for answer in answers} <= ids
    assert decisions == sorted(decisions, key=lambda decision: decision["time"])
    helps = re.findall(r"^# HELP (\S+)", served.metrics_text(), re.MULTILINE)
    assert len(helps) == len(set(helps)), "each metric is there once"


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="the kernel makes no huge pages at once")
async def test_every_process_serves_from_a_heap_on_huge_pages(served: Served) -> None:
    """The one that stands by may just have been started."""
    await eventually(lambda: all(huge_kb(pid) > 8 << 10 for pid in served.data_processes()))


async def test_a_limit_holds_over_all_processes(served: Served) -> None:
    made = await asyncio.to_thread(lambda: served.new_key(limits={"requests_per_minute": 30}))

    async with served.client(made["key"]) as client:
        answers = await asyncio.gather(*(complete(client, f"limit {number}") for number in range(60)))

    assert Counter(answer.status_code for answer in answers) == {200: 30, 429: 30}


async def test_what_an_operator_changes_holds_in_every_process_at_once(served: Served) -> None:
    with served.admin as admin:
        for replica in ("r-0", "r-1"):
            admin.patch(f"/replicas/{replica}", json={"cordoned": True}).raise_for_status()
    try:
        async with served.client() as client:
            answers = await asyncio.gather(*(complete(client, f"cordon {number}") for number in range(24)))
    finally:
        with served.admin as admin:
            for replica in ("r-0", "r-1"):
                admin.patch(f"/replicas/{replica}", json={"cordoned": False}).raise_for_status()

    assert {_replica(answer) for answer in answers} == {"r-2"}


async def test_settings_that_change_are_in_force_in_every_process_at_once(served: Served) -> None:
    config = served.state.with_name(served.state.name.replace("state", "gateway") + ".yaml")
    try:
        config.write_text("aliases: {gpt: simulated}")
        with served.admin as admin:
            changed = admin.post("/reload").json()
        async with served.client() as client:
            known = await asyncio.gather(*(complete(client, f"alias {n}", model="gpt") for n in range(24)))
            config.write_text("aliases: {}\nno_such_group: {}")
            with served.admin as admin:
                refused = admin.post("/reload")
            still = await asyncio.gather(*(complete(client, f"alias {n}", model="gpt") for n in range(24)))
    finally:
        config.write_text("aliases: {}")
        with served.admin as admin:
            admin.post("/reload").raise_for_status()

    assert changed == {"changed": ["aliases"], "needs_restart": []}
    assert refused.status_code == 400
    assert {answer.status_code for answer in [*known, *still]} == {200}
    assert served.metrics()['warmpath_config_reloads_total{result="bad"}'] >= 1


async def test_a_dashboard_sees_what_all_processes_do(served: Served) -> None:
    url, headers = f"{served.admin_url}/admin/v1/events", {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=20) as watcher,
        served.client() as client,
        watcher.stream("GET", url, headers=headers) as events,
    ):
        lines = events.aiter_lines()
        await asyncio.gather(*(complete(client, f"live {n}", max_tokens=64) for n in range(24)))
        async with asyncio.timeout(20):
            async for line in lines:
                if line.startswith("data: ") and json.loads(line.removeprefix("data: "))["requests"]["per_s"]:
                    break


async def test_a_dashboard_counts_requests_that_no_replica_saw(served: Served) -> None:
    url, headers = f"{served.admin_url}/admin/v1/events", {"authorization": f"Bearer {ADMIN_KEY}"}
    stranger = {"authorization": "Bearer wp-nobody"}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=20) as watcher,
        served.client() as client,
        watcher.stream("GET", url, headers=headers) as events,
        asyncio.timeout(40),
    ):
        lines = (line.removeprefix("data: ") async for line in events.aiter_lines() if line.startswith("data: "))
        while json.loads(await anext(lines))["requests"]["per_s"]:
            pass  # those of other tests are forgotten after ten seconds
        answers = [await client.post("/v1/chat/completions", headers=stranger) for _ in range(9)]
        while json.loads(await anext(lines))["requests"]["per_s"] < 1:
            pass

    assert {answer.status_code for answer in answers} == {401}


async def test_a_burst_of_one_new_prefix_goes_to_one_replica(served: Served) -> None:
    together = 0
    for _ in range(3):  # a process that gets no turn hears of the first one too late
        prompt = f"{secrets.token_hex(4)} " + "a tale of many words " * 500
        async with served.client() as client:
            first = asyncio.create_task(complete(client, prompt, max_tokens=80, ignore_eos=True))
            await eventually(lambda: served.in_flight() > 0)  # its first message is on its way to all processes by then
            answers = [*await asyncio.gather(*(complete(client, prompt) for _ in range(23))), await first]
        together = max(together, *Counter(map(_replica, answers)).values())
        if together >= 20:
            break

    assert together >= 20


def _replica(answer: httpx.Response) -> str:
    found = re.search(r'replica="([^"]+)"', answer.headers["x-warmpath-decision"])
    assert found
    return found[1]


@dataclass
class Stream:
    tokens: int = 0
    done: bool = False
    broken: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: httpx.AsyncClient, prompt: str, max_tokens: int) -> None:
        body = {"model": "simulated", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    self.done |= line == "data: [DONE]"
                    self.tokens += line.startswith("data: {")
                    if self.tokens:
                        self.begun.set()
        except httpx.TransportError:
            self.broken = True
        finally:
            self.begun.set()


@contextlib.asynccontextmanager
async def streams(client: httpx.AsyncClient, count: int, max_tokens: int) -> AsyncIterator[list[Stream]]:
    """Streams that have begun; all have ended when this has."""
    opened = [Stream() for _ in range(count)]
    tasks = [
        asyncio.create_task(stream.read(client, f"stream {number}", max_tokens)) for number, stream in enumerate(opened)
    ]
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.begun.wait() for stream in opened))
        yield opened
        await asyncio.gather(*tasks)


async def test_a_killed_process_costs_its_own_streams_and_is_back(served: Served) -> None:
    numbers, descriptors = served.numbers(), _descriptors(served.process.pid)
    before = served.served()
    standby = max(served.data_processes())
    victim = min(served.data_processes())
    async with served.client() as client, streams(client, 16, 250) as opened:
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        answers = await asyncio.gather(*(_complete_again(client, number) for number in range(24)))
        await eventually(lambda: len(served.numbers() - numbers) == 1)
        back_s = time.monotonic() - killed_at
        alive_streams = sum(not stream.broken for stream in opened)
        await eventually(lambda: served.in_flight() <= alive_streams)

    broken = [stream for stream in opened if stream.broken]
    assert {answer.status_code for answer in answers} == {200}
    assert all(stream.done != stream.broken for stream in opened), "what is not of that process goes on to its end"
    assert len(broken) < len(opened)
    assert back_s < 5, "0.1 s, but for a machine that does much else"
    assert standby in served.data_processes(), "the one that stood by took its place"
    await eventually(lambda: served.in_flight() == 0)
    assert served.served() >= before, "what was counted stays counted"
    await eventually(lambda: len(served.data_processes()) == PROCESSES + 1)
    await eventually(lambda: _descriptors(served.process.pid) <= descriptors + 2)


async def _complete_again(client: httpx.AsyncClient, number: int) -> httpx.Response:
    """As SDKs do: a connection that a dead process had taken in is opened again, once."""
    try:
        return await complete(client, f"meanwhile {number}")
    except httpx.TransportError:
        return await complete(client, f"meanwhile {number}")


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def test_the_end_of_one_process_by_a_signal_breaks_no_stream(served: Served) -> None:
    numbers = served.numbers()
    async with served.client() as client, streams(client, 12, 60) as opened:
        os.kill(min(served.data_processes()), signal.SIGTERM)

    assert all(stream.done for stream in opened)
    await eventually(lambda: len(served.numbers() - numbers) == 1)


async def test_at_the_end_running_answers_have_their_time(tmp_path: Path) -> None:
    with serving_processes(tmp_path, processes=2) as gateway, fleet(tmp_path, gateway.admin_url, replicas=1):
        await eventually(lambda: _answers(f"{gateway.admin_url}/ready"), within_s=60)
        children = gateway.data_processes()
        async with gateway.client() as client, streams(client, 6, 100) as opened:
            gateway.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                await _complete_for_ever(client)

        assert all(stream.done for stream in opened)
        assert await asyncio.to_thread(gateway.process.wait, 20) == 0
        assert not any(map(alive, children))


async def _complete_for_ever(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            await complete(client)


async def test_data_processes_end_with_their_supervisor(tmp_path: Path) -> None:
    with serving_processes(tmp_path, processes=2) as gateway:
        await eventually(lambda: len(gateway.data_processes()) == 3, within_s=30)
        children = gateway.data_processes()
        gateway.process.kill()

        await eventually(lambda: not any(map(alive, children)), within_s=20)


async def test_two_gateways_share_a_fleet_and_nothing_else(tmp_path: Path) -> None:
    with (
        serving_processes(tmp_path, processes=1) as one,
        serving_processes(tmp_path, processes=1, secrets_of=one.state) as two,
        fleet(tmp_path, one.admin_url, two.admin_url, replicas=2),
    ):
        for gateway in (one, two):
            await eventually(lambda gateway=gateway: _healthy(gateway) == 2, within_s=60)  # type: ignore[misc]
        prompt = "a long story " * 500
        async with one.client() as first, two.client() as second:
            warm = await complete(first, prompt)
            await eventually(lambda: _indexed(two) > 80)
            again = await complete(second, prompt)

    assert _replica(warm) == _replica(again)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


def _indexed(gateway: Served) -> int:
    with gateway.admin as admin:
        return sum(replica["indexed_blocks"] for replica in admin.get("/replicas").json()["replicas"])


async def test_a_response_is_found_again_by_every_process(tmp_path: Path) -> None:
    made = iter(range(1_000))

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = {"id": f"resp_{next(made)}", "object": "response", "model": STUB_MODEL, "output": []}
        writer.write(response(200, json.dumps(body).encode()))
        await writer.drain()

    async with stub(answer) as one, stub(answer) as two:
        replicas = json.dumps([{"url": one.url}, {"url": two.url}])
        async with in_thread(serving_processes(tmp_path, processes=3, WARMPATH_REPLICAS=replicas)) as gateway:
            await eventually_answers(f"{gateway.admin_url}/ready")
            async with gateway.client() as client:
                for _ in range(10):
                    await _is_found(client, (one, two))


async def _is_found(client: httpx.AsyncClient, replicas: tuple[StubReplica, ...]) -> None:
    answer = await client.post("/v1/responses", json={"model": STUB_MODEL, "input": "x"})
    name = answer.json()["id"]
    found = await asyncio.gather(*(client.get(f"/v1/responses/{name}") for _ in range(8)))
    assert [each.status_code for each in found] == [200] * 8
    asked = [sum(seen.path.endswith(name) for seen in replica.seen) for replica in replicas]
    assert sorted(asked) == [0, 8]
