"""`warmpath keys`: to make, list and revoke keys of a running gateway, over its admin API."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from gateway.commands.admin_client import admin_client, admin_options, new_table, terminal

__all__ = ["keys"]


@click.group(
    epilog="""\b
Examples:
  warmpath keys create --name ci --tenant search
  warmpath keys create --name me --tenant search --debug --rpm 60
  warmpath keys list
  warmpath keys revoke a1b2c3d4
"""
)
def keys() -> None:
    """Make, list and revoke keys."""


@keys.command("create")
@admin_options
@click.option("--name", required=True, help="For people.")
@click.option("--tenant", default="default", show_default=True, help="Keys of one tenant share cached prefixes.")
@click.option("--debug", is_flag=True, help="Answers to this key say how they were routed.")
@click.option("--rpm", type=click.IntRange(1), help="Requests a minute.")
def create_key(
    admin_url: str | None,
    admin_key: str | None,
    connection: Path,
    name: str,
    tenant: str,
    debug: bool,
    rpm: int | None,
) -> None:
    """Make a client key and show it, once."""
    admin = admin_client(admin_url, admin_key, connection)
    body = {"name": name, "tenant": tenant, "debug": debug}
    made = admin.call("POST", "/keys", body if rpm is None else {**body, "requests_per_minute": rpm})
    click.echo(made["key"])


@keys.command("list")
@admin_options
def list_keys(admin_url: str | None, admin_key: str | None, connection: Path) -> None:
    """Show every key but not its secret."""
    table = new_table("id", "kind", "name", "tenant", "requests/min", "debug", "state")
    for key in admin_client(admin_url, admin_key, connection).call("GET", "/keys")["keys"]:
        table.add_row(
            key["id"],
            key["kind"],
            key["name"],
            key["tenant"],
            str(key["requests_per_minute"] or "–"),
            "yes" if key["debug"] else "",
            "[red]revoked[/]" if key["revoked"] else "valid",
        )
    terminal().print(table)


@keys.command("revoke")
@admin_options
@click.argument("key_id")
def revoke_key(admin_url: str | None, admin_key: str | None, connection: Path, key_id: str) -> None:
    """Let nobody in with this key any more."""
    admin_client(admin_url, admin_key, connection).call("DELETE", f"/keys/{quote(key_id, safe='')}")
    click.echo(f"{key_id} revoked")
