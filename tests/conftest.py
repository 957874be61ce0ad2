"""What all tests share: how slow a property test may be, and what happens to a test whose needs are not met."""

from __future__ import annotations

import functools
import gc
import os

import httpx
import pytest
from hypothesis import settings

# Machines that run tests are shared and noisy: a slow example says nothing, a slow suite does.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# Before torch is loaded, here or in a worker that a test starts: a thread that waits for another one must not burn the core
# that this one needs. With spinning, two threads beside other work took 12 times the CPU time of one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# To lay out a heap takes a gateway 0.3 s of CPU, and tests start a hundred of them. Those that are about it switch it on.
os.environ.setdefault("WARMPATH_HUGE_PAGES", "off")

# Each client of httpx reads the system's certificates anew: 26 ms of CPU, for which nothing on this machine has a use.
pytest.MonkeyPatch().setattr("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context))

REQUIRE_ALL = os.environ.get("WARMPATH_TESTS_REQUIRE_ALL") == "1"
"""Set in CI: a tool or model that cannot be had there is a failure."""

ALLOWED_SKIPS = ("this CPU", "set WARMPATH_TESTS_", "npm is not installed", "there is no promtool")
"""What its processor cannot do is none, nor is a test too large to run unless it is asked for, nor one of a tool for others."""


def pytest_collection_finish() -> None:
    """What is here now stays to the end, so the garbage collector need not walk through it.

    That takes it half a second, which a test that measures how long a loop computes would find in the code under test.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:  # type: ignore[misc]
    report: pytest.TestReport = yield
    if REQUIRE_ALL and report.skipped and not any(reason in str(report.longrepr) for reason in ALLOWED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report
