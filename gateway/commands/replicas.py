"""`warmpath replicas`: who serves, live if wanted, and what operators do with one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from gateway.commands.admin_client import AdminClient, admin_client, admin_options, new_table, terminal

__all__ = ["ReplicaTable", "replicas"]

Replica = Mapping[str, Any]

_AGAIN_S: Final = 1.0
"""After a stream that broke, or a question about progress."""


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  warmpath replicas
  warmpath replicas --watch
  warmpath replicas --json | jq '.[].id'
  warmpath replicas --watch --json | jq -c .requests          # an event a line
  warmpath replicas drain worker-0 --wait
  warmpath replicas --admin-url http://10.0.0.5:8001 --admin-key wpa-…
""",
)
@admin_options
@click.option("--watch", is_flag=True, help="Keep the table up to date until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def replicas(
    context: click.Context,
    admin_url: str | None,
    admin_key: str | None,
    connection: Path,
    watch: bool,
    as_json: bool,
) -> None:
    """Show each replica: state, running requests, KV used, tokens a second, hit rate."""
    if context.invoked_subcommand is not None:
        context.obj = (admin_url, admin_key, connection)
        return
    admin = admin_client(admin_url, admin_key, connection)
    try:
        if watch:
            _watch(admin, as_json)
            return
    except KeyboardInterrupt:
        return
    found: list[Replica] = admin.call("GET", "/replicas")["replicas"]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        terminal().print(ReplicaTable().render(found, time.time()))


def _watch(admin: AdminClient, as_json: bool) -> None:
    if as_json:
        for event in admin.events("/events"):
            click.echo(msgspec.json.encode(event))
        return
    table = ReplicaTable()
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            try:
                for shown in _tables(table, admin.events("/events")):
                    live.update(shown, refresh=True)
            except click.ClickException as error:
                live.update(error.format_message(), refresh=True)  # a gateway that restarts does not end the watch
            time.sleep(_AGAIN_S)


def _tables(table: ReplicaTable, events: Iterator[Mapping[str, Any]]) -> Iterator[Table]:
    """How the table is after each event of a stream."""
    known: dict[str, Replica] = {}
    for event in events:
        known |= {replica["id"]: replica for replica in event["replicas"]}
        for replica_id in event.get("left", ()):
            known.pop(replica_id, None)
        yield table.render([known[replica_id] for replica_id in sorted(known)], event["time"], event["requests"])


