"""How a client learns where it stands, as OpenAI says it; and what it is told when it is over a limit. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from gateway.api_error import ApiError
from gateway.limits.counters import BUCKET_S, WINDOW_S
from gateway.limits.ledger import Limit, Measure, Refused

__all__ = ["LOCAL_HEADER", "limit_headers", "refusal_error", "refusal_headers"]

Header = tuple[bytes, bytes]

LOCAL_HEADER: Final[Header] = (b"x-warmpath-limits", b"local")
"""The ledger could not be asked, so this process decided by its share of the limits."""

_REQUESTS: Final = Measure.REQUESTS
_TOKENS: Final = Measure.TOKENS
_WINDOWS: Final = {
    Measure.REQUESTS: tuple(b"x-ratelimit-%s-requests" % name for name in (b"limit", b"remaining", b"reset")),
    Measure.TOKENS: tuple(b"x-ratelimit-%s-tokens" % name for name in (b"limit", b"remaining", b"reset")),
}
_RESET: Final = b"%dm%ds" % divmod(math.ceil(WINDOW_S + BUCKET_S), 60)
"""Of what was counted just now."""

_TOLD: Final = {
    Measure.REQUESTS: "may send {most} requests a minute",
    Measure.TOKENS: "may use {most} tokens a minute",
    Measure.PARALLEL: "may have {most} requests running at once",
    Measure.TOKENS_DAY: "may use {most} tokens a day (UTC)",
    Measure.USD_DAY: "may spend {usd:g} USD a day (UTC)",
}
_BUDGETS: Final = frozenset({Measure.TOKENS_DAY, Measure.USD_DAY})


def limit_headers(limits: Sequence[Limit], left: Sequence[int]) -> list[Header]:
    """Of the tightest limit of each kind; nothing where there is none. `left`: what each still leaves."""
    requests = tokens = None  # places of the tightest so far
    for place, limit in enumerate(limits):
        if limit.measure == _REQUESTS:
            if requests is None or left[place] < left[requests]:
                requests = place
        elif limit.measure == _TOKENS and (tokens is None or left[place] < left[tokens]):
            tokens = place
    headers: list[Header] = []
    for tightest, measure in ((requests, _REQUESTS), (tokens, _TOKENS)):
        if tightest is not None:
            limit_header, remaining_name, reset_header = _same_each_time(measure, limits[tightest].most)
            headers += (limit_header, (remaining_name, b"%d" % max(left[tightest], 0)), reset_header)
    return headers


@lru_cache(maxsize=4096)
def _same_each_time(measure: Measure, most: int) -> tuple[Header, bytes, Header]:
    """Headers of a limit, and between them the name of the one that changes."""
    limit_name, remaining_name, reset_name = _WINDOWS[measure]
    return (limit_name, b"%d" % most), remaining_name, (reset_name, _RESET)


def refusal_headers(refused: Refused) -> list[Header]:
    names = _WINDOWS.get(refused.limit.measure)
    if names is None:
        return []
    values = (b"%d" % refused.limit.most, b"%d" % refused.left, _duration(refused.reset_s))
    return list(zip(names, values, strict=True))


def refusal_error(refused: Refused) -> ApiError:
    limit = refused.limit
    what = limit.counter.partition(":")[0]
    told = _TOLD[limit.measure].format(most=limit.most, usd=limit.most / 1e6)
    message = f"This {what} {told}."
    if refused.wait_s is None:
        message += " This request alone would take more: lower its maximum of output tokens, or shorten its prompt."
    is_budget = limit.measure in _BUDGETS
    in_tokens = limit.measure == Measure.TOKENS
    return ApiError(
        429,
        "insufficient_quota" if is_budget else "rate_limit_exceeded",
        message,
        type_="insufficient_quota" if is_budget else "tokens" if in_tokens else "requests",
        retry_after_s=refused.wait_s,
        should_retry=False if is_budget or refused.wait_s is None else None,
    )


def _duration(seconds: float) -> bytes:
    """``12ms``, ``1s``, ``1m3s``; never shorter than it is."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    minutes, rest = divmod(math.ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
