"""Runs one of our commands and writes down how long it holds its event loop: `python -m loadtest.holds FILE MODULE …`.

A timer asks the loop for a turn every 2 ms and notes what the loop's thread *computed* since the turn before. Time on the clock
would show what else the machine does; computing is the command's own. So a hold is told at most 2 ms too long, for what ran
before the timer was due, and never too short. A turn takes 10 us.

The file gets a line for each hold that is worth telling: its end (`time.monotonic`) and its milliseconds.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final, TextIO

import uvloop

__all__ = ["longest_ms", "read_holds"]

_EVERY_S: Final = 0.002
_TOLD_S: Final = 0.005
"""Shorter ones are what requests are made of."""


def read_holds(file: Path) -> list[tuple[float, float]]:
    """(end, milliseconds) of each hold so far."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(float(at), float(ms)) for at, ms in (line.split() for line in lines)]


def longest_ms(holds: Iterable[tuple[float, float]], since: float) -> float:
    """The longest that ended after `since`; 0.0 where none was worth telling."""
    return max((ms for at, ms in holds if at > since), default=0.0)


def _probe(loop: asyncio.AbstractEventLoop, out: TextIO) -> None:
    """Watch the loop that runs in this thread, for as long as it runs."""
    computed_s = time.thread_time()

    def turn() -> None:
        nonlocal computed_s
        now_s = time.thread_time()
        held_s, computed_s = now_s - computed_s, now_s
        if held_s >= _TOLD_S:
            out.write(f"{time.monotonic():.4f} {1000 * held_s:.2f}\n")
        loop.call_later(_EVERY_S, turn)

    loop.call_later(_EVERY_S, turn)


def _probed(run: Callable[..., Any], out: TextIO) -> Callable[..., Any]:
    """`uvloop.run`, with a probe beside what it runs."""

    def probed(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
        async def beside() -> Any:
            _probe(asyncio.get_running_loop(), out)
            return await main

        return run(beside(), **options)

    return probed


def _main(file: str, module: str, *arguments: str) -> None:
    with Path(file).open("a", buffering=1) as out:
        uvloop.run = _probed(uvloop.run, out)
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
