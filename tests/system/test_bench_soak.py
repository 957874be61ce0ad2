"""`warmpath bench streams` and `bench soak`, small, over real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.soak import soak
from loadtest.streams import streams
from tests.system.processes import free_ports

pytestmark = pytest.mark.system


def test_every_chunk_of_many_open_streams_arrives_once_and_in_order(tmp_path: Path) -> None:
    out = tmp_path / "streams.json"
    port = str(free_ports(20)[0])

    done = CliRunner().invoke(streams, ["--streams", "50", "--seconds", "1", "--port", port, "--out", str(out)])

    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert result["complete"] == 50
    assert result["lost"] == result["disordered"] == result["failed"] == 0
    assert result["lag"]["samples"] > 10
    assert result["cpu_us_per_chunk"] > 0


def test_nothing_is_left_of_many_requests_a_fifth_of_them_aborted(tmp_path: Path) -> None:
    """Too few to say whether memory is flat: tables and the index still fill."""
    out = tmp_path / "soak.json"
    port = str(free_ports(20)[0])

    done = CliRunner().invoke(soak, ["--requests", "800", "--port", port, "--out", str(out)])

    result = json.loads(out.read_text())
    assert result["verdict"]["left"] == {}, done.output
    assert result["aborted"] > 80
    assert result["retries"] > 0
    assert set(result["endings"]) <= {"200", "400", "401", "404", "422", "500", "502", "broken"}
    assert result["endings"]["200"] > 400
