from workers.health import IDLE_LIMIT_S, STEP_LIMIT_S, find_fault


def test_an_engine_that_reports_is_well() -> None:
    assert find_fault(alive=True, busy=False, silent_s=0.5) is None


def test_a_dead_engine_is_a_fault_whatever_it_last_said() -> None:
    assert find_fault(alive=False, busy=False, silent_s=0.0) is not None


def test_an_idle_engine_that_falls_silent_has_hung() -> None:
    assert find_fault(alive=True, busy=False, silent_s=IDLE_LIMIT_S + 0.1) is not None


def test_a_step_may_take_longer_than_an_idle_report() -> None:
    assert find_fault(alive=True, busy=True, silent_s=IDLE_LIMIT_S + 0.1) is None
    assert find_fault(alive=True, busy=True, silent_s=STEP_LIMIT_S + 0.1) is not None
