"""`warmpath replicas`: what people ask of a running gateway, over its admin API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from gateway.commands.admin_client import AdminClient, admin_client, admin_options, new_table, terminal

__all__ = ["ReplicaTable", "replicas"]

Replica = Mapping[str, Any]


# --- replicas


@click.command(
    epilog="""\b
Examples:
  warmpath replicas
  warmpath replicas --watch
  warmpath replicas --json | jq '.[].id'
  warmpath replicas --admin-url http://10.0.0.5:8001 --admin-key wpa-…
"""
)
@admin_options
@click.option("--watch", is_flag=True, help="Keep the table up to date until Ctrl-C.")
@click.option(
    "--interval", "interval_s", default=1.0, show_default=True, type=click.FloatRange(0.1, 60), help="Seconds."
)
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def replicas(
    admin_url: str | None, admin_key: str | None, connection: Path, watch: bool, interval_s: float, as_json: bool
) -> None:
    """Show each replica: state, running requests, KV used, tokens a second, hit rate."""
    admin = admin_client(admin_url, admin_key, connection)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_replicas(admin))))
        return
    table = ReplicaTable()
    if not watch:
        terminal().print(table.render(_replicas(admin), time.monotonic()))
        return
    with Live(console=Console(), auto_refresh=False) as live:
        try:
            while True:
                live.update(_watched(table, admin), refresh=True)
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return


def _watched(table: ReplicaTable, admin: AdminClient) -> Table | str:
    """The table, or why there is none just now: a gateway that restarts does not end the watch."""
    try:
        return table.render(_replicas(admin), time.monotonic())
    except click.ClickException as error:
        return error.format_message()


def _replicas(admin: AdminClient) -> list[Replica]:
    found: list[Replica] = admin.call("GET", "/replicas")["replicas"]
    return found


class ReplicaTable:
    """Rows from what the admin API says; rates from the difference to the time before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    def render(self, found: list[Replica], now: float) -> Table:
        table = new_table("replica", "model", "state", "trust", "running", "waiting", "KV used", "tokens/s", "hit rate")
        for replica in found:
            table.add_row(*self._row(replica, now))
        return table

    def _row(self, replica: Replica, now: float) -> Iterator[str]:
        load = replica["load"] or {}
        yield replica["id"]
        yield escape(replica["model"])  # a foreign replica may call it anything
        yield _state(replica)
        yield str(replica["trust"]).lower()
        yield str(load.get("running", replica["inflight"]))
        yield str(load.get("waiting", "–"))
        yield _kv(load, replica.get("capacity_blocks") or 0)
        yield self._rate(replica["id"], load.get("generated_tokens_total"), now)
        yield _share(load.get("cached_tokens_total", 0), load.get("prompt_tokens_total", 0))

    def _rate(self, replica_id: str, total: int | None, now: float) -> str:
        if total is None:
            return "–"
        before = self._before.get(replica_id)
        self._before[replica_id] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return "–"
        return f"{(total - before[1]) / (now - before[0]):.1f}"


def _state(replica: Replica) -> str:
    if not replica["healthy"]:
        return "[red]down[/]"
    for mark in ("draining", "cordoned"):
        if replica[mark]:
            return f"[yellow]{mark}[/]"
    return "[green]ready[/]"


def _kv(load: Mapping[str, Any], capacity: int) -> str:
    if not load or not capacity:
        return "–"
    return f"{load['kv_used_blocks']} of {capacity} blocks"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"
