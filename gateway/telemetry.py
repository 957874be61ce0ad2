"""Every metric of the gateway, named once.

Counters and histograms are filled as requests end; what the router knows of replicas is read when somebody scrapes, so that a
replica that left leaves no series behind. Labels are bounded: models by `_MAX_MODELS`, replicas by the registry, the rest by
the code that gives them. Children are kept, since `labels()` costs more than the counting itself.

    labels      values
    model       a model that the router knows; '' before that is known; 'other' past the bound
    status      HTTP status of the answer, 499 when the client left
    reason      why the router chose, or why a replica failed
    replica     id
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.dispatch import Record
from router import BreakerState, GateView, ReplicaView, Trust
from router.wire import Load

__all__ = ["CONTENT_TYPE", "GapHistogram", "Telemetry"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_MAX_MODELS: Final = 256
"""Series a model costs: about 60. Model names come from replicas, so somebody could make up ever new ones."""

_TTFT_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
"""OpenTelemetry's advice for time to first token, and on to where CPU replicas and queues get."""
_DURATION_BOUNDS: Final = tuple(0.01 * 2**power for power in range(14))
"""OpenTelemetry's advice for whole requests: 10 ms doubling to 82 s."""
_GAP_BOUNDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""OpenTelemetry's advice for time per output token."""


class Telemetry:
    """One per gateway. Filled on the event loop; `render` may run in a thread."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "warmpath_requests",
            "Requests that ended, by status; 499 left early.",
            ["model", "status"],
            registry=registry,
        )
        self._ttft = Histogram(
            "warmpath_time_to_first_token_seconds",
            "From the request's arrival to the first byte of its answer.",
            ["model"],
            buckets=_TTFT_BOUNDS,
            registry=registry,
        )
        self._duration = Histogram(
            "warmpath_request_duration_seconds",
            "From the request's arrival to the end of its answer, of those that reached a replica.",
            ["model"],
            buckets=_DURATION_BOUNDS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "warmpath_prompt_tokens", "Prompt tokens, as replicas report them.", ["model"], registry=registry
        )
        self._completion_tokens = Counter(
            "warmpath_completion_tokens", "Generated tokens, as replicas report them.", ["model"], registry=registry
        )
        self._predicted = Counter(
            "warmpath_cached_tokens_predicted",
            "Prompt tokens that the router expected in the chosen replica's cache, where the replica reports what was.",
            ["model"],
            registry=registry,
        )
        self._reported = Counter(
            "warmpath_cached_tokens_reported",
            "Prompt tokens that replicas did find cached.",
            ["model"],
            registry=registry,
        )
        self._agreed = Counter(
            "warmpath_cached_tokens_agreed",
            "The smaller of the two, request by request: over predicted it is precision, over reported recall.",
            ["model"],
            registry=registry,
        )
        self._decisions = Counter(
            "warmpath_decisions", "Routing decisions by their reason.", ["model", "policy", "reason"], registry=registry
        )
        self._retries = Counter(
            "warmpath_retries", "Tries after the first, each at another replica.", ["model"], registry=registry
        )
        self._upstream_errors = Counter(
            "warmpath_upstream_errors",
            "Tries that a replica failed or refused.",
            ["model", "reason"],
            registry=registry,
        )
        self._refusals = Counter(
            "warmpath_limit_refusals", "Requests over a limit of their key.", ["limit"], registry=registry
        )
        self._queue_wait = Histogram(
            "warmpath_queue_wait_seconds",
            "Before a replica was free, of requests that had to wait and got one.",
            ["model"],
            buckets=_TTFT_BOUNDS,
            registry=registry,
        )
        self._queue_refusals = Counter(
            "warmpath_queue_refusals",
            "Requests that no replica was free for: full, displaced by another tenant's, deadline, no_replica.",
            ["model", "reason"],
            registry=registry,
        )
        self._gaps = GapHistogram()
        registry.register(self._gaps)
        self._models: dict[str, _ModelMetrics] = {}

    # --- what happened

    def finished(self, record: Record) -> None:
        """Count a request of the data path that ended, however it did."""
        model = self._model(record.model)
        model.requests(record.status).inc()
        if record.error_code == "rate_limit_exceeded":
            self._refusals.labels("requests").inc()
        if record.decision is None:
            return
        model.decisions(record.decision.policy, record.decision.reason).inc()
        model.retries.inc(record.tries - 1)
        model.duration.observe(record.duration_s)
        if record.first_byte_s is not None:
            model.ttft.observe(record.first_byte_s)
        if record.usage is None:
            return
        prompt_tokens = record.usage.prompt_tokens
        model.prompt_tokens.inc(prompt_tokens)
        model.completion_tokens.inc(record.usage.completion_tokens)
        if (reported := record.usage.cached_tokens) is not None:
            reported = min(reported, prompt_tokens)
            predicted = record.decision.matched_tokens
            model.predicted.inc(predicted)
            model.reported.inc(reported)
            model.agreed.inc(min(predicted, reported))

    def upstream_failed(self, model: str, reason: str) -> None:
        """Count a try that came to nothing. `reason`: the code of the error it would have been."""
        self._model(model).upstream_errors(reason).inc()

    def queue_wait(self, model: str, seconds: float) -> None:
        """Count a wait that ended at a replica."""
        self._model(model).queue_wait.observe(seconds)

    def queue_refused(self, model: str, reason: str) -> None:
        """Count a request that was not let through."""
        self._model(model).queue_refusals(reason).inc()

    def gap(self, model: str, seconds: float) -> None:
        """Count the time between two chunks of a stream. The one call per chunk: 0.2 us."""
        self._gaps.observe(model, seconds)

    # --- what is

    def render(self, replicas: Sequence[ReplicaView], in_flight: int, queues: Sequence[GateView] = ()) -> bytes:
        """Everything in Prometheus's text format. 4 ms for 64 replicas, so better not on the event loop."""
        return generate_latest(_Scrape(self._registry, replicas, in_flight, queues))

    def _model(self, name: str) -> _ModelMetrics:
        found = self._models.get(name)
        if found is not None:
            return found
        if len(self._models) >= _MAX_MODELS:
            name = "other"
        return self._models.setdefault(name, _ModelMetrics(self, name))


