"""`warmpath explain` and `warmpath decisions`: where a request would go and why, and where the last ones went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from gateway.commands.admin_client import AdminClient, admin_client, admin_options, new_table, terminal

__all__ = ["decisions", "decisions_table", "explain", "explanation_table"]


@click.command(
    epilog="""\b
Examples:
  warmpath explain request.json                    # a body as clients send it
  warmpath explain --prompt 'Once upon a time'
  jq '.model = "m"' request.json | warmpath explain --group search
  warmpath explain request.json --json | jq .chosen
"""
)
@click.argument("body", type=click.File("rb"), default="-")
@click.option("--prompt", help="A text completion of this, in place of a body.")
@click.option("--model", help="Of --prompt; by default the only one there is.")
@click.option("--group", help="Sharing group to ask for; by default the one of keys without a tenant.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@admin_options
def explain(
    body: BinaryIO,
    prompt: str | None,
    model: str | None,
    group: str | None,
    as_json: bool,
    admin_url: str | None,
    admin_key: str | None,
    connection: Path,
) -> None:
    """Show where a request would go now, and what each replica would cost. Nothing is sent to any of them.

    BODY is a file with the request's JSON, - for standard input.
    """
    admin = admin_client(admin_url, admin_key, connection)
    asked = body.read() if prompt is None else _completion(admin, prompt, model)
    path = "/explain" if group is None else f"/explain?group={quote(group, safe='')}"
    found = admin.call("POST", path, asked)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    click.echo(f"{found['chosen']}: {found['reason']} (policy {found['policy']}, w {found['w']:.2f})")
    if found["queued"]:
        click.echo("It would wait first: every replica is saturated, or others wait already.")
    terminal().print(explanation_table(found))


def _completion(admin: AdminClient, prompt: str, model: str | None) -> bytes:
    if model is None:
        models = sorted({replica["model"] for replica in admin.call("GET", "/replicas")["replicas"]} - {""})
        if len(models) != 1:
            raise click.UsageError(f"name a --model: there are {', '.join(models) or 'none'}")
        (model,) = models
    return msgspec.json.encode({"model": model, "prompt": prompt})


def explanation_table(found: Mapping[str, Any]) -> Table:
    """The candidates, cheapest first."""
    table = new_table(
        "", "replica", "cost s", "wait s", "own s", "cached", "to compute", "in flight", "trust", "why not"
    )
    for each in sorted(found["candidates"], key=lambda each: (not each["eligible"], each["cost_s"])):
        table.add_row(
            "→" if each["replica"] == found["chosen"] else "",
            each["replica"],
            f"{each['cost_s']:.3f}",
            f"{each['wait_s']:.3f}",
            f"{each['own_s']:.3f}",
            str(each["matched_tokens"]),
            str(each["uncached_tokens"]),
            str(each["inflight"]),
            each["trust"],
            each["why_not"],
        )
    return table


@click.command(
    epilog="""\b
Examples:
  warmpath decisions
  warmpath decisions --limit 100 --json | jq '.[] | select(.cached_tokens != .matched_tokens)'
"""
)
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1), help="At most so many, the newest.")
@click.option("--json", "as_json", is_flag=True, help="For scripts; with all candidates.")
@admin_options
def decisions(limit: int, as_json: bool, admin_url: str | None, admin_key: str | None, connection: Path) -> None:
    """Show how the last requests were routed: predicted and reported cached tokens, time to the first byte."""
    found = admin_client(admin_url, admin_key, connection).call("GET", "/decisions")["decisions"][-limit:]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    terminal().print(decisions_table(found))


def decisions_table(found: list[Mapping[str, Any]]) -> Table:
    """One row a request, oldest first."""
    table = new_table(
        *("time", "request", "model", "replica", "reason", "tries", "status"),
        *("prompt", "predicted", "cached", "first byte s", "total s"),
    )
    for each in found:
        first_byte_s, cached = each["first_byte_s"], each["cached_tokens"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(each["time"])),
            escape(each["request_id"]),  # a client chooses it
            escape(each["model"]),
            each["chosen"],
            each["reason"],
            str(each["tries"]),
            str(each["status"]),
            str(each["prompt_tokens"]),
            str(each["matched_tokens"]),
            "–" if cached is None else str(cached),
            "–" if first_byte_s is None else f"{first_byte_s:.3f}",
            f"{each['duration_s']:.3f}",
        )
    return table
