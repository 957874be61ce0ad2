"""`warmpath bench restart`, small, over real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.restart import HELD_MS, restart
from tests.system.processes import free_ports

pytestmark = pytest.mark.system

SMALL = "--replicas 2 --processes 1 --blocks 5000 --talk-blocks 50 --rate 20 --before-s 2 --after-s 8"


def test_a_gateway_that_was_killed_knows_full_caches_again_by_their_snapshots(tmp_path: Path) -> None:
    """When it is back is the machine's affair, too; that it is, and that nothing held its loop, is not."""
    out = tmp_path / "restart.json"
    port = str(free_ports(8)[0])

    done = CliRunner().invoke(restart, [*SMALL.split(), "--port", port, "--out", str(out)])

    assert out.exists(), done.output
    result = json.loads(out.read_text())
    recovery = result["recovery"]
    assert result["blocks_least"] >= 5000
    assert result["snapshots"] == 2
    assert recovery["hit_of_ideal_before"] == 1.0
    assert recovery["back_s"] is not None
    assert result["held_ms"] <= HELD_MS
    assert result["cpu_s"] > 0
    assert done.exit_code == (0 if recovery["back_s"] <= 2.0 or result["starved_share"] > 0.2 else 1), done.output
