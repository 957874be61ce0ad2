"""Settings change while requests run: the plan alone, then a real gateway with a real file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.registry import Registrant
from gateway.app import build_gateway
from gateway.keys.opening import open_key_store
from gateway.reload_plan import plan_reload
from gateway.reloader import Reloader, SettingsSource, _Stamp
from gateway.server.listener import Listener
from gateway.settings import Settings
from gateway.settings_loader import SettingsError, load_settings
from router.wire import ReplicaSpec
from tests.gateway.stub import MODEL, StubReplica, hangs, says, stub
from tests.serving import eventually, serving


def settings(**values: Any) -> Settings:
    return load_settings(flags=values)


# --- the plan


def test_what_changed_is_named_and_what_needs_a_restart_stays_as_it_was() -> None:
    old = settings(server={"port": 8000}, stream={"idle_s": 30}, routing={"policy": "cost"})
    new = settings(
        server={"port": 9000, "open": True},
        admin={"key": "wpa-mine-" + "s" * 32},
        state_dir="/elsewhere",
        stream={"idle_s": 5},
        routing={"policy": "random", "index_bytes": 1 << 21},
        limits={"hosts": 2, "tokens_per_minute": 1000},
        aliases={"a": "m"},
        replicas=[{"url": "http://10.0.0.1:8000"}],
        tenants={"blue": {"weight": 2}},
        admission={"max_wait_s": 1},
    )

    plan = plan_reload(old, new)

    assert set(plan.changed) == {
        "stream.idle_s",
        "routing.policy",
        "limits.tokens_per_minute",
        "aliases",
        "replicas",
        "tenants",
        "admission.max_wait_s",
    }
    assert set(plan.needs_restart) == {
        *("server.port", "server.open", "admin.key", "state_dir", "routing.index_bytes", "limits.hosts")
    }
    assert (plan.settings.server, plan.settings.admin, plan.settings.state_dir) == (
        old.server,
        old.admin,
        old.state_dir,
    )
    assert (plan.settings.routing.policy, plan.settings.routing.index_bytes) == ("random", old.routing.index_bytes)
    assert plan.settings.aliases == {"a": "m"}


def test_equal_settings_are_no_change() -> None:
    plan = plan_reload(settings(aliases={"a": "m"}), settings(aliases={"a": "m"}))

    assert (plan.changed, plan.needs_restart) == ((), ())


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "server": st.fixed_dictionaries({"grace_s": st.sampled_from([1.0, 30.0])}),
        "stream": st.fixed_dictionaries({"idle_s": st.sampled_from([1.0, 30.0])}),
        "limits": st.fixed_dictionaries({"requests_per_minute": st.sampled_from([None, 1])}),
        "routing": st.fixed_dictionaries({"index_bytes": st.sampled_from([1 << 20, 1 << 30])}),
        "aliases": st.sampled_from([{}, {"a": "m"}]),
    },
)


@given(VALUES, VALUES)
def test_what_is_in_force_differs_from_before_exactly_in_what_changed(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    old, new = Settings.model_validate(before), Settings.model_validate(after)

    plan = plan_reload(old, new)

    assert plan_reload(old, plan.settings).changed == plan.changed
    assert plan_reload(old, plan.settings).needs_restart == ()
    assert plan_reload(plan.settings, new).changed == ()
    assert plan_reload(plan.settings, new).needs_restart == plan.needs_restart


# --- a gateway


class Served:
    def __init__(self, file: Path, client: httpx.AsyncClient, admin: httpx.AsyncClient, gateway: Any) -> None:
        self.file = file
        self.client = client
        self.admin = admin
        self.gateway = gateway

    def write(self, **values: Any) -> None:
        """As editors do it: another file takes the name."""
        text = yaml.safe_dump({"state_dir": str(self.file.parent), **values})
        part = self.file.with_suffix(".part")
        part.write_text(text)
        part.replace(self.file)

    async def reload(self) -> httpx.Response:
        return await self.admin.post("/admin/v1/reload")

    async def chat(self, model: str = MODEL) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        return await self.client.post("/v1/chat/completions", json=body)

    async def reloads(self, result: str) -> float:
        return await self.metric(f'warmpath_config_reloads_total{{result="{result}"}}')

    async def metric(self, name: str) -> float:
        text = (await self.admin.get("/metrics")).text
        return float(next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name)))

    async def config(self) -> Any:
        return (await self.admin.get("/admin/v1/config")).json()

    async def healthy(self, *ids: str) -> None:
        async with asyncio.timeout(30):
            while True:
                found = (await self.admin.get("/admin/v1/replicas")).json()["replicas"]
                if sorted(replica["id"] for replica in found if replica["healthy"]) == sorted(ids):
                    return
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(folder: Path, **values: Any) -> AsyncIterator[Served]:
    """A gateway that keeps an eye on its file."""
    file = folder / "warmpath.yaml"
    file.write_text(yaml.safe_dump({"state_dir": str(folder), **values}))
    source = SettingsSource(load=lambda: load_settings(file), file=file)
    settings = source.load()
    gateway = build_gateway(settings, await open_key_store(settings), source)
    _, key = await gateway.keys.create("client", name="t")
    _, admin_key = await gateway.keys.create("admin", name="t")
    async with (
        gateway.background(),
        serving(gateway.public, http=Listener().protocol) as url,
        serving(gateway.admin, http=Listener().protocol) as admin_url,
        _http(url, key) as client,
        _http(admin_url, admin_key) as admin,
    ):
        yield Served(file, client, admin, gateway)


def _http(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=20, verify=False)


def at(replica: StubReplica, replica_id: str, **more: Any) -> dict[str, Any]:
    return {"url": replica.url, "id": replica_id, **more}


BAD: list[str] = [
    "server: {port: high}",
    "no_such_group: {}",
    "routing: {policy: best}",
    "replicas: [{url: 'ftp://x'}]",
    "replicas: [{url: 'http://10.0.0.1:8000', id: a}, {url: 'http://10.0.0.2:8000', id: a}]",
    "replicas: [{url: 'http://10.0.0.1:8000', id: taken}]",
    "aliases: {a: b, b: c}",
    "probes: {rise: 0}",
    "stream: {idle_s: .nan}",
    "limits: {requests_per_minute: -1}",
    "limits: {requests_per_minute: 1}\nlimits: {}",
    "{",
    "- a",
    "text",
    "\x00",
    "tenants: {blue: {weight: 0}}",
    "registry: {networks: [10.0.0.0/99]}",
    "leases: {lease_s: 0}",
    "models: {'../m': {}}",
    "admission: {max_queued: -1}",
]


async def test_fifty_bad_settings_under_load_change_nothing_and_cost_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stub(says("hi")) as replica, served(tmp_path, replicas=[at(replica, "r")]) as running:
        await running.healthy("r")
        taken = ReplicaSpec(url="http://127.0.0.1:8999", model="other", kind="openai")
        running.gateway.registry.add_by_hand("taken", taken, Registrant("op", is_admin=True), 0.0)
        before = await running.config()
        statuses: list[int] = []
        done = asyncio.Event()

        async def load() -> None:
            while not done.is_set():
                statuses.append((await running.chat()).status_code)

        loads = [asyncio.create_task(load()) for _ in range(3)]
        try:
            for number in range(50):
                running.file.write_text(BAD[number % len(BAD)])
                answer = await running.reload()
                assert answer.status_code == 400, BAD[number % len(BAD)]
                assert answer.json()["error"]["code"] == "invalid_settings"
        finally:
            done.set()
            await asyncio.gather(*loads)

        assert set(statuses) == {200}
        assert len(statuses) > 3
        assert await running.config() == before
        bad = await running.reloads("bad")
        assert bad == caplog.text.count("the settings were not changed")
        assert bad >= 50, "the watch of the file tried as well, now and then"
        assert await running.reloads("ok") == 0
        running.write(replicas=[at(replica, "r")])
        assert (await running.reload()).json() == {"changed": [], "needs_restart": []}


async def test_every_fault_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path) as running:
        running.file.write_text("server: {port: high}\nprobes: {rise: 0}\n")

        message = (await running.reload()).json()["error"]["message"]

        for told in (message, caplog.text):
            assert "server.port" in told
            assert "probes.rise" in told


async def test_good_settings_take_effect_at_once_and_what_is_known_stays(tmp_path: Path) -> None:
    async with stub(says("one")) as one, stub(says("two")) as two, served(tmp_path, replicas=[at(one, "a")]) as running:
        await running.healthy("a")
        await running.chat()
        running.write(
            replicas=[at(one, "a"), at(two, "b")],
            aliases={"gpt": MODEL},
            routing={"policy": "round_robin"},
            limits={"requests_per_minute": 100},
            leases={"lease_s": 7},
            registry={"networks": ["10.0.0.0/8"]},
            server={"port": 9999},
        )

        answer = (await running.reload()).json()

        assert set(answer["changed"]) == {
            *("replicas", "aliases", "routing.policy", "limits.requests_per_minute", "leases.lease_s"),
            "registry.networks",
        }
        assert answer["needs_restart"] == ["server.port"]
        await running.healthy("a", "b")
        answers = [await running.chat("gpt") for _ in range(4)]
        assert {reply.json()["choices"][0]["message"]["content"] for reply in answers} == {"one", "two"}
        assert answers[0].headers["x-ratelimit-limit-requests"] == "100"
        config = await running.config()
        assert (config["routing"]["policy"], config["server"]["port"]) == ("round_robin", 8000)
        replicas = {found["id"]: found for found in (await running.admin.get("/admin/v1/replicas")).json()["replicas"]}
        assert replicas["a"]["healthy"], "it was never away"
        added = await running.admin.post("/workers", json={"url": "http://127.0.0.1:8101"})
        assert added.status_code == 400, "outside the networks that are allowed now"

        running.write(replicas=[at(two, "b")])
        await running.reload()
        assert {(await running.chat()).json()["choices"][0]["message"]["content"] for _ in range(3)} == {"two"}


async def test_keys_of_the_settings_come_and_go(tmp_path: Path) -> None:
    old, new = (f"wp-{name}-{name * 10}" for name in ("oldkey", "newkey"))
    async with (
        stub(says("hi")) as replica,
        served(tmp_path, replicas=[at(replica, "r")], keys={"static": [{"name": "a", "key": old}]}) as running,
    ):
        await running.healthy("r")

        async def let_in(key: str) -> bool:
            answer = await running.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            return answer.status_code == 200

        assert (await let_in(old), await let_in(new)) == (True, False)
        running.write(
            replicas=[at(replica, "r")], keys={"static": [{"name": "a", "key": old}, {"name": "b", "key": new}]}
        )
        assert (await running.reload()).json() == {"changed": ["keys.static"], "needs_restart": []}
        assert (await let_in(old), await let_in(new)) == (True, True)

        running.write(replicas=[at(replica, "r")], keys={"static": [{"name": "b", "key": new}] * 2})
        refused = await running.reload()
        assert refused.status_code == 400
        assert "keys.static: the key 'b': there is another one" in refused.json()["error"]["message"]
        assert new not in refused.text
        assert (await let_in(old), await let_in(new)) == (True, True)

        running.write(replicas=[at(replica, "r")], keys={"static": [{"name": "b", "key": new}]})
        assert (await running.reload()).json()["changed"] == ["keys.static"]
        assert (await let_in(old), await let_in(new)) == (False, True)


async def test_requests_that_run_are_not_touched(tmp_path: Path) -> None:
    async with (
        stub(hangs) as replica,
        stub(says("new")) as new,
        served(tmp_path, replicas=[at(replica, "r")]) as running,
    ):
        await running.healthy("r")
        asked = asyncio.create_task(running.chat())
        await eventually(lambda: len(replica.seen) == 1)

        running.write(replicas=[at(new, "r")], stream={"first_byte_s": 1})
        await running.reload()
        await running.healthy("r")

        assert (await running.chat()).json()["choices"][0]["message"]["content"] == "new"
        assert not replica.seen[0].gone.is_set()
        assert not asked.done()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_file_that_changes_is_read_also_behind_a_link_that_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts a ConfigMap as file -> ..data/file, ..data -> ..2026_11_30, and turns ..data."""
    monkeypatch.setattr("gateway.reloader._POLL_S", 0.01)
    mounted = tmp_path / "mounted"
    for name, text in (("..1", "aliases: {a: one}\n"), ("..2", "aliases: {a: two}\n")):
        (mounted / name).mkdir(parents=True)
        (mounted / name / "warmpath.yaml").write_text(f"state_dir: {tmp_path}\n{text}")
    (mounted / "..data").symlink_to("..1")
    (mounted / "warmpath.yaml").symlink_to("..data/warmpath.yaml")
    file = mounted / "warmpath.yaml"
    source = SettingsSource(load=lambda: load_settings(file), file=file)
    settings = source.load()
    gateway = build_gateway(settings, await open_key_store(settings), source)

    async with gateway.background():
        (mounted / "..new").symlink_to("..2")
        (mounted / "..new").replace(mounted / "..data")
        await eventually(lambda: gateway.reloader.settings.aliases == {"a": "two"})

        file.unlink()  # about to be replaced
        await asyncio.sleep(0.05)
        assert gateway.reloader.settings.aliases == {"a": "two"}
        file.write_text(f"state_dir: {tmp_path}\naliases: {{a: three}}\n")
        await eventually(lambda: gateway.reloader.settings.aliases == {"a": "three"})

        before = gateway.reloader.settings
        gateway.reloader.ask()  # as SIGHUP does
        await eventually(lambda: gateway.reloader.settings is not before)


