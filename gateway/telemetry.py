"""Every metric of the gateway, named once.

Counters and histograms are filled as requests end; what the router knows of replicas is read when somebody scrapes, so that a
replica that left leaves no series behind. Labels are bounded: models by `_MAX_MODELS`, replicas by the registry, the rest by
the code that gives them.

Counting is plain numbers in objects that are found by one look-up: the client library's counters take 0.5 us each and its
histograms 2 us, of which a request would need a dozen.

    labels      values
    model       a model that the router knows; '' before that is known; 'other' past the bound
    status      HTTP status of the answer, 499 when the client left
    policy      how the router chose
    reason      why the router chose, or why a replica failed
    kind        how the ledger of limits failed: timeout, connection, readonly, ...
    replica     id
    trust, state, mode      of fixed sets
    limit       requests, tokens, parallel, tokens_day, usd_day
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.job import Record
from gateway.replica_metrics import replica_lines
from router import ReplicaView

__all__ = ["CONTENT_TYPE", "GapHistogram", "Telemetry", "render"]

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
_LAG_BOUNDS: Final = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LAG_EVERY_S: Final = 0.05

_Labels = TypeVar("_Labels", bound=tuple[str, ...])
Read = Callable[[], Mapping[tuple[str, ...], float]]


class Telemetry:
    """One per gateway. Filled on the event loop; `families` and `render` may run in a thread."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._endings: dict[tuple[str, int, str, str], _Ending] = {}
        self._refusals: Counter[str] = Counter()
        self._limiter_errors: Counter[str] = Counter()
        self._is_limited_locally = False
        self._client_retries = 0
        self._overloaded = 0
        self._gaps = GapHistogram()
        self.gap = self._gaps.observe
        """Count the time between two chunks of a stream, of (model, seconds). The one call per chunk: 0.15 us."""
        self._lag = _Histogram(_LAG_BOUNDS)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self._gaps)
        self._registry.register(_Counts(self))

    # --- what happened

    def finished(self, record: Record) -> None:
        """Count a request of the data path that ended, however it did. 1 us."""
        decision = record.decision
        policy, reason = (decision.policy, decision.reason) if decision is not None else ("", "")
        key = (record.model, record.status, policy, reason)
        ending = self._endings.get(key)
        if ending is None:
            ending = self._add_ending(key)
        ending.count += 1
        if record.limit:
            self._refusals[record.limit] += 1
        if record.client_retries:
            self._client_retries += 1
        if record.error_code == "gateway_overloaded":
            self._overloaded += 1
        if decision is None:
            return
        model = ending.model
        model.retries += record.tries - 1
        model.duration.observe(record.duration_s)
        if record.first_byte_s is not None:
            model.ttft.observe(record.first_byte_s)
        usage = record.usage
        if usage is None:
            return
        prompt_tokens = usage.prompt_tokens
        model.prompt_tokens += prompt_tokens
        model.completion_tokens += usage.completion_tokens
        if (reported := usage.cached_tokens) is not None:
            reported = min(reported, prompt_tokens)
            predicted = decision.matched_tokens
            model.predicted += predicted
            model.reported += reported
            model.agreed += min(predicted, reported)

    def upstream_failed(self, model: str, reason: str) -> None:
        """Count a try that came to nothing. `reason`: the code of the error it would have been."""
        self._model(model).upstream_errors[reason] += 1

    def queue_wait(self, model: str, seconds: float) -> None:
        """Count a wait that ended at a replica."""
        self._model(model).queue_wait.observe(seconds)

    def queue_refused(self, model: str, reason: str) -> None:
        """Count a request that was not let through."""
        self._model(model).queue_refusals[reason] += 1

    def limiter_mode(self, is_local: bool) -> None:
        self._is_limited_locally = is_local

    def limiter_failed(self, kind: str) -> None:
        self._limiter_errors[kind] += 1

    async def watch_loop(self) -> None:
        """Measure for ever how late the event loop is: what every request waits for at each of its steps."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(max(0.0, loop.time() - due))

    # --- what is

    def register(
        self, kind: Literal["counter", "gauge"], name: str, about: str, labels: Sequence[str], read: Read
    ) -> None:
        """Show what somebody else counts. `read` gives a value for each tuple of label values; it is called in any thread."""
        self._registry.register(_Elsewhere(kind, name, about, labels, read))

    def families(self, in_flight: int) -> list[Metric]:
        """All that was counted, and `in_flight` requests, as it is now."""
        gauge = GaugeMetricFamily("warmpath_requests_in_flight", "Requests being answered.", value=in_flight)
        return [*self._registry.collect(), gauge]

    def _add_ending(self, key: tuple[str, int, str, str]) -> _Ending:
        name, status, policy, reason = key
        model = self._model(name)
        return self._endings.setdefault((model.name, status, policy, reason), _Ending(model))

    def _model(self, name: str) -> _Model:
        found = self._models.get(name)
        if found is not None:
            return found
        if len(self._models) >= _MAX_MODELS:
            name = "other"
        return self._models.setdefault(name, _Model(name))


class _Ending:
    """Requests of one model that ended the same way, for the same reason."""

    __slots__ = ("count", "model")

    def __init__(self, model: _Model) -> None:
        self.model = model
        self.count = 0


class _Model:
    __slots__ = (
        "agreed",
        "completion_tokens",
        "duration",
        "name",
        "predicted",
        "prompt_tokens",
        "queue_refusals",
        "queue_wait",
        "reported",
        "retries",
        "ttft",
        "upstream_errors",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.ttft = _Histogram(_TTFT_BOUNDS)
        self.duration = _Histogram(_DURATION_BOUNDS)
        self.retries = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.predicted = 0
        self.reported = 0
        self.agreed = 0
        self.upstream_errors: Counter[str] = Counter()
        self.queue_wait = _Histogram(_TTFT_BOUNDS)
        self.queue_refusals: Counter[str] = Counter()


class _Histogram:
    """Filled by one thread. A scrape in another one may see a count without its sum; the next one sees both."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of values up to each bound, from the one before it on, and of those above the last."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [*map(str, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(list(self.counts)), strict=True)), self.sum)