class ReplicaTable:
    """Rows from what the admin API says; rates from the difference to the time before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, str] = {}

    def render(self, found: Sequence[Replica], now: float, requests: Mapping[str, Any] | None = None) -> Table:
        """`now`: when it was so, Unix seconds."""
        table = new_table("replica", "model", "state", "trust", "running", "waiting", "KV used", "tokens/s", "hit rate")
        for replica in found:
            table.add_row(*self._row(replica, now))
        if requests is not None:
            table.caption = (
                f"{requests['per_s']:.1f} requests/s, {requests['failed_per_s']:.1f} failed/s, "
                f"{requests['in_flight']} in flight, {requests['queued']} queued"
            )
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
        """Over a second at least: a step of the engine gives a token to each of its requests at once."""
        if total is None:
            return "–"
        at, before = self._before.setdefault(replica_id, (now, total))
        if now - at >= 1.0:
            self._before[replica_id] = (now, total)
            self._rates[replica_id] = f"{(total - before) / (now - at):.1f}" if total >= before else "–"
        return self._rates.get(replica_id, "–")


def _state(replica: Replica) -> str:
    if replica.get("mismatch"):
        return "[red]mismatch[/]"
    if not replica["healthy"]:
        return "[red]down[/]"
    for mark in ("draining", "cordoned"):
        if replica[mark]:
            return f"[yellow]{mark}[/]"
    if replica.get("breaker", "closed") != "closed":
        return "[yellow]ejected[/]"
    return "[green]ready[/]"


def _kv(load: Mapping[str, Any], capacity: int) -> str:
    if not load or not capacity:
        return "–"
    return f"{load['kv_used_blocks']} of {capacity} blocks"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"


# --- what operators do with one


def _admin(context: click.Context) -> AdminClient:
    admin_url, admin_key, connection = context.obj
    return admin_client(admin_url, admin_key, connection)


def _path(replica_id: str, more: str = "") -> str:
    return f"/replicas/{quote(replica_id, safe='')}{more}"


@replicas.command("add")
@click.argument("url")
@click.option("--id", "replica_id", help="By default made from the URL.")
@click.option("--model", default="", help="By default the first one that it lists.")
@click.option("--credential", default="", envvar="WARMPATH_REPLICA_CREDENTIAL", help="Sent to it as bearer token.")
@click.option(
    "--priority", is_flag=True, help="It computes in the order of the field priority, least first, as vLLM can."
)
@click.pass_context
def add(context: click.Context, url: str, replica_id: str | None, model: str, credential: str, priority: bool) -> None:
    """Add an OpenAI-compatible server, until it is removed or the gateway ends."""
    body = {"url": url, "id": replica_id, "model": model, "credential": credential, "priority": priority}
    added = _admin(context).call("POST", "/replicas", body)
    click.echo(f"{added['id']} added; it gets requests once it is found healthy")


@replicas.command("remove")
@click.argument("replica_id")
@click.option("--force", is_flag=True, help="Also the last healthy one of its model.")
@click.pass_context
def remove(context: click.Context, replica_id: str, force: bool) -> None:
    """Forget a replica at once; what runs there runs on."""
    _admin(context).call("DELETE", _path(replica_id, "?force=true" if force else ""))
    click.echo(f"{replica_id} removed")


@replicas.command("cordon")
@click.argument("replica_id")
@click.pass_context
def cordon(context: click.Context, replica_id: str) -> None:
    """Send a replica nothing new."""
    _admin(context).call("PATCH", _path(replica_id), {"cordoned": True})
    click.echo(f"{replica_id} cordoned")


@replicas.command("uncordon")
@click.argument("replica_id")
@click.pass_context
def uncordon(context: click.Context, replica_id: str) -> None:
    """Take a cordoned or draining replica back into service."""
    admin = _admin(context)
    admin.call("PATCH", _path(replica_id), {"cordoned": False})
    admin.call("DELETE", _path(replica_id, "/drain"))
    click.echo(f"{replica_id} in service")


@replicas.command("weight")
@click.argument("replica_id")
@click.argument("weight", type=click.FloatRange(0, 100, min_open=True))
@click.pass_context
def set_weight(context: click.Context, replica_id: str, weight: float) -> None:
    """Set a replica's share of the work against others of 1."""
    _admin(context).call("PATCH", _path(replica_id), {"weight": weight})
    click.echo(f"{replica_id} has weight {weight:g}")


@replicas.command("drain")
@click.argument("replica_id")
@click.option("--deadline", "deadline_s", default=300.0, show_default=True, help="Seconds until it counts as overdue.")
@click.option("--wait", is_flag=True, help="Until nothing runs there; fails at the deadline.")
@click.pass_context
def drain(context: click.Context, replica_id: str, deadline_s: float, wait: bool) -> None:
    """Send a replica nothing new because it is to end, and show what still runs there."""
    admin = _admin(context)
    progress = admin.call("POST", _path(replica_id, "/drain"), {"deadline_s": deadline_s})
    while True:
        click.echo(f"{replica_id}: {progress['inflight']} in flight")
        if progress["done"] or not wait:
            return
        if progress["overdue"]:
            raise click.ClickException(f"{replica_id} is not empty after {deadline_s:g} s")
        time.sleep(_AGAIN_S)
        progress = admin.call("GET", _path(replica_id))["drain"]
        if progress is None:
            raise click.ClickException(f"the drain of {replica_id} was ended by somebody else")
