"""`warmpath models`, `warmpath config` and `warmpath reload`: what a running gateway serves, and by what settings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from gateway.commands.admin_client import admin_client, admin_options, new_table, terminal

__all__ = ["config", "models", "models_table", "reload"]

Model = Mapping[str, Any]


@click.command(
    epilog="""\b
Examples:
  warmpath models
  warmpath models --watch
  warmpath models --json | jq '.[] | select(.healthy < .replicas)'
"""
)
@admin_options
@click.option("--watch", is_flag=True, help="Keep the table up to date until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def models(admin_url: str | None, admin_key: str | None, connection: Path, watch: bool, as_json: bool) -> None:
    """Show each model: its other names, its replicas, what they have to do, how much of it was cached."""
    admin = admin_client(admin_url, admin_key, connection)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(admin.call("GET", "/models")["models"])))
        return
    if not watch:
        terminal().print(models_table(admin.call("GET", "/models")["models"]))
        return
    with Live(console=Console(), auto_refresh=False) as live:
        try:
            while True:
                try:
                    shown: Table | str = models_table(admin.call("GET", "/models")["models"])
                except click.ClickException as error:
                    shown = error.format_message()
                live.update(shown, refresh=True)
                time.sleep(1.0)
        except KeyboardInterrupt:
            return


def models_table(found: list[Model]) -> Table:
    """One row a model."""
    table = new_table(
        *("model", "also called", "matched by", "healthy", "context", "in flight", "waiting", "hit rate"),
    )
    for model in found:
        size = f"{model['block_size']} tokens" if model["key_space"] == "tokens" else "text"
        hit_rate, context = model["hit_rate"], model["max_model_len"]
        table.add_row(
            escape(model["model"]),
            ", ".join(model["aliases"]) or "–",
            size,
            f"{model['healthy']} of {model['replicas']}",
            str(context or "–"),
            str(model["inflight"]),
            "–" if model["waiting"] is None else str(model["waiting"]),
            "–" if hit_rate is None else f"{hit_rate:.0%}",
        )
    return table


@click.command()
@admin_options
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def config(admin_url: str | None, admin_key: str | None, connection: Path, as_json: bool) -> None:
    """Show the settings in force, secrets masked."""
    found = admin_client(admin_url, admin_key, connection).call("GET", "/config")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        click.echo(yaml.safe_dump(found, sort_keys=False), nl=False)


@click.command()
@admin_options
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def reload(admin_url: str | None, admin_key: str | None, connection: Path, as_json: bool) -> None:
    """Have the settings read again: all of them are swapped, or with a fault none."""
    plan = admin_client(admin_url, admin_key, connection).call("POST", "/reload")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(plan)))
        return
    click.echo(f"changed: {', '.join(plan['changed']) or 'nothing'}")
    if plan["needs_restart"]:
        click.echo(f"not in force before a restart: {', '.join(plan['needs_restart'])}")