class GapHistogram(Collector):
    """Inter-token times by model."""

    def __init__(self) -> None:
        self._models: dict[str, _Histogram] = {}

    def observe(self, model: str, seconds: float) -> None:
        gaps = self._models.get(model)
        if gaps is None:
            name = model if len(self._models) < _MAX_MODELS else "other"
            gaps = self._models.setdefault(name, _Histogram(_GAP_BOUNDS))
        gaps.counts[bisect_left(_GAP_BOUNDS, seconds)] += 1  # as `observe` does, without its call for each chunk
        gaps.sum += seconds

    def collect(self) -> Iterator[Metric]:
        yield _histograms("warmpath_inter_token_seconds", "Between two chunks of a stream.", list(self._models.items()))


class _Counts(Collector):
    """What `Telemetry` counted, as families."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        telemetry = self._telemetry
        models = list(telemetry._models.items())
        yield from self._endings()
        yield _histograms(
            "warmpath_time_to_first_token_seconds",
            "From the request's arrival to the first byte of its answer.",
            [(name, model.ttft) for name, model in models],
        )
        yield _histograms(
            "warmpath_request_duration_seconds",
            "From the request's arrival to the end of its answer, of those that reached a replica.",
            [(name, model.duration) for name, model in models],
        )
        yield _histograms(
            "warmpath_queue_wait_seconds",
            "Before a replica was free, of requests that had to wait and got one.",
            [(name, model.queue_wait) for name, model in models],
        )
        refused = {(name, reason): n for name, model in models for reason, n in list(model.queue_refusals.items())}
        yield _counters(
            "warmpath_queue_refusals",
            "Requests that no replica was free for: full, displaced by another tenant's, deadline, no_replica.",
            ["model", "reason"],
            refused,
        )
        for name, (about, read) in _MODEL_COUNTERS.items():
            yield _counters(name, about, ["model"], {(label,): read(model) for label, model in models})
        failed = {(name, reason): n for name, model in models for reason, n in list(model.upstream_errors.items())}
        yield _counters(
            "warmpath_upstream_errors", "Tries that a replica failed or refused.", ["model", "reason"], failed
        )
        refusals = {(limit,): n for limit, n in list(telemetry._refusals.items())}
        yield _counters(
            "warmpath_limit_refusals", "Requests over a limit of their key, tenant or model.", ["limit"], refusals
        )
        errors = {(kind,): n for kind, n in list(telemetry._limiter_errors.items())}
        yield _counters("warmpath_limiter_errors", "Calls of the ledger of limits that failed.", ["kind"], errors)
        modes = GaugeMetricFamily(
            "warmpath_limiter_mode",
            "1 for who decides on limits: the ledger, or this process by its share while the ledger is away.",
            labels=["mode"],
        )
        modes.add_metric(["ledger"], not telemetry._is_limited_locally)
        modes.add_metric(["local"], telemetry._is_limited_locally)
        yield modes
        yield _counters(
            "warmpath_client_retries",
            "Requests that a client's SDK says it tried before.",
            [],
            {(): telemetry._client_retries},
        )
        yield _counters(
            "warmpath_gateway_overloaded",
            "Requests refused because the gateway had no descriptor, port or memory for a connection to a replica.",
            [],
            {(): telemetry._overloaded},
        )
        lag = HistogramMetricFamily("warmpath_event_loop_lag_seconds", "How late the event loop is.")
        telemetry._lag.add_to(lag, ())
        yield lag

    def _endings(self) -> Iterator[Metric]:
        requests: Counter[tuple[str, ...]] = Counter()
        decisions: Counter[tuple[str, ...]] = Counter()
        for (model, status, policy, reason), ending in list(self._telemetry._endings.items()):
            requests[model, str(status)] += ending.count
            if policy:
                decisions[model, policy, reason] += ending.count
        yield _counters(
            "warmpath_requests", "Requests that ended, by status; 499 left early.", ["model", "status"], requests
        )
        yield _counters(
            "warmpath_decisions", "Routing decisions by their reason.", ["model", "policy", "reason"], decisions
        )


_MODEL_COUNTERS: Final[dict[str, tuple[str, Callable[[_Model], float]]]] = {
    "warmpath_prompt_tokens": ("Prompt tokens, as replicas report them.", lambda model: model.prompt_tokens),
    "warmpath_completion_tokens": ("Generated tokens, as replicas report them.", lambda model: model.completion_tokens),
    "warmpath_cached_tokens_predicted": (
        "Prompt tokens that the router expected in the chosen replica's cache, where the replica reports what was.",
        lambda model: model.predicted,
    ),
    "warmpath_cached_tokens_reported": (
        "Prompt tokens that replicas did find cached.",
        lambda model: model.reported,
    ),
    "warmpath_cached_tokens_agreed": (
        "The smaller of the two, request by request: over predicted it is precision, over reported recall.",
        lambda model: model.agreed,
    ),
    "warmpath_retries": ("Tries after the first, each at another replica.", lambda model: model.retries),
}


def _counters(name: str, about: str, labels: Sequence[str], values: Mapping[_Labels, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _histograms(name: str, about: str, models: Sequence[tuple[str, _Histogram]]) -> Metric:
    family = HistogramMetricFamily(name, about, labels=["model"])
    for model, histogram in models:
        histogram.add_to(family, [model])
    return family


class _Elsewhere(Collector):
    def __init__(self, kind: str, name: str, about: str, labels: Sequence[str], read: Read) -> None:
        self._kind = kind
        self._name = name
        self._about = about
        self._labels = labels
        self._read = read

    def collect(self) -> Iterator[Metric]:
        family = (
            CounterMetricFamily(self._name, self._about, labels=self._labels)
            if self._kind == "counter"
            else GaugeMetricFamily(self._name, self._about, labels=self._labels)
        )
        for label_values, value in self._read().items():
            family.add_metric(label_values, value)
        yield family


def render(families: Iterable[Metric], replicas: Sequence[ReplicaView], now: float) -> bytes:
    """Everything in Prometheus's text format. `now`: monotonic seconds. Not on the event loop: 30 ms for 1,024 replicas."""
    return generate_latest(_Once(families)) + "".join(replica_lines(replicas, now)).encode()


class _Once(CollectorRegistry):
    """Families that are there already, as what the client library renders."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
