"""A replica's Prometheus metrics, under vLLM's names, so that existing dashboards, autoscalers and routers read them.

Counts and gauges come from the engine's last report when Prometheus asks, and cost a step nothing. Latencies are observed
per chunk; for that the client library's histogram is too slow (about 2 us), a bisection into a list is not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from workers.life import Life
from workers.protocol import EngineInfo, StepReport

__all__ = ["CONTENT_TYPE", "Histogram", "WorkerMetrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_BOUNDS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BOUNDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts by upper bound. `observe` is one bisection."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class WorkerMetrics(Collector):
    """What one replica measures of itself."""

    def __init__(self, info: EngineInfo, report: StepReport) -> None:
        self._info = info
        self._labels = {"model_name": info.model, "engine": "0"}
        self.last_report = report
        self.time_to_first_token = Histogram(_TTFT_BOUNDS)
        self.inter_token_latency = Histogram(_GAP_BOUNDS)
        self._request_latency = Histogram(_REQUEST_BOUNDS)
        self._queue_time = Histogram(_REQUEST_BOUNDS)
        self._prefill_time = Histogram(_REQUEST_BOUNDS)
        self._decode_time = Histogram(_REQUEST_BOUNDS)
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def finished(self, life: Life) -> None:
        """One choice has ended."""
        self._finished[life.ending] += 1
        self._request_latency.observe(life.ended_at - life.submitted_at)
        if life.prefill_at is not None and life.first_at is not None:
            self._queue_time.observe(life.prefill_at - life.submitted_at)
            self._prefill_time.observe(life.first_at - life.prefill_at)
            self._decode_time.observe(life.ended_at - life.first_at)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        report, total = self.last_report, self._info.num_blocks
        yield self._gauge("num_requests_running", "Requests in the running batch.", report.running)
        yield self._gauge("num_requests_waiting", "Requests that wait to be scheduled.", report.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all.", report.kv_used_blocks / max(total, 1))
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", report.prompt_tokens_total)
        yield self._counter("prefix_cache_hits", "Prompt tokens found cached.", report.cached_tokens_total)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", report.prompt_tokens_total)
        yield self._counter("generation_tokens", "Tokens generated.", report.generated_tokens_total)
        yield self._counter("num_preemptions", "Requests preempted.", report.preemptions_total)
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success
        yield self._histogram("time_to_first_token_seconds", "Time to first token.", self.time_to_first_token)
        yield self._histogram("inter_token_latency_seconds", "Time between tokens.", self.inter_token_latency)
        yield self._histogram("e2e_request_latency_seconds", "Time of a whole request.", self._request_latency)
        yield self._histogram("request_queue_time_seconds", "Time before its first step.", self._queue_time)
        yield self._histogram("request_prefill_time_seconds", "From there to the first token.", self._prefill_time)
        yield self._histogram("request_decode_time_seconds", "From there to the end.", self._decode_time)
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        """What vLLM puts into labels; routers read block size and count from it."""
        labels = {
            **self._labels,
            "block_size": str(self._info.block_size),
            "num_gpu_blocks": str(self._info.num_blocks),
            "cache_dtype": self._info.precision,
            "enable_prefix_caching": "True",
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's configuration.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        return histogram.family(f"vllm:{name}", text, self._labels)
