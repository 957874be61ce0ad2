"""`warmpath serve`: flags, file and environment become settings, and settings a running gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import uvloop

from gateway.app import run_gateway
from gateway.keys import KeyStoreError
from gateway.processes.supervising import run_supervisor
from gateway.reloader import SettingsSource
from gateway.serving import configure_logging
from gateway.settings_loader import SettingsError, load_settings, redacted

__all__ = ["serve"]


@click.command(
    epilog="""\b
Examples:
  warmpath serve                                   # keys are made at the first start and shown once
  warmpath serve --config warmpath.yaml
  warmpath serve --config warmpath.yaml --print-config
  warmpath serve --port 8000 --open --replicas http://127.0.0.1:8101,http://127.0.0.1:8102
\b
Settings: flags win over WARMPATH_* variables (WARMPATH_SERVER__PORT=9000), those over the file.
"""
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file; deploy/settings.yaml has every setting.",
)
@click.option("--host", help="Address for clients.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port for clients.  [default: 8000]")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Port of the admin API.  [default: 8001]")
@click.option(
    "--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Keys and secrets.  [default: .warmpath]"
)
@click.option("--processes", type=click.IntRange(1, 64), help="That share the port, each on a core.  [default: 1]")
@click.option("--replicas", help="URLs of OpenAI-compatible servers, separated by commas.")
@click.option("--open", "is_open", is_flag=True, default=None, help="No keys; only on a loopback address.")
@click.option("--policy", help="How replicas are chosen: cost, or one to compare with.  [default: cost]")
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"])
)
@click.option("--print-config", is_flag=True, help="Show all settings, secrets masked, and end.")
def serve(config: Path | None, log_level: str, print_config: bool, **flags: Any) -> None:
    """Run the gateway."""
    source = SettingsSource(load=lambda: load_settings(config, _nested(flags)), file=config)
    try:
        settings = source.load()
    except SettingsError as error:
        lines = "\n  ".join(error.faults)
        raise click.ClickException(f"the settings cannot be used:\n  {lines}") from error
    if print_config:
        click.echo(redacted(settings), nl=False)
        return
    configure_logging(log_level, settings.log.format)
    try:
        if settings.server.processes == 1:
            uvloop.run(run_gateway(settings, source))
        else:
            uvloop.run(run_supervisor(settings, source, log_level))
    except (OSError, KeyStoreError) as error:
        raise click.ClickException(f"cannot start: {error}") from error


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that were given, at their places in the settings."""
    server = {"host": flags["host"], "port": flags["port"], "open": flags["is_open"], "processes": flags["processes"]}
    replicas = flags["replicas"]
    found: dict[str, Any] = {
        "server": {name: value for name, value in server.items() if value is not None},
        "admin": {"port": flags["admin_port"]} if flags["admin_port"] is not None else {},
        "routing": {"policy": flags["policy"]} if flags["policy"] is not None else {},
        "state_dir": flags["state_dir"],
        "replicas": [{"url": url} for url in replicas.split(",")] if replicas else None,
    }
    return {name: value for name, value in found.items() if value}
