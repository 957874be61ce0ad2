"""What lies at a replica and is computed after a prompt that comes now."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt_order import Behind, PromptOrder, Urgency

RATE = 1000.0


def firm(rank: float) -> Urgency:
    return Urgency(yields=False, rank=rank)


def test_what_is_less_urgent_is_behind_and_is_delayed() -> None:
    order = PromptOrder()
    order.add("long", firm(4.0), 4000, 0.0, RATE)
    order.add("short", firm(0.1), 100, 0.0, RATE)

    assert order.behind(firm(1.0), 0.0, RATE) == Behind(4000.0, 1)
    assert order.behind(firm(0.05), 0.0, RATE) == Behind(4100.0, 2)
    assert order.behind(firm(4.0), 0.0, RATE) == Behind(0.0, 0), "who came first goes first among equals"


def test_the_replica_works_off_what_is_most_urgent_first() -> None:
    order = PromptOrder()
    order.add("long", firm(4.0), 4000, 0.0, RATE)
    order.add("short", firm(1.5), 1000, 0.5, RATE)

    assert order.behind(firm(3.0), 1.0, RATE) == Behind(3500.0, 1), (
        "half a second of it was computed before the short one"
    )
    assert order.behind(firm(3.0), 2.0, RATE) == Behind(3000.0, 1)
    assert order.behind(firm(3.0), 9.0, RATE) == Behind(0.0, 0), "by then it should be done"


def test_what_yields_is_behind_all_that_does_not_and_has_no_right_to_be_counted() -> None:
    order = PromptOrder()
    order.add("flood", Urgency(yields=True, rank=0.0), 2000, 0.0, RATE)

    assert order.behind(firm(9.0), 0.0, RATE) == Behind(2000.0, 0)
    assert order.behind(Urgency(yields=True, rank=9.0), 0.0, RATE) == Behind(0.0, 0)


def test_what_was_computed_or_is_gone_is_behind_nobody() -> None:
    order = PromptOrder()
    order.add("a", firm(2.0), 2000, 0.0, RATE)
    order.add("b", firm(3.0), 2000, 0.0, RATE)

    order.discard("a", 1.0, RATE)

    assert order.behind(firm(0.0), 1.0, RATE) == Behind(2000.0, 1)
    order.discard("b", 1.0, RATE)
    assert len(order) == 0


def test_what_is_needed_first_is_not_behind() -> None:
    order = PromptOrder()
    order.add("a", firm(4.0), 4000, 0.0, RATE)
    order.add("b", firm(5.0), 1000, 0.0, RATE)

    needed = order.needed({"a": 1500.0}, 1.0, RATE)

    assert needed == {"a": 500.0}
    assert order.behind(firm(2.0), 1.0, RATE, needed) == Behind(3500.0, 2)


def test_where_what_has_begun_is_finished_first_it_is_behind_nobody() -> None:
    order = PromptOrder(interrupts=False)
    order.add("long", firm(4.0), 4000, 0.0, RATE)
    order.add("longer", firm(9.0), 5000, 0.0, RATE)
    order.add("short", firm(0.2), 100, 0.0, RATE)

    assert order.behind(firm(1.5), 1.0, RATE) == Behind(5000.0, 1)
    assert order.tokens_left(1.0, RATE) == 8100.0
    assert order.tokens_left(9.0, RATE) == 5100.0, "only its answer tells that another one has begun"
    order.discard("long", 5.0, RATE)
    assert order.tokens_left(5.05, RATE) == 5050.0, "the most urgent one"
    order.discard("longer", 5.05, RATE)
    order.discard("short", 5.1, RATE)
    assert len(order) == 0


@pytest.mark.parametrize("interrupts", [True, False])
@given(
    prompts=st.lists(st.tuples(st.booleans(), st.floats(0, 9), st.integers(0, 5000), st.floats(0, 1)), max_size=8),
    asked=st.tuples(st.booleans(), st.floats(0, 9)),
)
def test_it_is_never_more_than_was_sent_and_looking_changes_nothing(
    interrupts: bool, prompts: list[tuple[bool, float, int, float]], asked: tuple[bool, float]
) -> None:
    order, now = PromptOrder(interrupts=interrupts), 0.0
    for number, (yields, rank, tokens, pause) in enumerate(prompts):
        now += pause
        order.add(number, Urgency(yields, rank), tokens, now, RATE)

    behind = order.behind(Urgency(*asked), now, RATE)

    assert order.behind(Urgency(*asked), now, RATE) == behind
    less_urgent = [tokens for yields, rank, tokens, _ in prompts if (yields, rank) > asked]
    assert behind.tokens <= sum(less_urgent)
    assert behind.delayed <= len(less_urgent)
    assert behind.tokens <= order.tokens_left(now, RATE) <= sum(tokens for _, _, tokens, _ in prompts)
