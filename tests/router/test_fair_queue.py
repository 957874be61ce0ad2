from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.fair_queue import Entry, FairQueue, Priority


def entry(
    tenant: str = "a",
    work: int = 10,
    *,
    item: int = 0,
    weight: float = 1.0,
    priority: Priority = Priority.DEFAULT,
    deadline: float = 100.0,
    rank: float = 0.0,
) -> Entry[int]:
    return Entry(item, tenant, weight, priority, work, deadline, rank)


works = st.integers(1, 1000)
weights = st.sampled_from([0.5, 1.0, 2.0, 5.0])


@settings(max_examples=50, deadline=None)
@given(st.lists(works, min_size=1, max_size=60), st.lists(works, min_size=1, max_size=60), weights, weights)
def test_while_two_tenants_wait_neither_gets_more_than_its_share_by_more_than_an_entry_of_each(
    ours: list[int], theirs: list[int], our_weight: float, their_weight: float
) -> None:
    queue: FairQueue[int] = FairQueue(200)
    for work in ours:
        queue.push(entry("a", work, weight=our_weight))
    for work in theirs:
        queue.push(entry("b", work, weight=their_weight))
    left = {"a": len(ours), "b": len(theirs)}
    served = {"a": 0.0, "b": 0.0}

    while left["a"] and left["b"]:
        head = queue.head()
        assert head is not None
        queue.pop(head.work)
        left[head.tenant] -= 1
        served[head.tenant] += head.work / head.weight

        assert abs(served["a"] - served["b"]) <= max(ours) / our_weight + max(theirs) / their_weight + 1e-6


def test_a_weight_of_three_gets_three_times_the_work() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    for _ in range(100):
        queue.push(entry("a", weight=3))
        queue.push(entry("b"))

    first = [queue.pop(10).tenant for _ in range(80)]

    assert 59 <= first.count("a") <= 61


def test_who_was_away_catches_up_on_its_credit_and_on_no_more() -> None:
    queue: FairQueue[int] = FairQueue(1000, credit=50)
    for _ in range(300):
        queue.push(entry("always"))
    for _ in range(100):
        queue.pop(10)
    for _ in range(20):
        queue.push(entry("back"))

    first = [queue.pop(10).tenant for _ in range(16)]

    assert first[:5] == ["back"] * 5
    assert 10 <= first.count("back") <= 11, "five ahead, and then in turn"


def test_leaving_and_coming_back_does_not_pay() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    for _ in range(100):
        queue.push(entry("stays"))
    served = []
    queue.push(entry("comes and goes"))
    for _ in range(100):
        tenant = queue.pop(10).tenant
        served.append(tenant)
        if tenant == "comes and goes":
            queue.push(entry(tenant))

    assert 49 <= served.count("comes and goes") <= 51


def test_what_an_answer_took_is_charged() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    for _ in range(10):
        queue.push(entry("talks much"))
        queue.push(entry("asks"))
    queue.pop(10)
    queue.charge("talks much", 50)

    assert [queue.pop(10).tenant for _ in range(5)].count("asks") == 5


def test_interactive_goes_first_and_batch_is_not_starved() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    for priority in Priority:
        for _ in range(200):
            queue.push(entry(priority=priority))

    first = [queue.pop(10).priority for _ in range(160)]

    assert first[:16] == [Priority.INTERACTIVE] * 16
    assert 8 <= first.count(Priority.BATCH) <= 11
    assert first.count(Priority.INTERACTIVE) >= 138


def test_when_full_the_tenant_with_most_waiting_loses_its_newest() -> None:
    queue: FairQueue[int] = FairQueue(4)
    flood = [entry("flood") for _ in range(4)]
    assert [queue.push(each) for each in flood] == [None] * 4

    own, other = entry("flood"), entry("quiet")

    assert queue.push(own) is own
    assert queue.push(other) is flood[3]
    assert len(queue) == 4


def test_what_is_urgent_takes_the_place_of_what_can_wait_of_the_same_tenant() -> None:
    queue: FairQueue[int] = FairQueue(1)
    batch, urgent = entry(priority=Priority.BATCH), entry()
    queue.push(batch)

    assert queue.push(urgent) is batch
    assert queue.push(batch) is batch


