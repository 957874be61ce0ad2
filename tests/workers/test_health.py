from __future__ import annotations

from typing import Any

import pytest

from workers.health import IDLE_LIMIT_S, find_fault
from workers.rates import UNMEASURED_STEP_S, Rates


def fault(**facts: Any) -> str | None:
    return find_fault(**{"alive": True, "busy": False, "silent_s": 0.5, "step_limit_s": 10.0, "failing": False} | facts)


def test_an_engine_that_reports_is_well() -> None:
    assert fault() is None


def test_a_dead_engine_is_a_fault_whatever_it_last_said() -> None:
    assert fault(alive=False) == "the engine has ended"


def test_an_idle_engine_that_falls_silent_has_hung() -> None:
    assert fault(silent_s=IDLE_LIMIT_S + 0.1) is not None


def test_a_step_may_take_longer_than_an_idle_report_up_to_its_limit() -> None:
    assert fault(busy=True, silent_s=9.9) is None
    assert fault(busy=True, silent_s=10.1) is not None


def test_an_engine_whose_last_step_failed_is_not_well() -> None:
    assert fault(failing=True) == "the engine's last step failed"


@pytest.mark.parametrize(
    ("tok_s", "step_s", "limit_s"),
    [(1000, 0.03, 10), (100, 0.3, 10 * (5.12 + 0.3)), (20_000, 0.01, 10)],
)
def test_the_limit_of_a_step_follows_from_what_was_measured(tok_s: float, step_s: float, limit_s: float) -> None:
    rates = Rates(token_budget=512)
    assert rates.step_limit_s == UNMEASURED_STEP_S

    rates.observe(0, step_s)
    rates.observe(512, 512 / tok_s)

    assert rates.step_limit_s == pytest.approx(limit_s)
