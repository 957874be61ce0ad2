"""`warmpath bench`: measurements of whole systems, each a command of its own."""

from __future__ import annotations

import signal
import sys

import click

from loadtest.fleet import fleet
from loadtest.hotpath import gateway
from loadtest.matrix import matrix
from loadtest.restart import restart
from loadtest.soak import soak
from loadtest.streams import streams
from loadtest.trace import data

__all__ = ["main"]


@click.group()
def main() -> None:
    """Measure whole systems from outside."""
    # Told to end, it ends what it has started, as it does for Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


for command in (fleet, gateway, streams, soak, restart, matrix, data):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="warmpath bench")
