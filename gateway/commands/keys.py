"""`warmpath keys`: the keys of a running gateway, over its admin API."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from gateway.commands.admin_client import admin_client, admin_options, new_table, terminal

__all__ = ["KeyTable", "keys"]

Key = Mapping[str, Any]

_LIMITS: Final = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "parallel_requests": "parallel",
    "tokens_per_day": "tokens/day",
    "usd_per_day": "USD/day",
}
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _duration(value: str | float) -> float:
    """``90s``, ``15m``, ``12h`` or ``30d`` as seconds."""
    found = re.fullmatch(r"(\d+)([smhd])", str(value))
    if found is None:
        raise click.BadParameter(f"'{value}' is no duration such as 90s, 15m, 12h or 30d")
    return int(found[1]) * _UNITS[found[2]]


def _limit(value: str) -> tuple[str, Any]:
    """``NAME=NUMBER``, or ``NAME=none``."""
    limit, _, number = value.partition("=")
    if limit not in _LIMITS:
        raise click.BadParameter(f"'{limit}' is none of {', '.join(_LIMITS)}")
    if number == "none":
        return limit, None
    try:
        return limit, float(number) if limit == "usd_per_day" else int(number)
    except ValueError:
        raise click.BadParameter(f"'{number}' is no number") from None


def _permissions(command: Callable[..., None]) -> Callable[..., None]:
    """What a key may: the options that making and changing one share."""
    for option in (
        click.option("--scope", "scopes", multiple=True, help="An endpoint it may use; by default all. Repeatable."),
        click.option(
            "--model", "models", multiple=True, help="A model or a glob it may use; by default all. Repeatable."
        ),
        click.option(
            "--limit",
            "limits",
            multiple=True,
            type=_limit,
            metavar="NAME=NUMBER",
            help=f"Of {', '.join(_LIMITS)}. Repeatable.",
        ),
        click.option("--rpm", type=click.IntRange(1), help="Short for --limit requests_per_minute=."),
    ):
        command = option(command)
    return command


_json_option = click.option("--json", "as_json", is_flag=True, help="For scripts.")


@click.group(
    epilog="""\b
Examples:
  warmpath keys create --name ci --tenant search
  warmpath keys create --name me --tenant search --model 'qwen*' --scope chat --rpm 60 --expires-in 30d
  warmpath keys list
  warmpath keys patch a1b2c3d4e5 --limit tokens_per_day=1000000
  warmpath keys rotate a1b2c3d4e5 --overlap 1h
  warmpath keys revoke a1b2c3d4e5
"""
)
def keys() -> None:
    """Make, show, change, rotate and revoke keys."""


@keys.command("create")
@admin_options
@click.option("--name", required=True, help="For people; two live keys of a tenant may share one.")
@click.option("--kind", type=click.Choice(["client", "admin", "join"]), default="client", show_default=True)
@click.option("--tenant", default="default", show_default=True, help="Whose it is.")
@click.option("--group", help="Keys of one group share cached prefixes.  [default: the tenant]")
@_permissions
@click.option(
    "--expires-in", "expires_in_s", type=_duration, metavar="DURATION", help="As 12h or 30d.  [default: never]"
)
@click.option("--debug", is_flag=True, help="Answers to this key say how they were routed.")
@_json_option
def create_key(
    admin_url: str | None,
    admin_key: str | None,
    connection: Path,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    limits: tuple[tuple[str, Any], ...],
    rpm: int | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Make a key and show it, once."""
    body = {name: value for name, value in fields.items() if value is not None}
    body |= {"scopes": scopes, "models": models, "limits": _limits(limits, rpm)}
    made = admin_client(admin_url, admin_key, connection).call("POST", "/keys", body)
    click.echo(_as_json(made) if as_json else made["key"])


@keys.command("list")
@admin_options
@click.option("--all", "with_dead", is_flag=True, help="Also those that are revoked or expired.")
@_json_option
def list_keys(admin_url: str | None, admin_key: str | None, connection: Path, with_dead: bool, as_json: bool) -> None:
    """Show keys, but not their secrets."""
    found = admin_client(admin_url, admin_key, connection).call("GET", "/keys")["keys"]
    table = KeyTable(time.time())
    shown = [key for key in found if with_dead or table.is_live(key)]
    if as_json:
        click.echo(_as_json(shown))
    else:
        terminal().print(table.render(shown))


