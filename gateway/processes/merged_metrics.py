"""Metrics of several processes as those of one gateway.

What is counted is added up, over processes that live and those that do not any more, so that a counter never goes back. What
belongs to a process (`process_…`) is shown for each that lives, by the label `process`. Other gauges are added up over those
that live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from prometheus_client.core import Metric

__all__ = ["Family", "MergedMetrics", "families_of"]

_OF_A_PROCESS: Final = "process_"
_CREATED: Final = "_created"
"""The time at which a counter began: the first of them is the sum's."""
_COUNTED: Final = ("counter", "histogram")


class _Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric of one process, as it goes over a channel."""

    name: str
    about: str
    kind: str
    samples: list[_Sample]


def families_of(metrics: Iterable[Metric]) -> list[Family]:
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [_Sample(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in metrics
    ]


class MergedMetrics:
    """What processes have told last, by their names."""

    def __init__(self) -> None:
        self._living: dict[str, Sequence[Family]] = {}
        self._gone: list[Family] = []

    def take(self, process: str, families: Sequence[Family]) -> None:
        self._living[process] = families

    def ended(self, process: str) -> None:
        """It counts no more, and what it has counted stays."""
        last = self._living.pop(process, [])
        counted = [family for family in last if family.kind in _COUNTED and not _is_of_a_process(family)]
        self._gone = _summed([self._gone, counted])

    def families(self) -> list[Metric]:
        """All of it, in any thread."""
        living, gone = dict(self._living), self._gone
        common = [[family for family in families if not _is_of_a_process(family)] for families in living.values()]
        return [_metric(family) for family in (*_summed([gone, *common]), *_by_process(living))]


def _by_process(living: Mapping[str, Sequence[Family]]) -> Iterator[Family]:
    found: dict[str, Family] = {}
    for process, families in living.items():
        for family in filter(_is_of_a_process, families):
            shown = found.setdefault(family.name, msgspec.structs.replace(family, samples=[]))
            shown.samples.extend(
                _Sample(sample.name, {**sample.labels, "process": process}, sample.value) for sample in family.samples
            )
    yield from found.values()


def _is_of_a_process(family: Family) -> bool:
    return family.name.startswith(_OF_A_PROCESS)


def _summed(parts: Iterable[Iterable[Family]]) -> list[Family]:
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for part in parts for family in part):
        families.setdefault(family.name, family)
        values = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            if key not in values:
                values[key] = sample.value
            elif sample.name.endswith(_CREATED):
                values[key] = min(values[key], sample.value)
            else:
                values[key] += sample.value
    return [msgspec.structs.replace(family, samples=_samples(sums[name])) for name, family in families.items()]


def _samples(values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]) -> list[_Sample]:
    return [_Sample(name, dict(labels), value) for (name, labels), value in values.items()]


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.about, family.kind)
    for sample in family.samples:
        metric.add_sample(sample.name, sample.labels, sample.value)
    return metric
