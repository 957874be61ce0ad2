"""The `warmpath` command: knows subcommand → module, and nothing of what they do.

Gateway commands are imported when they are used. Workers and load tests are other programs: they are run by name in place of
this process, so that neither package is ever imported here.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final, cast

import click

from gateway.memory import lay_out_heap

__all__ = ["main"]

_OURS: Final = {
    "up": ("gateway.commands.up", "Run a gateway and workers here, ready to use."),
    "serve": ("gateway.commands.serve", "Run the gateway."),
    "replicas": ("gateway.commands.replicas", "Show, drain, cordon or add replicas of a running gateway."),
    "models": ("gateway.commands.models", "Show the models of a running gateway."),
    "explain": ("gateway.commands.explain", "Show where a request would go, and why."),
    "decisions": ("gateway.commands.explain", "Show where the last requests went."),
    "config": ("gateway.commands.models", "Show the settings of a running gateway."),
    "reload": ("gateway.commands.models", "Have a running gateway read its settings again."),
    "keys": ("gateway.commands.keys", "Make, show, change, rotate and revoke keys of a running gateway."),
}
_PROGRAMS: Final = {
    "worker": ("workers", "Run a replica: MODEL is a folder, a .gguf file, a hub id, 'default' or 'simulated'."),
    "smoke": ("loadtest.smoke", "Check a running system with the official OpenAI client."),
    "bench": ("loadtest.bench", "Compare routing policies over a simulated fleet."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_OURS, *_PROGRAMS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in _OURS:
            if name == "serve" and "--help" not in sys.argv:
                lay_out_heap()  # before what it imports
            return cast(click.Command, getattr(importlib.import_module(_OURS[name][0]), name))
        if name in _PROGRAMS:
            return _program(name, *_PROGRAMS[name])
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table, so that help imports nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in (_OURS | _PROGRAMS).items()])


def _program(name: str, module: str, about: str) -> click.Command:
    @click.command(
        name,
        help=about,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def run(args: tuple[str, ...]) -> None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606

    return run


@click.group(
    cls=_Commands,
    epilog="""\b
Examples:
  warmpath up                                    # a real model, two replicas, a gateway, on this machine
  warmpath up --model simulated                  # the same in seconds, with made-up text
  warmpath serve --config warmpath.yaml          # the gateway alone; workers register themselves
  warmpath serve --port 8000 --open --replicas http://127.0.0.1:8101,http://127.0.0.1:8102
  warmpath worker ./my-model --gateway http://127.0.0.1:8001
  warmpath replicas --watch
  warmpath explain request.json
  warmpath bench fleet --policies cost,round_robin
""",
)
@click.version_option(package_name="warmpath")
def main(**_: Any) -> None:
    """An OpenAI-compatible gateway that sends each prompt to the replica that already holds its KV cache."""


if __name__ == "__main__":
    main()
