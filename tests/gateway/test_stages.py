import pytest

from gateway.stages import is_staged


@pytest.mark.parametrize(
    ("num_running", "num_bytes", "expected"), [(1, 10, False), (4, 10, True), (32, 1 << 20, False)]
)
def test_who_is_alone_does_not_pause_and_nobody_waits_for_a_long_one(
    num_running: int, num_bytes: int, expected: bool
) -> None:
    assert is_staged(num_running, num_bytes) is expected
