"""`warmpath bench`: measurements of whole systems, each a command of its own."""

from __future__ import annotations

import click

from loadtest.fleet import fleet

__all__ = ["main"]


@click.group()
def main() -> None:
    """Measure whole systems from outside."""


main.add_command(fleet)

if __name__ == "__main__":
    main(prog_name="warmpath bench")
