"""`loadtest/locustfile.py` headless, against a gateway and a simulated fleet."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.arms import Ours
from loadtest.system import FleetShape, running_system
from tests.system.processes import free_ports

pytestmark = pytest.mark.system

SECONDS = int(os.environ.get("WARMPATH_TESTS_LOCUST_S", "4"))
"""The real thing takes 60."""

LOCUST = str(Path(sys.executable).with_name("locust"))
FOLDER = Path(__file__).parents[2] / "loadtest"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    shape = FleetShape(replicas=2, processes=1, speedup=10.0, kv_tokens=1 << 20, tokens_per_chunk=4)
    with running_system(Ours("cost"), shape, free_ports(6)[0]) as system:
        yield f"http://127.0.0.1:{system.ports[0]}"


def locust(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LOCUST, "--headless", "--csv", "run", "--stop-timeout", "30", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS + 100,
        check=False,
    )


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.timeout(SECONDS + 120)
def test_a_headless_run_has_no_failures_and_rows_of_its_own(tmp_path: Path, url: str) -> None:
    run = locust(
        tmp_path, "-f", str(FOLDER / "locustfile.py"), "--host", url, "-u", "6", "-r", "6", "-t", f"{SECONDS}s"
    )

    assert run.returncode == 0, run.stderr
    stats = {(row["Type"], row["Name"]): row for row in rows(tmp_path / "run_stats.csv")}
    for name in ("shared prefix", "growing chat", "free chat"):
        first, between, whole = (stats[kind, name] for kind in ("TTFT", "ITL", "POST"))
        assert int(first["Request Count"]) == int(between["Request Count"]) == int(whole["Request Count"]) > 0
        assert float(between["Average Response Time"]) > 0
        assert 0 < float(first["Average Response Time"]) < float(whole["Average Response Time"])
        assert float(whole["Average Content Size"]) > 1, "tokens of the answers"
    assert stats["", "Aggregated"]["Failure Count"] == "0"


def test_a_ramp_sets_the_number_of_users(tmp_path: Path, url: str) -> None:
    files = f"{FOLDER / 'locustfile.py'},{FOLDER / 'ramps.py'}"

    run = locust(tmp_path, "-f", files, "--host", url, "--ramp", "1:3,3:3", "FreeChat")

    assert run.returncode == 0, run.stderr
    seen = {int(row["User Count"]) for row in rows(tmp_path / "run_stats_history.csv")}
    assert {1, 3} <= seen <= {0, 1, 2, 3}
    refused = locust(tmp_path, "-f", files, "--host", url, "--ramp", "1:2,x", "FreeChat")
    assert refused.returncode != 0
    assert "'x' is no USERS:SECONDS" in refused.stderr


def test_a_wrong_answer_is_a_failure(tmp_path: Path, url: str) -> None:
    run = locust(
        tmp_path,
        "-f",
        str(FOLDER / "locustfile.py"),
        "--host",
        url,
        "-u",
        "1",
        "-t",
        "2s",
        "--model",
        "none",
        "FreeChat",
    )

    assert run.returncode == 1
    stats = {(row["Type"], row["Name"]): row for row in rows(tmp_path / "run_stats.csv")}
    assert int(stats["POST", "free chat"]["Failure Count"]) > 0
    assert ("TTFT", "free chat") not in stats
