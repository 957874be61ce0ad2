"""Requests per minute, per key: the exact sliding window.

What must hold: in no 60 s window, wherever it begins, are more than `rate` requests of a key admitted. A token bucket or a
GCRA that allows a full minute's burst admits up to twice the rate in some windows, and a fixed window does at its border.
The price is a log of admission times: 32 bytes for each request of the last minute, at most `rate` of them, and O(1)
amortised a call. A key may use its whole minute at once; a refused request costs nothing.

Knows no clock (`now` is monotonic seconds) and nothing of tokens, tenants or other processes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["Admitted", "Refused", "RequestLimiter", "limit_headers"]

_WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Admitted:
    limit: int
    remaining: int
    reset_s: float
    """Until the whole limit is free again."""


@dataclass(frozen=True, slots=True)
class Refused:
    limit: int
    retry_after_s: float
    """Until one more request would be admitted."""
    reset_s: float


def limit_headers(verdict: Admitted | Refused) -> list[tuple[bytes, bytes]]:
    """How a client that paces itself learns where it stands, as OpenAI says it."""
    remaining = verdict.remaining if isinstance(verdict, Admitted) else 0
    return [
        (b"x-ratelimit-limit-requests", b"%d" % verdict.limit),
        (b"x-ratelimit-remaining-requests", b"%d" % remaining),
        (b"x-ratelimit-reset-requests", _duration(verdict.reset_s)),
    ]


def _duration(seconds: float) -> bytes:
    """``12ms``, ``1s``, ``1m3s``; never shorter than it is."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    minutes, rest = divmod(math.ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest


class RequestLimiter:
    def __init__(self, default_rate: int | None = None) -> None:
        """`default_rate`: requests a minute of keys that have no limit of their own; None lets those pass."""
        self._default_rate = default_rate
        self._admitted: dict[str, deque[float]] = {}
        self._next_sweep = 0.0

    def try_acquire(self, key_id: str, rate: int | None, now: float) -> Admitted | Refused | None:
        """Count one request against `rate` a minute, or against the default. None: this key has no limit."""
        limit = rate if rate is not None else self._default_rate
        if limit is None:
            return None
        self._sweep(now)
        log = self._admitted.setdefault(key_id, deque())
        _forget_old(log, now)
        if len(log) >= limit:
            # More than `limit` are logged after the limit was lowered: all but limit - 1 must leave the window.
            return Refused(
                limit, retry_after_s=log[len(log) - limit] + _WINDOW_S - now, reset_s=log[-1] + _WINDOW_S - now
            )
        log.append(now)
        return Admitted(limit, remaining=limit - len(log), reset_s=_WINDOW_S)

    def __len__(self) -> int:
        """Keys that are remembered: those used within the last two windows."""
        return len(self._admitted)

    def _sweep(self, now: float) -> None:
        """Once a window, drop the keys that were idle for a whole one."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + _WINDOW_S
        for log in self._admitted.values():
            _forget_old(log, now)
        self._admitted = {key_id: log for key_id, log in self._admitted.items() if log}


def _forget_old(log: deque[float], now: float) -> None:
    while log and log[0] + _WINDOW_S <= now:
        log.popleft()
