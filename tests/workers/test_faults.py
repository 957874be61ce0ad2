from __future__ import annotations

import re

import pytest

from workers.faults import KINDS, Fault, FaultPlan, When, parse_fault

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hang", Fault(kind="hang")),
        ("503", Fault(kind="503")),
        ("503=2:25%", Fault(kind="503", value=2, when=When(share=0.25))),
        ("1/die-after=5:3", Fault(kind="die-after", value=5, when=When(first=3, last=3), replica=1)),
        ("delay=0.5:*/4", Fault(kind="delay", value=0.5, when=When(every=4))),
        ("hang@/kv_snapshot", Fault(kind="hang", path="/kv_snapshot")),
        ("0/429=1.5:2-5@/v1/models", Fault(kind="429", value=1.5, when=When(2, 5), path="/v1/models", replica=0)),
        ("slow=4", Fault(kind="slow", value=4)),
    ],
)
def test_a_fault_is_written_in_a_word(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no fault"),
        ("explode", "KIND of hang, "),
        ("Hang", "is no fault"),
        ("-1/hang", "is no fault"),
        ("hang=1", "takes no value"),
        ("cut-after", "takes a number from 0 to"),
        ("cut-after=-1", "takes a number"),
        ("cut-after=nan", "takes a number"),
        ("slow=0.5", "from 1 to"),
        ("delay=601", "from 0 to 600"),
        ("hang:", "WHEN is"),
        ("hang:0", "WHEN is"),
        ("hang:often", "WHEN is"),
        ("hang:*/0", "WHEN is"),
        ("slow=2:3", "every step"),
        ("drop-events@/health", "not about one path"),
        ("new-epoch@/health", "not about one path"),
        ("hang@health", "is no fault"),
    ],
)
def test_what_is_no_fault_says_why_in_a_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        parse_fault(text)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("when", "hit"),
    [("hang", [1, 2, 3, 4, 5, 6]), ("hang:3", [3]), ("hang:2-4", [2, 3, 4]), ("hang:*/3", [3, 6])],
)
def test_numbers_say_which_requests(when: str, hit: list[int]) -> None:
    plan = FaultPlan([parse_fault(when)], seed=1)

    assert [number for number in range(1, 7) if plan.of_request("POST", CHAT)] == hit


def hits(text: str, seed: int, count: int = 2000) -> list[bool]:
    plan = FaultPlan([parse_fault(text)], seed=seed)
    return [plan.of_request("POST", CHAT) is not None for _ in range(count)]


def test_a_share_is_drawn_from_the_seed() -> None:
    assert hits("hang:25%", seed=1) == hits("hang:25%", seed=1)
    assert hits("hang:25%", seed=1) != hits("hang:25%", seed=2)
    assert 400 < sum(hits("hang:25%", seed=1)) < 600
    assert not any(hits("hang:0%", seed=1))
    assert all(hits("hang:100%", seed=1))


def test_a_fault_strikes_where_its_kind_does_or_where_it_was_told_to() -> None:
    def strikes(text: str, method: str, path: str) -> bool:
        return FaultPlan([parse_fault(text)], seed=0).of_request(method, path) is not None

    assert strikes("hang", "POST", "/v1/completions")
    assert not strikes("hang", "GET", "/v1/completions")
    assert not strikes("hang", "GET", "/health")
    assert strikes("hang@/health", "GET", "/health")
    assert not strikes("hang@/health", "POST", CHAT)
    assert strikes("new-epoch", "GET", "/kv_events")
    assert not strikes("drop-events", "GET", "/kv_events"), "that is about batches"


def test_the_first_fault_that_hits_has_the_request_and_all_count_it() -> None:
    plan = FaultPlan([parse_fault("503:2"), parse_fault("hang:2-3")], seed=0)

    chosen = [plan.of_request("POST", CHAT) for _ in range(3)]

    assert [fault and fault.kind for fault in chosen] == [None, "503", "hang"]


def test_the_slowest_slowness_counts() -> None:
    assert FaultPlan([parse_fault("slow=2"), parse_fault("slow=3")], seed=0).slowdown == 3
    assert FaultPlan([parse_fault("hang")], seed=0).slowdown == 1


def test_every_kind_can_be_written() -> None:
    for name, kind in KINDS.items():
        text = name if kind.value is None else f"{name}={max(kind.value[0], 1):g}"
        assert parse_fault(text).kind == name
