"""The tables of `warmpath replicas` and `warmpath models`, and their commands against a gateway that runs."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner, Result
from rich.console import Console
from rich.table import Table

from gateway.cli import main
from gateway.commands.models import models_table
from gateway.commands.replicas import ReplicaTable, _tables
from tests.gateway.stub import MODEL, Running, gateway, hangs, says, stub
from tests.serving import eventually

REPLICA: dict[str, Any] = {
    "id": "r",
    "model": "m",
    "healthy": True,
    "draining": False,
    "cordoned": False,
    "trust": "LEARNING",
    "inflight": 0,
    "load": None,
}
QUIET = {"in_flight": 0, "queued": 0, "per_s": 0.0, "failed_per_s": 0.0}


def shown(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue()


def test_a_models_name_is_shown_as_it_is() -> None:
    odd = "[red]odd[/x]"
    model = {
        "model": odd,
        "aliases": [],
        "key_space": "text",
        "block_size": 64,
        "healthy": 0,
        "replicas": 1,
        "max_model_len": None,
        "inflight": 0,
        "waiting": None,
        "hit_rate": None,
    }

    assert odd in shown(ReplicaTable().render([REPLICA | {"model": odd}], 0.0))
    assert odd in shown(models_table([model]))


def test_why_a_replica_gets_nothing_is_in_the_table() -> None:
    changes: dict[str, dict[str, Any]] = {
        "ready": {},
        "down": {"healthy": False},
        "mismatch": {"healthy": False, "mismatch": "serves another model"},
        "draining": {"draining": True},
        "cordoned": {"cordoned": True},
        "ejected": {"breaker": "open"},
    }
    for state, change in changes.items():
        assert state in shown(ReplicaTable().render([REPLICA | change], 0.0))


def test_a_stream_of_changes_is_one_table_that_follows() -> None:
    events: list[dict[str, Any]] = [
        {"time": 0.0, "replicas": [REPLICA | {"id": "a"}, REPLICA | {"id": "b"}], "requests": QUIET},
        {
            "time": 1.0,
            "replicas": [REPLICA | {"id": "c"}],
            "left": ["a"],
            "requests": QUIET | {"per_s": 2.5, "queued": 3},
        },
    ]

    _, after = map(shown, _tables(ReplicaTable(), iter(events)))

    assert [line.split()[0] for line in after.splitlines() if "LEARNING".lower() in line] == ["b", "c"]
    assert "2.5 requests/s, 0.0 failed/s, 0 in flight, 3 queued" in after


def test_tokens_a_second_are_counted_over_a_second_at_least() -> None:
    table = ReplicaTable()
    rates = []
    for now, total in ((0.0, 100), (0.2, 150), (1.0, 300), (1.1, 310), (3.0, 310), (4.0, 0)):
        load = {"running": 0, "waiting": 0, "kv_used_blocks": 0, "generated_tokens_total": total}
        text = shown(table.render([REPLICA | {"load": load, "capacity_blocks": 0}], now))
        rates.append(next(line for line in text.splitlines() if "learning" in line).split()[-2])

    assert rates == ["–", "–", "200.0", "200.0", "5.0", "–"]


# --- the commands


async def run(running: Running, *args: str) -> Result:
    environment = {
        "WARMPATH_ADMIN_URL": str(running.admin.base_url),
        "WARMPATH_ADMIN_KEY": running.admin.headers["authorization"].removeprefix("Bearer "),
    }
    return await asyncio.to_thread(CliRunner().invoke, main, args, env=environment)


async def test_what_operators_do_by_hand(tmp_path: Path) -> None:
    async with stub(says("hi")) as one, stub(says("hi")) as two, gateway(tmp_path, one) as running:
        mine = f"127-0-0-1-{one.port}"
        added = await run(running, "replicas", "add", two.url, "--id", "two")
        while (await running.admin.get("/admin/v1/replicas/two")).json()["healthy"] is False:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for command, field in (("cordon", "cordoned"), ("drain", "draining")):
            assert (await run(running, "replicas", command, mine)).exit_code == 0
            assert (await running.admin.get(f"/admin/v1/replicas/{mine}")).json()[field] is True
        listed = await run(running, "replicas")
        back = await run(running, "replicas", "uncordon", mine)
        heavier = await run(running, "replicas", "weight", "two", "2.5")
        as_json = msgspec.json.decode((await run(running, "replicas", "--json")).stdout)
        removed = await run(running, "replicas", "remove", "two")
        last = await run(running, "replicas", "remove", mine)
        unknown = await run(running, "replicas", "drain", "nobody")
        forced = await run(running, "replicas", "remove", mine, "--force")

    assert added.stdout.startswith("two added")
    assert "draining" in listed.stdout
    assert (back.exit_code, heavier.exit_code, removed.exit_code, forced.exit_code) == (0, 0, 0, 0)
    assert {found["id"]: (found["weight"], found["draining"], found["cordoned"]) for found in as_json} == {
        mine: (1.0, False, False),
        "two": (2.5, False, False),
    }
    assert (last.exit_code, "?force=true" in last.output) == (1, True)
    assert (unknown.exit_code, "There is no such replica" in unknown.output) == (1, True)


async def test_a_drain_is_waited_for_until_nothing_runs(tmp_path: Path) -> None:
    async with stub(hangs) as replica, gateway(tmp_path, replica) as running:
        mine = f"127-0-0-1-{replica.port}"
        asked = asyncio.create_task(running.chat())
        await eventually(lambda: len(replica.seen) == 1)
        overdue = await run(running, "replicas", "drain", mine, "--wait", "--deadline", "0.01")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        empty = await run(running, "replicas", "drain", mine, "--wait")

    assert overdue.exit_code == 1
    assert f"{mine}: 1 in flight" in overdue.output
    assert "not empty" in overdue.output
    assert empty.stdout.splitlines()[-1] == f"{mine}: 0 in flight"


async def test_models_settings_and_reload(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, aliases={"gpt-4o": MODEL}) as running:
        table = await run(running, "models")
        as_json = msgspec.json.decode((await run(running, "models", "--json")).stdout)
        settings = await run(running, "config")
        reloaded = await run(running, "reload")

    assert MODEL in table.stdout
    assert "gpt-4o" in table.stdout
    assert [model["healthy"] for model in as_json] == [1]
    assert f"gpt-4o: {MODEL}" in settings.stdout
    assert reloaded.stdout == "changed: nothing\n"


async def test_the_live_state_for_scripts_is_an_event_a_line(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        watching = asyncio.create_task(run(running, "replicas", "--watch", "--json"))
        await eventually(lambda: len(running.gateway.live) == 1)
        running.gateway.live.close()
        lines = (await watching).stdout.splitlines()

    assert msgspec.json.decode(lines[0])["type"] == "state"
