"""The main job on real input: a real model on two replicas, driven by the official client through `warmpath smoke`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.default_model import default_model
from tests.system.processes import Up, running_up

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    default_model()
    with running_up(tmp_path_factory.mktemp("smoke")) as system:
        yield system


def test_a_start_with_the_model_at_hand_computes_for_seconds_only(up: Up) -> None:
    """As long as it computes, since a machine that does much else gives it less than its time.

    Twice the time is allowed: a core whose other half is busy with somebody else's work takes up to twice as long for the same.
    """
    assert up.start_cpu_s < 2 * 20


def test_the_smoke_run_finds_nothing_wrong(up: Up) -> None:
    smoke = up.run("smoke")

    print(smoke.stdout)
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    assert "worker-0" in smoke.stdout
    assert "worker-1" in smoke.stdout
