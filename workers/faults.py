"""What goes wrong with a simulated replica on request: which fault, at which request, where. Pure.

A fault is written ``[REPLICA/]KIND[=VALUE][:WHEN][@PATH]``::

    hang                  every generation is accepted and never answered
    503=2:25%             a quarter of them, by seeded draws, gets 503 with Retry-After: 2
    1/die-after=5:3       of several replicas the second (they count from 0) ends the process in its third answer
    delay=0.5:*/4         every fourth comes half a second late
    hang@/kv_snapshot     another path, with any method
    drop-events:2-5       the event stream loses the second to the fifth batch of blocks

Numbers count what a fault applies to, from 1. What must hold: the same faults, seed and order of requests give the same
failures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import xxhash

__all__ = ["EVENTS_PATH", "GENERATION_PATHS", "KINDS", "Fault", "FaultKind", "FaultPlan", "When", "parse_fault"]

GENERATION_PATHS: Final = ("/v1/chat/completions", "/v1/completions")
EVENTS_PATH: Final = "/kv_events"

Target = Literal["request", "stream", "batch", "engine"]


@dataclass(frozen=True, slots=True)
class FaultKind:
    target: Target
    """What it counts and spoils: requests, event streams, batches in them, or all steps of the engine."""
    about: str
    value: tuple[float, float] | None = None
    """Least and greatest VALUE; None: it takes none."""
    optional: bool = False


_CHUNKS: Final = (0, 1e6)
_SECONDS: Final = (0, 600)

KINDS: Final = {
    "hang": FaultKind("request", "accept, never answer"),
    "hang-after": FaultKind("request", "fall silent after VALUE pieces of the answer", _CHUNKS),
    "die": FaultKind("request", "end the process, all its replicas with it"),
    "die-after": FaultKind("request", "the same after VALUE pieces of the answer", _CHUNKS),
    "cut-after": FaultKind("request", "close the connection after VALUE pieces", _CHUNKS),
    "end-after": FaultKind("request", "end the answer properly after VALUE pieces, without [DONE]", _CHUNKS),
    "delay": FaultKind("request", "answer VALUE seconds late", _SECONDS),
    "429": FaultKind("request", "refuse as busy; VALUE: Retry-After in seconds", _SECONDS, optional=True),
    "500": FaultKind("request", "fail"),
    "503": FaultKind("request", "fail; with VALUE as Retry-After, refuse as busy", _SECONDS, optional=True),
    "html": FaultKind("request", "200 with a web page"),
    "broken-json": FaultKind("request", "200 with half a JSON object"),
    "short": FaultKind("request", "200 with less than its content-length"),
    "endless-line": FaultKind("request", "a stream whose first line never ends"),
    "new-epoch": FaultKind("stream", "an event stream that says the replica has restarted"),
    "drop-events": FaultKind("batch", "leave out a batch of the event stream"),
    "repeat-events": FaultKind("batch", "send a batch twice"),
    "reorder-events": FaultKind("batch", "send a batch after the next one"),
    "slow-events": FaultKind("batch", "hold the event stream for VALUE seconds before a batch", _SECONDS),
    "cut-events": FaultKind("batch", "close the event stream in place of a batch"),
    "slow": FaultKind("engine", "every step takes VALUE times as long", (1, 1e6)),
}


@dataclass(frozen=True, slots=True)
class When:
    """Which of the things that it counts a fault hits."""

    first: int = 1
    last: int | None = None
    every: int = 1
    share: float | None = None
    """Of all of them, by draws; then the other fields are as they are by default."""

    def hits(self, number: int, draw: float) -> bool:
        """`number` counts from 1; `draw` lies in [0, 1)."""
        if self.share is not None:
            return draw < self.share
        return self.first <= number and (self.last is None or number <= self.last) and number % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: str
    value: float | None = None
    when: When = When()
    path: str | None = None
    """None: where its kind usually strikes."""
    replica: int | None = None
    """None: every replica."""

    @property
    def target(self) -> Target:
        return KINDS[self.kind].target

    def strikes(self, method: str, path: str) -> bool:
        if self.path is not None:
            return path == self.path
        if self.target != "request":
            return path == EVENTS_PATH
        return method == "POST" and path in GENERATION_PATHS


_FAULT: Final = re.compile(
    r"(?:(?P<replica>\d{1,4})/)?(?P<kind>[a-z0-9-]+)(?:=(?P<value>[^:@]*))?(?::(?P<when>[^@]*))?(?:@(?P<path>/.*))?"
)
_WHEN: Final = re.compile(
    r"(?P<share>\d{1,3}(?:\.\d{1,6})?)%|\*/(?P<every>[1-9]\d{0,8})|(?P<first>[1-9]\d{0,8})(?:-(?P<last>[1-9]\d{0,8}))?"
)


def parse_fault(text: str) -> Fault:
    """Raises ValueError with a line for people."""
    match = _FAULT.fullmatch(text)
    kind = KINDS.get(match["kind"]) if match else None
    if match is None or kind is None:
        raise ValueError(
            f"{text!r} is no fault; one is [REPLICA/]KIND[=VALUE][:WHEN][@PATH], KIND of {', '.join(KINDS)}"
        )
    if match["path"] and kind.target != "request":
        raise ValueError(f"{text!r}: {match['kind']} is not about one path")
    if match["when"] and kind.target == "engine":
        raise ValueError(f"{text!r}: {match['kind']} is about every step")
    return Fault(
        kind=match["kind"],
        value=_parse_value(text, match["kind"], kind, match["value"]),
        when=_parse_when(text, match["when"]) if match["when"] is not None else When(),
        path=match["path"],
        replica=int(match["replica"]) if match["replica"] else None,
    )


def _parse_value(text: str, name: str, kind: FaultKind, value: str | None) -> float | None:
    if kind.value is None:
        if value is not None:
            raise ValueError(f"{text!r}: {name} takes no value")
        return None
    if value is None and kind.optional:
        return None
    least, greatest = kind.value
    if value is None or not re.fullmatch(r"\d{1,7}(\.\d{1,6})?", value) or not least <= float(value) <= greatest:
        raise ValueError(
            f"{text!r}: {name} takes a number from {least:g} to {greatest:g}, as in {name}={max(least, 3):g}"
        )
    return float(value)


def _parse_when(text: str, when: str) -> When:
    match = _WHEN.fullmatch(when)
    if match is None:
        raise ValueError(f"{text!r}: WHEN is a share (25%), a number (3), a range (2-5) or every so many (*/4)")
    if match["share"]:
        return When(share=float(match["share"]) / 100)
    if match["every"]:
        return When(every=int(match["every"]))
    first = int(match["first"])
    return When(first=first, last=int(match["last"] or first))


class FaultPlan:
    """The faults of one replica, and how often each could have struck so far."""

    def __init__(self, faults: Sequence[Fault], *, seed: int) -> None:
        self.faults = tuple(faults)
        self.slowdown = max((fault.value or 1.0 for fault in faults if fault.target == "engine"), default=1.0)
        self.spoils_batches = any(fault.target == "batch" for fault in faults)
        self._seed = seed
        self._counts = [0] * len(faults)
        self.hits = [0] * len(faults)
        """How often each has struck."""

    def of_request(self, method: str, path: str) -> Fault | None:
        """What happens to a request. It counts for every fault that looks at it; the first one that hits has it."""
        return self._choose(("request", "stream"), method, path)

    def of_batch(self) -> Fault | None:
        return self._choose(("batch",), "GET", EVENTS_PATH)

    def _choose(self, targets: Sequence[Target], method: str, path: str) -> Fault | None:
        chosen = None
        for index, fault in enumerate(self.faults):
            if fault.target in targets and fault.strikes(method, path):
                self._counts[index] += 1
                if chosen is None and fault.when.hits(self._counts[index], self._draw(index)):
                    self.hits[index] += 1
                    chosen = fault
        return chosen

    def _draw(self, index: int) -> float:
        place = index.to_bytes(4, "little") + self._counts[index].to_bytes(8, "little")
        return xxhash.xxh3_64_intdigest(place, self._seed) / (1 << 64)
