"""When a request may be tried again, and when it must not. Pure.

A fleet that fails, or is silent, multiplies its own load if every request is sent twice: hence a budget over all requests.
And a request that ends the replicas it is sent to (a crash in the engine, a prompt that no memory holds) must not be carried
from one to the next: hence quarantine.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import xxhash

__all__ = ["Fingerprint", "Quarantine", "RetryBudget", "fingerprint"]

_ACTIVE_SHARE: Final = 0.2
_FLOOR: Final = 3
"""Envoy's defaults: a fifth of the active requests, three in any case."""


class RetryBudget:
    """How many second tries may run at once."""

    def __init__(self) -> None:
        self.active = 0
        """Requests being answered."""
        self.retrying = 0
        """Of them, those in their second try."""

    def try_begin(self) -> bool:
        """Take one; `end` is due. False: there is none left."""
        if self.retrying >= max(_FLOOR, _ACTIVE_SHARE * self.active):
            return False
        self.retrying += 1
        return True

    def end(self) -> None:
        self.retrying -= 1


Fingerprint = bytes


def fingerprint(tenant: str, body: bytes) -> Fingerprint:
    """Of a request that may be sent again by its client. 128 bits, so that no two meet by chance."""
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)


@dataclass(frozen=True, slots=True)
class _Suspicion:
    crashes: int
    replica_id: str
    """Lost last."""
    at: float
    """When."""


class Quarantine:
    """Requests that replicas did not survive: those whose connection broke in the middle of an answer, or before it began.

    A restart breaks many connections, and nobody can tell which of them was to blame. So one broken connection is no reason;
    two of the same request, on different replicas or at different times, are. Many who ask the same may lose one replica
    together: that is one death.
    """

    CRASHES: Final = 2
    KEPT_S: Final = 600.0
    MOST: Final = 4096

    def __init__(self) -> None:
        self._suspects: OrderedDict[Fingerprint, _Suspicion] = OrderedDict()  # oldest first

    def __bool__(self) -> bool:
        """Whether anything is suspected: only then is a fingerprint worth its time."""
        return bool(self._suspects)

    def holds(self, request: Fingerprint, now: float) -> bool:
        suspicion = self._suspects.get(request)
        if suspicion is None:
            return False
        if now >= suspicion.at + self.KEPT_S:
            del self._suspects[request]
            return False
        return suspicion.crashes >= self.CRASHES

    def crashed(self, request: Fingerprint, replica_id: str, begun_at: float, now: float) -> bool:
        """A replica was lost that it had been sent to at `begun_at`. Whether it is held from now on."""
        held_before = self.holds(request, now)
        last = self._suspects.pop(request, None)
        crashes = 0 if last is None else last.crashes
        if last is None or last.replica_id != replica_id or begun_at > last.at:
            crashes += 1
        self._suspects[request] = _Suspicion(crashes, replica_id, now)
        while len(self._suspects) > self.MOST or next(iter(self._suspects.values())).at + self.KEPT_S <= now:
            self._suspects.popitem(last=False)
        return held_before or crashes >= self.CRASHES
