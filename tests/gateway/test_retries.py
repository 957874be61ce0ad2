from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.retries import Quarantine, RetryBudget, fingerprint

A, B = fingerprint("t", b"a"), fingerprint("t", b"b")


@given(st.lists(st.sampled_from(["begin", "retry", "end retry", "end"]), max_size=200))
def test_never_more_than_a_fifth_of_all_requests_are_in_their_second_try(steps: list[str]) -> None:
    budget = RetryBudget()
    for step in steps:
        if step == "begin":
            budget.active += 1
        elif step == "end" and budget.active > budget.retrying:
            budget.active -= 1
        elif step == "end retry" and budget.retrying:
            budget.end()
        elif step == "retry":
            allowed = budget.retrying < max(3, budget.active / 5)
            assert budget.try_begin() == allowed


def test_one_lost_replica_is_no_reason_and_two_are() -> None:
    quarantine = Quarantine()
    assert not quarantine

    assert not quarantine.crashed(A, 0.0)
    assert not quarantine.holds(A, 1.0)
    assert quarantine.crashed(A, 1.0)
    assert quarantine.holds(A, 2.0)
    assert not quarantine.holds(B, 2.0)


def test_suspicion_ends() -> None:
    quarantine = Quarantine()
    quarantine.crashed(A, 0.0)
    quarantine.crashed(A, 1.0)

    assert quarantine.holds(A, 600.0)
    assert not quarantine.holds(A, 602.0)
    assert not quarantine.crashed(A, 602.0)
    quarantine.crashed(B, 1300.0)
    assert not quarantine.holds(A, 1300.0)


def test_it_remembers_a_bounded_number() -> None:
    quarantine = Quarantine()
    for number in range(2 * Quarantine.MOST):
        quarantine.crashed(fingerprint("t", b"%d" % number), 0.0)

    assert len(quarantine._suspects) == Quarantine.MOST


def test_tenants_do_not_share_a_fingerprint() -> None:
    assert fingerprint("t", b"a") != fingerprint("u", b"a")
