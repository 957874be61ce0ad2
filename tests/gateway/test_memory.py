"""What a process does with memory that requests leave."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
from gateway.serving import keep_freed_memory
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
