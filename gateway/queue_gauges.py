"""What of the queues is shown as gauges: read at each scrape, so that a model that left leaves no series behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from gateway.admission import Admission
from router import GateView

__all__ = ["queue_gauges"]

Read = Callable[[], Mapping[tuple[str, ...], float]]

_BY_MODEL: Final[dict[str, tuple[str, Callable[[GateView], float]]]] = {
    "warmpath_queue_work_tokens": ("Prompt tokens that wait, and 128 for each request.", lambda queue: queue.work),
    "warmpath_service_tokens_per_second": (
        "Uncached prompt tokens a second that were sent to replicas in the last 20 s.",
        lambda queue: queue.tok_s,
    ),
    "warmpath_wanted_replicas": (
        "Replicas, 70% busy with prompts, that serve what comes and what waits within a deadline: to scale by.",
        lambda queue: queue.wanted_replicas,
    ),
}


def queue_gauges(admission: Admission) -> Iterator[tuple[str, str, tuple[str, ...], Read]]:
    """Name, help, labels and values of each. Safe to read in any thread."""
    yield (
        "warmpath_queue_depth",
        "Requests that wait for a replica to be free.",
        ("model", "priority"),
        lambda: {
            (view.model, priority.name.lower()): number
            for view in admission.views()
            for priority, number in view.depth.items()
        },
    )
    for name, (about, value) in _BY_MODEL.items():
        yield name, about, ("model",), _reader(admission, value)


def _reader(admission: Admission, value: Callable[[GateView], float]) -> Read:
    return lambda: {(view.model,): value(view) for view in admission.views()}