@keys.command("show")
@admin_options
@click.argument("key_id")
@_json_option
def show_key(admin_url: str | None, admin_key: str | None, connection: Path, key_id: str, as_json: bool) -> None:
    """Show one key, but not its secret."""
    _print(admin_client(admin_url, admin_key, connection).call("GET", _path(key_id)), as_json)


@keys.command("patch")
@admin_options
@click.argument("key_id")
@click.option("--name", help="For people.")
@_permissions
@click.option("--all-scopes", is_flag=True, help="Take the restriction away.")
@click.option("--all-models", is_flag=True, help="Take the restriction away.")
@click.option("--expires-in", "expires_in_s", type=_duration, metavar="DURATION", help="As 12h or 30d, from now.")
@click.option("--never-expires", is_flag=True)
@click.option("--debug/--no-debug", default=None, help="Whether answers to this key say how they were routed.")
@_json_option
def patch_key(
    admin_url: str | None,
    admin_key: str | None,
    connection: Path,
    key_id: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    limits: tuple[tuple[str, Any], ...],
    rpm: int | None,
    all_scopes: bool,
    all_models: bool,
    never_expires: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """Change what a key may; what is not named stays as it is."""
    body = {name: value for name, value in fields.items() if value is not None}
    if scopes or all_scopes:
        body["scopes"] = scopes
    if models or all_models:
        body["models"] = models
    if changed := _limits(limits, rpm):
        body["limits"] = changed
    if never_expires:
        body["expires_in_s"] = None
    _print(admin_client(admin_url, admin_key, connection).call("PATCH", _path(key_id), body), as_json)


@keys.command("rotate")
@admin_options
@click.argument("key_id")
@click.option(
    "--overlap",
    "overlap_s",
    type=_duration,
    metavar="DURATION",
    default="1d",
    show_default=True,
    help="How long the old one still opens.",
)
@_json_option
def rotate_key(
    admin_url: str | None, admin_key: str | None, connection: Path, key_id: str, overlap_s: float, as_json: bool
) -> None:
    """Make a key's successor and show it, once."""
    admin = admin_client(admin_url, admin_key, connection)
    made = admin.call("POST", f"{_path(key_id)}/rotate", {"overlap_s": overlap_s})
    click.echo(_as_json(made) if as_json else made["key"])


@keys.command("revoke")
@admin_options
@click.argument("key_id")
def revoke_key(admin_url: str | None, admin_key: str | None, connection: Path, key_id: str) -> None:
    """Let nobody in with this key any more."""
    admin_client(admin_url, admin_key, connection).call("DELETE", _path(key_id))
    click.echo(f"{key_id} revoked")


class KeyTable:
    """Keys as rows. `now`: Unix seconds."""

    def __init__(self, now: float) -> None:
        self._now = now

    def is_live(self, key: Key) -> bool:
        return not key["revoked"] and (key["expires"] is None or key["expires"] > self._now)

    def render(self, found: list[Key]) -> Table:
        table = new_table("id", "kind", "name", "tenant", "group", "scopes", "models", "limits", "expires", "state")
        for key in found:
            table.add_row(
                key["id"],
                key["kind"],
                key["name"],
                key["tenant"],
                key["group"],
                " ".join(key["scopes"]) or "all",
                escape(" ".join(key["models"])) or "all",  # a glob is no markup
                _limits_told(key["limits"]),
                self._expiry(key),
                self._state(key),
            )
        return table

    def _expiry(self, key: Key) -> str:
        if key["expires"] is None:
            return "never"
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(key["expires"]))

    def _state(self, key: Key) -> str:
        if key["revoked"]:
            return "[red]revoked[/]"
        if not self.is_live(key):
            return "[red]expired[/]"
        marks = [mark for mark, holds in (("debug", key["debug"]), ("settings", key["source"] == "settings")) if holds]
        return " ".join(["[green]valid[/]", *marks])


def _limits(limits: tuple[tuple[str, Any], ...], rpm: int | None) -> dict[str, Any]:
    return dict(limits) | ({"requests_per_minute": rpm} if rpm is not None else {})


def _limits_told(limits: Mapping[str, Any]) -> str:
    told = [f"{limits[name]} {unit}" for name, unit in _LIMITS.items() if limits.get(name) is not None]
    return ", ".join(told) or "default"


def _print(key: Key, as_json: bool) -> None:
    if as_json:
        click.echo(_as_json(key))
    else:
        terminal().print(KeyTable(time.time()).render([key]))


def _as_json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _path(key_id: str) -> str:
    return f"/keys/{quote(key_id, safe='')}"
