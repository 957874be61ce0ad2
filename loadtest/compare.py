"""Sends one workload through each router in turn and keeps what came of it, with all that it takes to do it again.

Every run has a fresh router and a fresh fleet, so none profits from what another one cached; runs of different routers
alternate, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from loadtest.arms import Arm
from loadtest.openloop import Answer, send_all
from loadtest.probe import Sample, scrape, watch
from loadtest.processes import SystemFailure
from loadtest.summary import Limits, Measured, Run, median_run, summarize
from loadtest.system import MODEL, FleetShape, Order, System, running_system
from loadtest.workloads import Workload, ideal_cached_tokens

__all__ = [
    "ORDERS",
    "Machine",
    "Report",
    "ReportUnreadable",
    "Setup",
    "compare",
    "read_report",
    "this_commit",
    "this_machine",
    "write_report",
]

_TIMEOUT_S: Final = 120.0
_LEAD_S: Final = 0.1
ORDERS: Final[Mapping[Order, tuple[str, str]]] = {
    "asked": ("", "compute in the order they are asked for, else first come, first served"),
    "arrival": ("-fcfs", "compute first come, first served"),
    "short-first": ("-short-first", "compute short prompts first, whoever sends them"),
}
"""In file names, and what replicas do."""
_NUMBERS: Final = re.compile(rb"\[[\s\d.,\-\[\]]+\]")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, so that it can be measured again."""

    workload: str
    load: float
    requests: int
    replicas: int
    processes: int
    speedup: float
    tokens_per_chunk: int
    kv_tokens: int
    order: Order
    seed: int
    runs: int
    limits: Limits
    to_the_end: bool = True
    """Whether every answer was waited for, also where none could change a percentile any more."""
    peers: dict[str, str] = {}
    """Command lines of other routers."""

    @property
    def file_name(self) -> str:
        """The beginning of the names of files about it, so that those of several can share a folder."""
        load = f"-{self.load:g}x" if self.workload == "trace" else ""
        return f"{self.workload}{load}{ORDERS[self.order][0]}"

    @property
    def order_in_words(self) -> str:
        return ORDERS[self.order][1]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    cpus: int
    system: str
    python: str
    load_average: float
    """Of the minute before: what others were doing."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    machine: Machine
    setup: Setup
    median: list[Run]
    """Of each router one run, with what plots need."""
    all: list[Run]


class ReportUnreadable(Exception):
    """A file is no report of ours."""


def compare(arms: Sequence[Arm], workload: Workload, setup: Setup, port: int, tell: Callable[[str], None]) -> Report:
    """Raises SystemFailure when a router or the fleet does not start, or ends early."""
    machine = this_machine()
    shape = FleetShape(
        replicas=setup.replicas,
        processes=setup.processes,
        speedup=setup.speedup,
        kv_tokens=setup.kv_tokens,
        tokens_per_chunk=setup.tokens_per_chunk,
        order=setup.order,
    )
    ideal = ideal_cached_tokens(workload.requests)
    done: list[Run] = []
    for number in range(setup.runs):
        for arm in arms:
            tell(f"run {number + 1} of {setup.runs}: {arm.name}")
            with running_system(arm, shape, port) as system:
                measured = _measure(system, workload, setup)
            done.append(
                summarize(arm.name, workload.requests, ideal, measured, speedup=setup.speedup, limits=setup.limits)
            )
    return Report(
        commit=this_commit(),
        machine=machine,
        setup=setup,
        median=[median_run([run for run in done if run.arm == arm.name]) for arm in arms],
        all=[run.without_plots() for run in done],
    )


def _measure(system: System, workload: Workload, setup: Setup) -> Measured:
    before, began = system.usage(), time.monotonic()
    try:
        answers, samples = uvloop.run(_drive(system, workload, setup))
    except OSError as error:
        system.check()
        raise SystemFailure(f"the fleet cannot be watched: {str(error) or type(error).__name__}") from error
    elapsed_s = time.monotonic() - began
    router, fleet = (now - then for now, then in zip(system.usage(), before, strict=True))
    return Measured(answers=answers, samples=samples, router=router, fleet=fleet, elapsed_s=elapsed_s)


async def _drive(system: System, workload: Workload, setup: Setup) -> tuple[list[Answer], list[Sample]]:
    samples: list[Sample] = []
    start = time.monotonic() + _LEAD_S
    watching = asyncio.create_task(watch(system.replica_ports, start, samples))
    try:
        answers = await send_all(
            system.ports, MODEL, workload.requests, setup.speedup, _TIMEOUT_S, start, to_the_end=setup.to_the_end
        )
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return answers, samples + await scrape(system.replica_ports, start)


def write_report(report: Report, path: Path) -> None:
    """Indented, but rows of numbers stay in one line."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    path.write_bytes(_NUMBERS.sub(lambda found: b"".join(found[0].split()), text) + b"\n")


def read_report(path: Path) -> Report:
    """Raises ReportUnreadable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ReportUnreadable(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ReportUnreadable(f"{path}: no report of this version of `warmpath bench fleet`: {error}") from error


def this_machine() -> Machine:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return Machine(
        cpu=names[0].partition(":")[2].strip() if names else platform.machine(),
        cpus=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load_average=round(os.getloadavg()[0], 2),
    )


def this_commit() -> str:
    """Of the code that runs here; '' where that is no checkout."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip()
