"""Metrics of several processes as one gateway's: sums that never go back, also when a process does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from gateway.processes.control import FAMILIES, encode
from gateway.processes.merged_metrics import MergedMetrics, families_of


class Process:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter("requests", "Requests.", ["model"], registry=self._registry)
        self.seconds = Histogram("seconds", "Seconds.", buckets=(1, 2), registry=self._registry)
        self.open = Gauge("open", "Open.", registry=self._registry)
        self.memory = Gauge("process_memory", "Memory.", registry=self._registry)

    def tell(self, merged: MergedMetrics, name: str) -> None:
        merged.take(name, FAMILIES.decode(encode(families_of(self._registry.collect()))))


def shown(merged: MergedMetrics) -> dict[str, float]:
    return {
        "|".join([sample.name, *sample.labels.values()]): sample.value
        for metric in merged.families()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def test_what_is_counted_is_added_up_and_what_is_of_a_process_is_shown_of_each() -> None:
    merged, one, two = MergedMetrics(), Process(), Process()
    one.requests.labels("a").inc(3)
    two.requests.labels("a").inc(4)
    two.requests.labels("b").inc(1)
    for seconds in (0.5, 1.5, 9):
        one.seconds.observe(seconds)
    two.seconds.observe(0.5)
    one.open.set(2)
    two.open.set(5)
    one.memory.set(100)
    two.memory.set(200)

    one.tell(merged, "1")
    two.tell(merged, "2")

    seen = shown(merged)
    assert seen["requests_total|a"] == 7
    assert seen["requests_total|b"] == 1
    assert seen["seconds_bucket|1.0"] == 2
    assert seen["seconds_bucket|+Inf"] == seen["seconds_count"] == 4
    assert seen["seconds_sum"] == 11.5
    assert seen["open"] == 7
    assert seen["process_memory|1"] == 100
    assert seen["process_memory|2"] == 200
    assert [metric.name for metric in merged.families()].count("requests") == 1


def test_a_process_that_ended_leaves_what_it_counted_and_nothing_else() -> None:
    merged, one, two = MergedMetrics(), Process(), Process()
    one.requests.labels("a").inc(3)
    one.open.set(2)
    one.tell(merged, "1")
    two.tell(merged, "2")

    merged.ended("1")
    merged.ended("1")

    seen = shown(merged)
    assert seen["requests_total|a"] == 3
    assert seen["open"] == 0
    assert "process_memory|1" not in seen


def test_what_a_process_tells_twice_counts_once() -> None:
    merged, one = MergedMetrics(), Process()
    one.requests.labels("a").inc()
    one.tell(merged, "1")
    one.requests.labels("a").inc()
    one.tell(merged, "1")

    assert shown(merged)["requests_total|a"] == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=40))
def test_a_counter_is_the_sum_of_all_that_was_told_and_never_goes_back(
    steps: list[tuple[int, int, bool]],
) -> None:
    merged, living, told, last = MergedMetrics(), {number: Process() for number in range(4)}, 0, 0.0
    for number, amount, ends in steps:
        living[number].requests.labels("a").inc(amount)
        told += amount
        living[number].tell(merged, str(number))
        if ends:
            merged.ended(str(number))
            living[number] = Process()

        now = shown(merged).get("requests_total|a", 0.0)
        assert now == told
        assert now >= last
        last = now


def test_the_oldest_beginning_is_that_of_the_sum() -> None:
    merged, one, two = MergedMetrics(), Process(), Process()
    for process in (one, two):
        process.requests.labels("a").inc()
    one.tell(merged, "1")
    two.tell(merged, "2")

    (requests,) = [metric for metric in merged.families() if metric.name == "requests"]
    assert created(requests) == min(created(metric) for process in (one, two) for metric in of(process))


def of(process: Process) -> list[Metric]:
    return [metric for metric in process._registry.collect() if metric.name == "requests"]


def created(metric: Metric) -> float:
    return next(sample.value for sample in metric.samples if sample.name.endswith("_created"))
