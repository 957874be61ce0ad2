"""What a restart bench concludes from its answers, and what the probe of held loops writes down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.holds import longest_ms, read_holds
from loadtest.openloop import Answer
from loadtest.recovery import Recovery, judge_recovery
from loadtest.workloads import Request

TALK = 1000
RATE = 8.0
HIT = Answer(0.0, 0.1, 0.2, TALK, 4)
MISS = Answer(0.0, 0.1, 0.2, 0, 4)
REFUSED = Answer(0.0, error="ConnectionRefusedError")
UNROUTABLE = Answer(0.0, last_s=0.05, error="503")
CUT = Answer(0.0, error="Lost")


def judged(*answers: Answer, killed_s: float) -> Recovery:
    requests = [Request(number / RATE, "", 4) for number in range(len(answers))]
    return judge_recovery(requests, answers, TALK, killed_s)


def test_the_first_window_as_good_as_before_ends_the_time() -> None:
    """Half a second has four requests. One that is refused while it is down misses nothing; one that fails later does."""
    first, second, third = [UNROUTABLE, UNROUTABLE, MISS, HIT], [HIT, HIT, MISS, HIT], [HIT] * 4

    found = judged(*[HIT] * 7, CUT, *[REFUSED] * 3, *first, *second, *third, HIT, killed_s=0.95)

    assert [(each.requests, each.failed, each.hit_of_ideal) for each in found.windows] == [
        (4, 2, 0.25),
        (4, 0, 0.75),
        (4, 0, 1.0),
    ]
    assert (found.hit_of_ideal_before, found.cut, found.refused, found.failed) == (1.0, 1, 3, 2)
    assert found.down_s == pytest.approx(11 / RATE - 0.95)
    assert found.served_s == pytest.approx(11 / RATE + 0.05 - 0.95)
    assert found.back_s == 1.5
    assert found.until_s == pytest.approx(11 / RATE - 0.95 + 1.5)


def test_back_is_measured_by_what_was_usual() -> None:
    found = judged(*[HIT, MISS] * 4, *[HIT, MISS] * 4, HIT, killed_s=0.95)

    assert found.hit_of_ideal_before == 0.5
    assert found.back_s == 0.5


def test_one_that_does_not_come_back_says_so() -> None:
    down = judged(*[HIT] * 4, *[REFUSED] * 10, killed_s=0.45)
    blind = judged(*[HIT] * 4, *[MISS] * 11, killed_s=0.45)

    assert (down.down_s, down.back_s, down.refused, down.windows) == (None, None, 10, [])
    assert blind.down_s == pytest.approx(0.05)
    assert blind.back_s is None


HELD = """\
import asyncio, time, uvloop

async def main():
    await asyncio.sleep(0.05)
    time.sleep(0.2)  # no computing
    await asyncio.sleep(0.05)
    began = time.thread_time()
    while time.thread_time() - began < 0.06:
        pass
    await asyncio.sleep(0.05)

if __name__ == "__main__":
    uvloop.run(main())
"""


def test_a_hold_is_what_was_computed_and_not_what_passed(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    record = tmp_path / "record"
    command = [sys.executable, "-m", "loadtest.holds", str(record), "held"]

    subprocess.run(command, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, check=True, timeout=60)

    holds = read_holds(record)
    assert 60 <= longest_ms(holds, 0.0) < 120
    assert longest_ms(holds, holds[-1][0]) == 0.0


def test_where_nothing_was_held_there_is_nothing(tmp_path: Path) -> None:
    assert read_holds(tmp_path / "none") == []
    assert longest_ms([], 0.0) == 0.0