async def test_a_file_that_is_written_in_place_is_read_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    file = tmp_path / "warmpath.yaml"
    file.write_text("aliases: {a: one}")

    def stamp(_: Path | None) -> _Stamp:
        """Each look finds the file longer, until it is whole."""
        looks.append("")
        size = min(len(looks), 10)
        file.write_text("" if size < 10 else "aliases: {a: two}")
        return _Stamp(1, 1, 1, size)

    monkeypatch.setattr("gateway.reloader._POLL_S", 0.001)
    monkeypatch.setattr("gateway.reloader._stamp", stamp)
    values: list[dict[str, str]] = []
    reloader = Reloader(
        load_settings(file),
        SettingsSource(load=lambda: load_settings(file), file=file),
        faults_of=lambda new: [],
        apply=lambda new: values.append(new.aliases),
    )
    running = asyncio.create_task(reloader.run())
    await eventually(lambda: bool(values))
    running.cancel()

    assert values[0] == {"a": "two"}


async def test_what_is_no_file_any_more_changes_nothing(tmp_path: Path) -> None:
    """A pipe would hold up this reload and all after it; /dev/null says that there are no replicas."""
    async with served(tmp_path, aliases={"a": "m"}) as running:
        running.file.unlink()
        makers: list[Callable[[], None]] = [
            lambda: None,
            running.file.mkdir,
            lambda: os.mkfifo(running.file),
            lambda: running.file.symlink_to("/dev/null"),
            lambda: running.file.symlink_to(running.file),
        ]
        for make in makers:
            make()
            assert (await running.reload()).status_code == 400
            assert (await running.config())["aliases"] == {"a": "m"}
            if running.file.is_dir():
                running.file.rmdir()
            else:
                running.file.unlink(missing_ok=True)
        running.write(aliases={"b": "m"})
        assert (await running.reload()).json()["changed"] == ["aliases"]