class _ModelMetrics:
    """The children of one model, looked up once."""

    def __init__(self, telemetry: Telemetry, model: str) -> None:
        self.ttft = telemetry._ttft.labels(model)
        self.duration = telemetry._duration.labels(model)
        self.retries = telemetry._retries.labels(model)
        self.prompt_tokens = telemetry._prompt_tokens.labels(model)
        self.completion_tokens = telemetry._completion_tokens.labels(model)
        self.predicted = telemetry._predicted.labels(model)
        self.reported = telemetry._reported.labels(model)
        self.agreed = telemetry._agreed.labels(model)
        self.requests = cache(partial(telemetry._requests.labels, model))
        self.decisions = cache(partial(telemetry._decisions.labels, model))
        self.queue_wait = telemetry._queue_wait.labels(model)
        self.queue_refusals = cache(partial(telemetry._queue_refusals.labels, model))
        self.upstream_errors = cache(partial(telemetry._upstream_errors.labels, model))


class GapHistogram(Collector):
    """Inter-token times by model. The client library's histogram costs 2 us an observation, which is too much per chunk.

    Filled by one thread. A scrape in another one may see a count without its time; the next one sees both.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Gaps] = {}

    def observe(self, model: str, seconds: float) -> None:
        gaps = self._models.get(model)
        if gaps is None:
            gaps = self._add(model)
        gaps.counts[bisect_left(_GAP_BOUNDS, seconds)] += 1
        gaps.sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "warmpath_inter_token_seconds", "Between two chunks of a stream.", labels=["model"]
        )
        for model, gaps in list(self._models.items()):
            cumulative = accumulate(list(gaps.counts))
            bounds = [*map(str, _GAP_BOUNDS), "+Inf"]
            family.add_metric([model], list(zip(bounds, cumulative, strict=True)), gaps.sum_s)
        yield family

    def _add(self, model: str) -> _Gaps:
        return self._models.setdefault(model if len(self._models) < _MAX_MODELS else "other", _Gaps())


class _Gaps:
    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_GAP_BOUNDS) + 1)
        self.sum_s = 0.0


class _Scrape:
    """What one scrape shows: all that was counted, and how the replicas are now."""

    def __init__(
        self,
        registry: CollectorRegistry,
        replicas: Sequence[ReplicaView],
        in_flight: int,
        queues: Sequence[GateView],
    ) -> None:
        self._registry = registry
        self._replicas = replicas
        self._in_flight = in_flight
        self._queues = queues

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        yield GaugeMetricFamily("warmpath_requests_in_flight", "Requests being answered.", value=self._in_flight)
        yield from _replica_gauges(self._replicas)
        yield from _queue_gauges(self._queues)


def _replica_gauges(replicas: Sequence[ReplicaView]) -> Iterator[Metric]:
    for name, (about, value) in _REPLICA_GAUGES.items():
        family = GaugeMetricFamily(f"warmpath_replica_{name}", about, labels=["replica", "model"])
        for replica in replicas:
            if (measured := value(replica)) is not None:
                family.add_metric([replica.id, replica.spec.model], measured)
        yield family
    trusts = GaugeMetricFamily(
        "warmpath_replica_trust",
        "1 for how far the router may believe its picture of the replica's cache.",
        labels=["replica", "model", "trust"],
    )
    for replica in replicas:
        for trust in Trust:
            trusts.add_metric([replica.id, replica.spec.model, trust.value], replica.trust is trust)
    yield trusts


def _queue_gauges(queues: Sequence[GateView]) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "warmpath_queue_depth", "Requests that wait for a replica to be free.", labels=["model", "priority"]
    )
    for queue in queues:
        for priority, number in queue.depth.items():
            depth.add_metric([queue.model, priority.name.lower()], number)
    yield depth
    for name, (about, value) in _QUEUE_GAUGES.items():
        family = GaugeMetricFamily(f"warmpath_{name}", about, labels=["model"])
        for queue in queues:
            family.add_metric([queue.model], value(queue))
        yield family


_QUEUE_GAUGES: Final[dict[str, tuple[str, Callable[[GateView], float]]]] = {
    "queue_work_tokens": ("Prompt tokens that wait, and 128 for each request.", lambda queue: queue.work),
    "service_tokens_per_second": (
        "Uncached prompt tokens a second that were sent to replicas in the last 20 s.",
        lambda queue: queue.tok_s,
    ),
    "wanted_replicas": (
        "Replicas, 70% busy with prompts, that serve what comes and what waits within a deadline: to scale by.",
        lambda queue: queue.wanted_replicas,
    ),
}


def _reported(value: Callable[[Load], float]) -> Callable[[ReplicaView], float | None]:
    return lambda replica: value(replica.load) if replica.load is not None else None


_REPLICA_GAUGES: Final[dict[str, tuple[str, Callable[[ReplicaView], float | None]]]] = {
    "healthy": ("1 when it answers its health check.", lambda replica: replica.healthy),
    "cordoned": ("1 when an operator keeps requests from it.", lambda replica: replica.cordoned),
    "draining": ("1 when it gets nothing new because it is to end.", lambda replica: replica.draining),
    "ejected": ("1 when it failed too often in a row.", lambda replica: replica.breaker is not BreakerState.CLOSED),
    "mismatched": ("1 when it is not what its pool needs.", lambda replica: bool(replica.mismatch)),
    "inflight_requests": ("Requests this gateway has there.", lambda replica: replica.inflight),
    "promised_tokens": ("Prompt tokens sent there without a first byte yet.", lambda replica: replica.promised_tokens),
    "running_requests": ("Requests it runs, from whomever.", _reported(lambda load: load.running)),
    "waiting_requests": ("Requests it has not begun.", _reported(lambda load: load.waiting)),
    "waiting_uncached_tokens": (
        "Prompt tokens it has to compute.",
        _reported(lambda load: load.waiting_uncached_tokens),
    ),
    "kv_used_blocks": ("KV blocks held by running requests.", _reported(lambda load: load.kv_used_blocks)),
    "kv_capacity_blocks": (
        "KV blocks there are.",
        lambda replica: replica.hello.capacity_blocks if replica.hello is not None else None,
    ),
    "indexed_blocks": ("Blocks that it says it holds.", lambda replica: replica.confirmed_blocks),
    "expected_blocks": ("Blocks that it should hold by what was sent there.", lambda replica: replica.expected_blocks),
    "capacity_tokens": (
        "Tokens its cache is taken to hold: as it says, else as learned, else the setting.",
        lambda replica: replica.capacity_tokens,
    ),
    "prefill_tokens_per_second": ("Prefill rate, as it says or as learned.", lambda replica: replica.prefill_tok_s),
    "fixed_seconds": ("Learned cost of a prompt that is cached.", lambda replica: replica.fixed_s),
    "bytes_per_token": ("Learned size of a token where tokens are unknown.", lambda replica: replica.bytes_per_token),
    "cached_tokens_precision": (
        "Share of the predicted cached tokens that it reported.",
        lambda replica: replica.accuracy.precision,
    ),
    "cached_tokens_recall": (
        "Share of the reported cached tokens that were predicted.",
        lambda replica: replica.accuracy.recall,
    ),
}
