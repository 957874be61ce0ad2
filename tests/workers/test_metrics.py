import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.workers.test_events import step
from workers.life import Life
from workers.metrics import Histogram, WorkerMetrics
from workers.simulated import simulated_info


def life(ending: str, seconds: float) -> Life:
    """A sequence that waited for a quarter of its time, and prefilled for as long."""
    return Life(
        request_id="r",
        model="m",
        choice=0,
        submitted_at=100.0,
        prefill_at=100.0 + seconds / 4,
        first_at=100.0 + seconds / 2,
        ended_at=100.0 + seconds,
        ending=ending,
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=1,
    )


def samples(metrics: WorkerMetrics) -> dict[tuple[str, str], float]:
    """(name, value of the label that is not common to all) → value."""
    return {
        (sample.name, sample.labels.get("le") or sample.labels.get("finished_reason") or ""): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_gauges_and_counters_are_those_of_the_last_report() -> None:
    metrics = WorkerMetrics(simulated_info(kv_tokens=1600), step())

    metrics.last_report = msgspec.structs.replace(
        step(running=3), kv_used_blocks=25, prompt_tokens_total=100, cached_tokens_total=64, generated_tokens_total=7
    )

    found = samples(metrics)
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:kv_cache_usage_perc", ""] == 0.25
    assert found["vllm:prefix_cache_queries_total", ""] == 100
    assert found["vllm:prefix_cache_hits_total", ""] == 64
    assert found["vllm:generation_tokens_total", ""] == 7


def test_endings_are_counted_by_reason() -> None:
    metrics = WorkerMetrics(simulated_info(), step())

    metrics.finished(life("stop", 1.0))
    metrics.finished(life("stop", 2.0))
    metrics.finished(life("abort", 3.0))

    found = samples(metrics)
    assert found["vllm:request_success_total", "stop"] == 2
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:request_success_total", "error"] == 0
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 3
    assert found["vllm:e2e_request_latency_seconds_sum", ""] == 6.0
    assert found["vllm:request_queue_time_seconds_sum", ""] == 1.5
    assert found["vllm:request_prefill_time_seconds_sum", ""] == 1.5
    assert found["vllm:request_decode_time_seconds_sum", ""] == 3.0


@given(values=st.lists(st.floats(0, 100)))
def test_a_bucket_counts_what_is_not_above_its_bound(values: list[float]) -> None:
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram(bounds)

    for value in values:
        histogram.observe(value)

    buckets = [sample.value for sample in histogram.family("h", "h", {"a": "b"}).samples if sample.name == "h_bucket"]
    assert buckets == [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