async def test_fifty_changes_while_all_ask_for_a_reload_end_with_the_last_one(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, served(tmp_path, replicas=[at(replica, "r")]) as running:
        await running.healthy("r")

        async def change() -> None:
            for number in range(50):
                if number % 3 == 0:
                    running.file.unlink()
                elif number % 3 == 1:
                    running.file.write_text("{")
                else:
                    running.write(replicas=[at(replica, "r")], aliases={f"a{number}": MODEL})
                running.gateway.reloader.ask()  # as SIGHUP does
                await asyncio.sleep(0)

        changing = asyncio.create_task(change())
        answers = [await running.reload() for _ in range(20)]
        await changing
        running.write(replicas=[at(replica, "r")], aliases={"last": MODEL})
        await running.reload()

        assert {answer.status_code for answer in answers} <= {200, 400}
        assert (await running.config())["aliases"] == {"last": MODEL}
        assert (await running.chat("last")).status_code == 200


async def test_a_file_that_was_cut_to_nothing_is_no_settings(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, served(tmp_path, replicas=[at(replica, "r")]) as running:
        await running.healthy("r")
        running.file.write_text("")

        assert (await running.reload()).status_code == 400
        assert (await running.chat()).status_code == 200


async def test_settings_from_elsewhere_can_be_wrong_too(tmp_path: Path) -> None:
    def load() -> Settings:
        raise SettingsError(["environment: WARMPATH_REPLICAS is no JSON"])

    reloader = Reloader(Settings(), SettingsSource(load=load), faults_of=lambda new: [], apply=lambda new: None)

    with pytest.raises(SettingsError, match="WARMPATH_REPLICAS"):
        await reloader.reload()