def test_a_queue_without_room_takes_nothing() -> None:
    queue: FairQueue[int] = FairQueue(0)
    asked = entry()

    assert queue.push(asked) is asked
    with pytest.raises(LookupError):
        queue.pop(1)


def test_those_who_come_and_leave_again_leave_nothing_behind() -> None:
    queue: FairQueue[int] = FairQueue(1000)
    queue.push(entry("stays"))
    for number in range(5000):
        gone = entry(f"t{number}")
        queue.push(gone)
        assert queue.remove(gone)
        assert not queue.remove(gone)

    assert len(queue) == 1
    assert len(queue._deadlines) < 200
    assert len(queue._shares) == 1


def test_what_waits_ahead_is_the_higher_priorities_and_ones_share_of_its_own() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for _ in range(10):
        queue.push(entry("a"))
    queue.push(entry("a", priority=Priority.INTERACTIVE))
    queue.push(entry("b"))

    assert queue.ahead_of("new", 1.0, Priority.DEFAULT) == 10
    assert queue.ahead_of("b", 1.0, Priority.DEFAULT) == 10 + 20
    assert queue.ahead_of("a", 1.0, Priority.DEFAULT) == 10 + 110


class Against(RuleBasedStateMachine):
    """Against a plain list: nothing is lost, nothing leaves twice, tenants keep their order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(12, credit=100)
        self.model: list[Entry[int]] = []
        self.numbers = itertools.count()
        self.now = 0.0

    @rule(
        tenant=st.sampled_from("abcd"),
        work=works,
        weight=weights,
        priority=st.sampled_from(Priority),
        patience=st.floats(0, 50),
    )
    def push(self, tenant: str, work: int, weight: float, priority: Priority, patience: float) -> None:
        new = entry(
            tenant, work, item=next(self.numbers), weight=weight, priority=priority, deadline=self.now + patience
        )
        full = len(self.model) == 12
        displaced = self.queue.push(new)
        assert (displaced is not None) == full
        self.model.append(new)
        if displaced is not None:
            self.model.remove(displaced)

    @rule(charged=st.integers(0, 500))
    def pop(self, charged: int) -> None:
        head = self.queue.head()
        assert (head is None) == (not self.model), "it is work conserving"
        if head is None:
            return
        assert self.queue.pop(charged + 1) is head
        older = [each for each in self.model if each.tenant == head.tenant and each.priority == head.priority]
        assert older[0] is head
        self.model.remove(head)

    @rule(draw=st.randoms(use_true_random=False))
    def remove(self, draw: random.Random) -> None:
        if self.model:
            gone = draw.choice(self.model)
            assert self.queue.remove(gone)
            self.model.remove(gone)

    @rule(seconds=st.floats(0, 30))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        expired = self.queue.expire(self.now)
        assert {each.item for each in expired} == {each.item for each in self.model if each.deadline <= self.now}
        self.model = [each for each in self.model if each.deadline > self.now]

    @rule(tenant=st.sampled_from("abcd"), work=works)
    def charge(self, tenant: str, work: int) -> None:
        self.queue.charge(tenant, work)

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.model)
        assert self.queue.work == sum(each.work for each in self.model)
        for priority in Priority:
            assert self.queue.depth(priority) == sum(each.priority is priority for each in self.model)


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_within_a_tenant_the_least_rank_goes_first_and_of_equals_who_came_first() -> None:
    queue: FairQueue[int] = FairQueue(100)
    gone, *entries = [entry(item=item, rank=rank) for item, rank in enumerate((0.0, 4.0, 1.0, 1.0))]
    for each in (gone, *entries):
        queue.push(each)

    queue.remove(gone)

    assert [queue.pop(1).item for _ in range(3)] == [2, 3, 1]


def test_one_tenants_short_ones_do_not_pass_another_tenants_turn() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for _ in range(4):
        queue.push(entry("a", rank=-1.0))
    queue.push(entry("b", rank=100.0))

    assert "b" in [queue.pop(10).tenant for _ in range(2)]
