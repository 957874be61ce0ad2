"""What metrics show of replicas, as the router sees them at the moment of a scrape. Pure.

The text is written here, since a thousand replicas with 30 numbers each take the client library 70 ms, and this 15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from router import BreakerState, ReplicaView, Trust
from router.wire import Load

__all__ = ["replica_lines"]


def replica_lines(replicas: Sequence[ReplicaView], now: float) -> Iterator[str]:
    """In Prometheus's text format. `now`: monotonic seconds."""
    labelled = [
        (replica, f'model="{_escaped(replica.spec.model)}",replica="{_escaped(replica.id)}"') for replica in replicas
    ]
    for name, (kind, about, value) in _REPLICA_NUMBERS.items():
        full_name = f"warmpath_replica_{name}"
        yield f"# HELP {full_name} {about}\n# TYPE {full_name} {kind}\n"
        for replica, labels in labelled:
            if (measured := value(replica)) is not None:
                yield f"{full_name}{{{labels}}} {float(measured)}\n"
    yield "# HELP warmpath_replica_event_age_seconds Since it last told its load; it does so each second.\n"
    yield "# TYPE warmpath_replica_event_age_seconds gauge\n"
    for replica, labels in labelled:
        if replica.load is not None:
            yield f"warmpath_replica_event_age_seconds{{{labels}}} {max(0.0, now - replica.load_at)}\n"
    yield from _states("trust", "1 for how far the router may believe its picture of the replica's cache.", labelled)
    yield from _states("breaker", "1 for the state of its breaker, which ejects one that fails too often.", labelled)


def _states(
    name: Literal["trust", "breaker"], about: str, labelled: Sequence[tuple[ReplicaView, str]]
) -> Iterator[str]:
    full_name = f"warmpath_replica_{name}"
    label, states = ("trust", Trust) if name == "trust" else ("state", BreakerState)
    yield f"# HELP {full_name} {about}\n# TYPE {full_name} gauge\n"
    for replica, labels in labelled:
        current = replica.trust if name == "trust" else replica.breaker
        for state in states:
            yield f'{full_name}{{{labels},{label}="{state.value}"}} {float(state is current)}\n'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _reported(value: Callable[[Load], float]) -> Callable[[ReplicaView], float | None]:
    return lambda replica: value(replica.load) if replica.load is not None else None


_Number = tuple[Literal["gauge", "counter"], str, Callable[[ReplicaView], float | None]]

_REPLICA_NUMBERS: Final[dict[str, _Number]] = {
    "healthy": ("gauge", "1 when it answers its health check.", lambda replica: replica.healthy),
    "cordoned": ("gauge", "1 when an operator keeps requests from it.", lambda replica: replica.cordoned),
    "draining": ("gauge", "1 when it gets nothing new because it is to end.", lambda replica: replica.draining),
    "ejected": (
        "gauge",
        "1 when it failed too often in a row.",
        lambda replica: replica.breaker is not BreakerState.CLOSED,
    ),
    "mismatched": ("gauge", "1 when it is not what its pool needs.", lambda replica: bool(replica.mismatch)),
    "inflight_requests": ("gauge", "Requests this gateway has there.", lambda replica: replica.inflight),
    "promised_tokens": (
        "gauge",
        "Prompt tokens sent there without a first byte yet.",
        lambda replica: replica.promised_tokens,
    ),
    "running_requests": ("gauge", "Requests it runs, from whomever.", _reported(lambda load: load.running)),
    "waiting_requests": ("gauge", "Requests it has not begun.", _reported(lambda load: load.waiting)),
    "waiting_uncached_tokens": (
        "gauge",
        "Prompt tokens it has to compute.",
        _reported(lambda load: load.waiting_uncached_tokens),
    ),
    "kv_used_blocks": ("gauge", "KV blocks held by running requests.", _reported(lambda load: load.kv_used_blocks)),
    "kv_capacity_blocks": (
        "gauge",
        "KV blocks there are.",
        lambda replica: replica.hello.capacity_blocks if replica.hello is not None else None,
    ),
    "indexed_blocks": ("gauge", "Blocks that it says it holds.", lambda replica: replica.confirmed_blocks),
    "expected_blocks": (
        "gauge",
        "Blocks that it should hold by what was sent there.",
        lambda replica: replica.expected_blocks,
    ),
    "capacity_tokens": (
        "gauge",
        "Tokens its cache is taken to hold: as it says, else as learned, else the setting.",
        lambda replica: replica.capacity_tokens,
    ),
    "prefill_tokens_per_second": (
        "gauge",
        "Prefill rate, as it says or as learned.",
        lambda replica: replica.prefill_tok_s,
    ),
    "fixed_seconds": ("gauge", "Learned cost of a prompt that is cached.", lambda replica: replica.fixed_s),
    "bytes_per_token": (
        "gauge",
        "Learned size of a token where tokens are unknown.",
        lambda replica: replica.bytes_per_token,
    ),
    "cached_tokens_precision": (
        "gauge",
        "Share of the predicted cached tokens that it reported.",
        lambda replica: replica.accuracy.precision,
    ),
    "cached_tokens_recall": (
        "gauge",
        "Share of the reported cached tokens that were predicted.",
        lambda replica: replica.accuracy.recall,
    ),
    "breaker_transitions_total": (
        "counter",
        "Changes of its breaker's state.",
        lambda replica: replica.breaker_transitions,
    ),
    "event_gaps_total": ("counter", "Frames that came while others were missing.", lambda replica: replica.event_gaps),
    "event_snapshots_total": (
        "counter",
        "Whole pictures of its cache that were taken.",
        lambda replica: replica.event_snapshots,
    ),
    "event_restarts_total": ("counter", "Its former lives.", lambda replica: replica.event_restarts),
}
