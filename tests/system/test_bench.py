"""`warmpath bench` as a user runs it, in small."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import WARMPATH, alive, descendants, free_ports, wait_until

pytestmark = pytest.mark.system

STUB_PEER = f"{sys.executable} {Path(__file__).with_name('stub_peer.py')} {{port}} {{workers}}"


def bench(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [WARMPATH, "bench", "fleet", *args], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


def small_load() -> list[str]:
    port = str(free_ports(6)[0])
    size = ["--replicas", "2", "--processes", "1", "--limit", "25", "--speedup", "40", "--port", port]
    return ["--workload", "chats", *size]


def test_policies_and_another_router_are_compared_and_reported(tmp_path: Path) -> None:
    arms = ["--policies", "cost", "--knowledge", "exact,plain", "--peer", f"stub={STUB_PEER}"]

    run = bench(tmp_path, *small_load(), *arms, "--out", "report.json", "--plots", "plots")

    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["arm"] for row in report["median"]] == ["cost", "cost (plain)", "stub"]
    for row in report["median"]:
        total = row["total"]
        assert row["arm"] in run.stdout
        assert (total["requests"], total["errors"]) == (25, 0)
        assert 0 < total["ttft_ms"]["p50"] <= total["e2e_ms"]["p50"]
        assert 0 < total["hit_of_ideal"] <= 1
        assert row["cpu_ms"] > 0
        assert [len(series) > 1 for series in row["inflight"]] == [True, True]
    assert report["setup"]["seed"] == 1
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["chats-load.png", "chats-ttft.png"]


def test_a_peer_that_ends_at_once_is_told_with_what_it_said(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"no {{port}} for me\")' {{workers}}"

    run = bench(tmp_path, *small_load(), "--policies", "none", "--peer", f"broken={command}")

    assert run.returncode == 1
    assert "ended early with 1" in run.stderr
    assert "for me" in run.stderr


def test_told_to_end_it_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [WARMPATH, "bench", "fleet", *small_load(), "--policies", "cost", "--speedup", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        family: set[int] = set()

        def everything_runs() -> bool:
            family.update(descendants(process.pid))
            return len(family) >= 2

        wait_until(everything_runs, 30, "a fleet and a gateway are there")
        process.terminate()
        process.communicate(timeout=30)

    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(alive, family)), 5, "they have ended")
