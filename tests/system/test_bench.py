"""`warmpath bench fleet` as a user runs it, in small."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.system.processes import WARMPATH, free_ports

pytestmark = pytest.mark.system


@pytest.mark.parametrize("knowledge", ["exact", "plain"])
def test_the_fleet_benchmark_compares_policies_and_writes_its_report(tmp_path: Path, knowledge: str) -> None:
    port = str(free_ports(4)[0])
    asked = ["--policies", "cost,round_robin", "--replicas", "2", "--limit", "25", "--speedup", "40", "--port", port]

    run = subprocess.run(
        [WARMPATH, "bench", "fleet", "--workload", "chats", "--knowledge", knowledge, *asked, "--out", "report.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert run.returncode == 0, run.stderr
    assert "round_robin" in run.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["policy"] for row in report["median"]] == ["cost", "round_robin"]
    for row in report["median"]:
        assert (row["requests"], row["errors"]) == (25, 0)
        assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
        assert 0 < row["hit_of_ideal"] <= 1
        assert row["gateway_cpu_ms"] > 0
    assert report["setup"]["seed"] == 1


def test_an_unknown_policy_is_a_usage_error(tmp_path: Path) -> None:
    run = subprocess.run(
        [WARMPATH, "bench", "fleet", "--policies", "best"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )

    assert run.returncode == 2
    assert "'best' is none of" in run.stderr
