"""`warmpath bench gateway` over real processes, with a peer that is a gateway of ours by another name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from loadtest.hotpath import ROWS, gateway
from tests.system.processes import free_ports

pytestmark = pytest.mark.system


def test_every_row_is_measured_for_ours_and_for_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [msgspec.structs.replace(row, concurrency=min(row.concurrency, 4), requests=4) for row in ROWS]
    monkeypatch.setattr("loadtest.hotpath.ROWS", small)
    monkeypatch.setattr("loadtest.hotpath.REPLICAS", 1)
    out = tmp_path / "gateway.json"
    ours = f"{sys.executable} -m gateway serve --open --port {{port}} --admin-port {{spare_port}}"
    peer = f"other={ours} --state-dir {tmp_path / 'state'} --replicas={{workers}}"

    port = str(free_ports(40)[0])
    done = CliRunner().invoke(gateway, ["--rounds", "1", "--port", port, "--bare", "--peer", peer, "--out", str(out)])

    assert done.exit_code == 0, done.output
    cells = json.loads(out.read_text())["cells"]
    assert {(cell["router"], cell["row"]) for cell in cells} == {
        (router, row.name) for router in ("warmpath", "unobserved", "bare", "other") for row in ROWS
    }
    assert all(cell["median"] > 0 for cell in cells if cell["unit"] != "ms")


def test_a_row_that_does_not_exist_is_a_usage_error() -> None:
    done = CliRunner().invoke(gateway, ["--rows", "nothing"])

    assert done.exit_code == 2
    assert "CPU a request, 1 KB" in done.output
