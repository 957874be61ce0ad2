"""The ledger's promises, by example and against a plain model of them."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.limits.counters import BUCKET_S, WINDOW_S
from gateway.limits.ledger import LEASE_BUCKETS, Change, Granted, Ledger, Limit, Measure, Refused

DAY_S = 86_400
NOON = 20_000 * DAY_S + DAY_S / 2


def limit(measure: Measure, most: int, name: str = "key:a") -> Limit:
    return Limit(f"{name}:{measure.name.lower()}", measure, most)


def take(ledger: Ledger, limits: list[Limit], amounts: list[int], now: float, holder: str = "p") -> Granted | Refused:
    return ledger.acquire(holder, limits, amounts, now, NOON + now)


def test_a_whole_minutes_requests_may_come_at_once_and_not_one_more() -> None:
    ledger, three = Ledger(), limit(Measure.REQUESTS, 3)

    verdicts = [take(ledger, [three], [1], now=10.0) for _ in range(4)]

    assert [verdict.left for verdict in verdicts[:3] if isinstance(verdict, Granted)] == [[2], [1], [0]]
    assert verdicts[3] == Refused(three, wait_s=60.5, reset_s=60.5, left=0)


def test_who_waits_as_long_as_told_is_admitted_and_who_waits_less_is_not() -> None:
    ledger, two = Ledger(), limit(Measure.REQUESTS, 2)
    take(ledger, [two], [1], now=0.25)
    take(ledger, [two], [1], now=20.0)

    refused = take(ledger, [two], [1], now=30.0)

    assert refused == Refused(two, wait_s=30.5, reset_s=50.5, left=0)
    assert isinstance(take(ledger, [two], [1], now=60.49), Refused)
    assert isinstance(take(ledger, [two], [1], now=60.5), Granted)


def test_refused_by_one_limit_takes_from_none() -> None:
    ledger = Ledger()
    many, few = limit(Measure.REQUESTS, 100), limit(Measure.PARALLEL, 1)
    take(ledger, [many, few], [1, 1], now=0.0)

    assert isinstance(take(ledger, [many, few], [1, 1], now=0.0), Refused)
    assert ledger.used(many, 0.0, NOON) == 1


def test_the_limit_that_stands_in_the_way_longest_is_named() -> None:
    ledger = Ledger()
    requests, parallel = limit(Measure.REQUESTS, 1), limit(Measure.PARALLEL, 1)
    take(ledger, [requests, parallel], [1, 1], now=0.0)

    refused = take(ledger, [parallel, requests], [1, 1], now=1.0)

    assert isinstance(refused, Refused)
    assert refused.limit == requests


def test_more_than_a_whole_limit_will_never_do() -> None:
    tokens = limit(Measure.TOKENS, 100)

    refused = take(Ledger(), [tokens], [101], now=0.0)

    assert refused == Refused(tokens, wait_s=None, reset_s=0.0, left=100)


def test_what_was_reserved_and_not_used_is_free_at_once_and_more_than_reserved_counts() -> None:
    ledger, tokens = Ledger(), limit(Measure.TOKENS, 100)
    verdict = take(ledger, [tokens], [90], now=1.0)
    assert isinstance(verdict, Granted)

    ledger.settle("p", [tokens], (1, 90, 1, 90, 0), (1, 30, 0, 30, 0), verdict.bucket, 5.0, NOON)
    assert ledger.used(tokens, 5.0, NOON) == 30

    verdict = take(ledger, [tokens], [10], now=6.0)
    assert isinstance(verdict, Granted)
    ledger.settle("p", [tokens], (1, 10, 1, 10, 0), (1, 400, 0, 400, 0), verdict.bucket, 7.0, NOON)
    assert ledger.used(tokens, 7.0, NOON) == 430
    refused = take(ledger, [tokens], [1], now=8.0)
    assert isinstance(refused, Refused)
    assert refused.wait_s == 66.5 - 8.0  # when the overshoot has left


def test_a_correction_after_its_minute_changes_nothing() -> None:
    ledger, tokens = Ledger(), limit(Measure.TOKENS, 100)
    verdict = take(ledger, [tokens], [90], now=0.0)
    assert isinstance(verdict, Granted)
    take(ledger, [tokens], [50], now=61.0)

    ledger.settle("p", [tokens], (1, 90, 1, 90, 0), (0, 0, 0, 0, 0), verdict.bucket, 62.0, NOON)

    assert ledger.used(tokens, 62.0, NOON) == 50


def test_a_day_begins_at_midnight_utc_and_running_requests_go_with_it() -> None:
    ledger, budget = Ledger(math.inf), limit(Measure.TOKENS_DAY, 100)
    before, after = 20_000 * DAY_S - 60.0, 20_000 * DAY_S + 1.0
    reserved = (1, 60, 1, 60, 0)
    ledger.acquire("p", [budget], [60], 0.0, before)
    ledger.settle("p", [budget], reserved, (1, 60, 0, 60, 0), 0, 1.0, before)
    ledger.acquire("p", [budget], [40], 2.0, before)

    refused = ledger.acquire("p", [budget], [50], 3.0, before)
    assert isinstance(refused, Refused)
    assert refused.wait_s == 60.0
    assert ledger.used(budget, 61.0, after) == 40
    ledger.settle("p", [budget], (1, 40, 1, 40, 0), (1, 25, 0, 25, 0), 0, 62.0, after)
    assert ledger.used(budget, 62.0, after) == 25


def test_a_wall_clock_that_steps_back_over_midnight_and_forth_locks_nobody_out() -> None:
    ledger, budget = Ledger(math.inf), limit(Measure.TOKENS_DAY, 10)
    midnight = 20_000 * DAY_S
    for now, unix in enumerate((midnight + 5.0, midnight - 5.0, midnight + 5.0)):
        assert isinstance(ledger.acquire("p", [budget], [10], now * 10.0, unix), Granted)
        ledger.settle("p", [budget], (1, 10, 1, 10, 0), (1, 10, 0, 10, 0), 0, now * 10.0, unix)
        assert isinstance(ledger.acquire("p", [budget], [1], now * 10.0, unix), Refused)


def test_what_a_dead_process_held_is_free_when_told_or_when_its_time_is_over() -> None:
    ledger, parallel, budget = Ledger(hold_s=15.0), limit(Measure.PARALLEL, 2), limit(Measure.USD_DAY, 50)
    take(ledger, [parallel, budget], [1, 30], now=0.0, holder="one")
    take(ledger, [parallel, budget], [1, 20], now=0.0, holder="two")

    ledger.forget("one")
    assert ledger.used(parallel, 1.0, NOON) == 1
    assert ledger.used(budget, 1.0, NOON) == 20
    ledger.renew("two", [Change(parallel.counter, parallel.measure, held=1)], 10.0)
    assert ledger.used(parallel, 24.9, NOON) == 1
    assert ledger.used(budget, 24.9, NOON) == 0
    assert ledger.used(parallel, 25.0, NOON) == 0


def test_a_process_that_lives_gets_back_what_was_forgotten_and_no_more() -> None:
    ledger, parallel = Ledger(), limit(Measure.PARALLEL, 9)
    take(ledger, [parallel], [3], now=0.0)
    ledger.forget("p")

    for now in (1.0, 2.0):
        ledger.renew("p", [Change(parallel.counter, parallel.measure, held=3)], now)

    assert ledger.used(parallel, 3.0, NOON) == 3


def test_a_lease_counts_as_if_it_were_spent_at_its_end() -> None:
    ledger, requests = Ledger(), limit(Measure.REQUESTS, 10)

    verdict = ledger.acquire("p", [requests], [1], 0.0, NOON, extras=[4])

    assert verdict == Granted(bucket=0, left=[5], extras=[4])
    assert ledger.used(requests, 60.0 + LEASE_BUCKETS * BUCKET_S, NOON) == 5
    assert ledger.used(requests, 60.0 + (LEASE_BUCKETS + 1) * BUCKET_S, NOON) == 0


def test_a_lease_takes_no_more_than_there_is() -> None:
    ledger, requests = Ledger(), limit(Measure.REQUESTS, 3)

    assert ledger.acquire("p", [requests], [1], 0.0, NOON, extras=[9]) == Granted(0, [0], [2])


def test_counters_that_count_nothing_are_forgotten() -> None:
    ledger = Ledger()
    for number in range(100):
        take(ledger, [limit(Measure.REQUESTS, 10, f"key:{number}")], [1], now=0.0)

    take(ledger, [limit(Measure.REQUESTS, 10, "key:late")], [1], now=121.0)

    assert len(ledger) == 1


class AgainstAModel(RuleBasedStateMachine):
    """Two processes take and give back; the model keeps every amount with its time and adds up."""

    limits = (
        limit(Measure.REQUESTS, 4),
        limit(Measure.TOKENS, 100),
        limit(Measure.PARALLEL, 3),
        limit(Measure.TOKENS_DAY, 400),
        limit(Measure.REQUESTS, 6, "tenant:t"),
    )

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger(hold_s=math.inf)
        self.now = 0.0
        self.taken: list[tuple[float, list[int]]] = []
        """Time and requests, tokens of each admitted call, corrected."""
        self.running: list[tuple[str, int, int, int]] = []
        """Holder, tokens, bucket, place in `taken`."""
        self.spent = 0

    @rule(step=st.one_of(st.integers(0, 512), st.integers(0, 70 * 1024)))
    def wait(self, step: int) -> None:
        self.now += step / 1024

    @rule(holder=st.sampled_from("ab"), tokens=st.integers(0, 60))
    def acquire(self, holder: str, tokens: int) -> None:
        amounts = [1, tokens, 1, tokens, 1]
        before = [self.ledger.used(limit, self.now, NOON) for limit in self.limits]

        verdict = self.ledger.acquire(holder, self.limits, amounts, self.now, NOON)

        fits = all(
            used + amount <= limit.most for used, amount, limit in zip(before, amounts, self.limits, strict=True)
        )
        assert isinstance(verdict, Granted) == fits
        if isinstance(verdict, Granted):
            self.taken.append((self.now, [1, tokens]))
            self.running.append((holder, tokens, verdict.bucket, len(self.taken) - 1))
        else:
            assert before == [self.ledger.used(limit, self.now, NOON) for limit in self.limits]
            if verdict.wait_s is not None and verdict.limit.measure in (Measure.REQUESTS, Measure.TOKENS):
                self.now += verdict.wait_s
                one = [verdict.limit]
                amount = [amounts[self.limits.index(verdict.limit)]]
                assert self.ledger.used(verdict.limit, self.now, NOON) + amount[0] <= one[0].most

    @precondition(lambda self: self.running)
    @rule(data=st.data(), used=st.integers(0, 60), answered=st.booleans())
    def settle(self, data: st.DataObject, used: int, answered: bool) -> None:
        holder, tokens, bucket, place = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        used = min(used, tokens) if answered else 0

        self.ledger.settle(
            holder,
            self.limits,
            (1, tokens, 1, tokens, 0),
            (int(answered), used, 0, used, 0),
            bucket,
            self.now,
            NOON,
        )

        self.taken[place] = (self.taken[place][0], [int(answered), used])
        self.spent += used

    @rule(holder=st.sampled_from("ab"))
    def die(self, holder: str) -> None:
        self.ledger.forget(holder)
        self.running = [running for running in self.running if running[0] != holder]

    @invariant()
    def no_minute_holds_more_than_the_limit(self) -> None:
        for number, most in ((0, 4), (1, 100)):
            for begin, _ in self.taken:
                within = [amounts[number] for at, amounts in self.taken if begin <= at < begin + WINDOW_S]
                assert sum(within) <= most

    @invariant()
    def what_counts_is_what_was_taken(self) -> None:
        used = [self.ledger.used(limit, self.now, NOON) for limit in self.limits]
        for number, counted in ((0, used[0]), (1, used[1]), (0, used[4])):
            surely = sum(amounts[number] for at, amounts in self.taken if at > self.now - WINDOW_S)
            at_most = sum(amounts[number] for at, amounts in self.taken if at > self.now - WINDOW_S - BUCKET_S)
            assert surely <= counted <= at_most
        assert used[2] == len(self.running)
        assert used[3] == self.spent + sum(tokens for _, tokens, _, _ in self.running)


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
