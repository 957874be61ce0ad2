"""What a process does with memory that requests leave."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import memory
from tests.system.processes import HAS_HUGE_PAGES

_PROGRAM = """
import resource
from gateway.memory import keep_freed_memory
keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        bodies = [bytes(256 << 10) + b"x" for _ in range(4)]
        del bodies
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have their own ways")
def test_bodies_that_come_and_go_cost_no_page_faults() -> None:
    told = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)

    assert int(told.stdout) < 500  # without it 16,000


_LAID_OUT = """
from gateway.memory import lay_out_heap
lay_out_heap()
made = [bytes(100) for _ in range(100_000)]
huge, found = 0, []
for line in open("/proc/self/smaps"):
    if line[0] in "0123456789abcdef":
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
    elif line.startswith("AnonHugePages") and (kilobytes := int(line.split()[1])):
        huge += kilobytes
        found.append((start, end))
print(huge, sum(any(start <= id(each) < end for start, end in found) for each in made))
"""


def _laid_out(**env: str) -> tuple[int, int]:
    """KB of huge pages, and how many of 100,000 objects made after it lie in memory that has some."""
    told = subprocess.run(
        [sys.executable, "-c", _LAID_OUT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **env},
    )
    huge_kb, num_inside = map(int, told.stdout.split())
    return huge_kb, num_inside


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="the kernel makes no huge pages at once")
def test_objects_lie_on_huge_pages_unless_that_is_switched_off() -> None:
    huge_kb, num_inside = _laid_out(WARMPATH_HUGE_PAGES="on")

    assert huge_kb > 8 << 10
    assert num_inside > 50_000
    assert _laid_out(WARMPATH_HUGE_PAGES="off") == (0, 0)


def test_without_huge_pages_nothing_is_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    for where in (tmp_path / "enabled", tmp_path / "none"):
        monkeypatch.setenv("WARMPATH_HUGE_PAGES", "on")
        monkeypatch.setattr(memory, "_THP", where)
        memory.lay_out_heap()

    assert not memory._pins
