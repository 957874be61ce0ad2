"""Which limits a request is under, and what it may cost. Pure.

A request counts against its key, its tenant and its model, as far as each has a limit. A key without a limit of its own has
the default one, field by field; tenants and models have what settings give them by name, so that counters are as many as keys
and settings, not as what clients write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.limits.ledger import Limit, Measure
from gateway.limits.quota import Quota

__all__ = ["Amounts", "Caller", "Price", "Rules"]

_MOST_AMOUNT: Final = 1 << 50
"""Of tokens or money of one request: any more is as much as all, and sums stay exact in a Redis script's floats."""
_MOST_CALLERS: Final = 1 << 16

Amounts = tuple[int, int, int, int, int]
"""By `Measure`."""


@dataclass(frozen=True, slots=True)
class Price:
    """USD for a million tokens, which is the same as millionths of a dollar for one."""

    input: float = 0.0
    cached_input: float | None = None
    """None: as any other input."""
    output: float = 0.0

    def micro_usd(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        cached_price = self.input if self.cached_input is None else self.cached_input
        cached_tokens = min(cached_tokens, prompt_tokens)
        cost = (prompt_tokens - cached_tokens) * self.input + cached_tokens * cached_price + output_tokens * self.output
        return math.ceil(round(cost, 3))  # no millionth for the last bit of a float

    def worst_micro_usd(self, prompt_tokens: int, output_tokens: int) -> int:
        """As long as nobody knows what is cached."""
        cached = prompt_tokens if self.cached_input is not None and self.cached_input > self.input else 0
        return self.micro_usd(prompt_tokens, cached, output_tokens)


_UNLIMITED: Final = Quota()


@dataclass(frozen=True, slots=True)
class Caller:
    """A key and its tenant: the limits that are known before the body is."""

    quota: Quota | None
    tenant: str
    limits: tuple[Limit, ...]
    early: tuple[Limit, ...]
    """Those that every request takes one of."""
    by_model: dict[str, tuple[Limit, ...]] = field(default_factory=dict)
    """All limits of a request for a model that has some of its own."""


class Rules:
    def __init__(
        self,
        default: Quota = _UNLIMITED,
        tenants: Mapping[str, Quota] | None = None,
        models: Mapping[str, Quota] | None = None,
        prices: Mapping[str, Price] | None = None,
        *,
        reserved_output_tokens: int = 512,
        share: int = 1,
    ) -> None:
        """`reserved_output_tokens`: what an answer is taken to need when the request names no bound. `share`: among how many
        gateways, which do not ask each other, every limit is divided; each may let one request through at least.
        """
        self._default = default
        self._tenants = dict(tenants or {})
        self._models = {
            model: limits
            for model, quota in (models or {}).items()
            if (limits := _limits("model", model, quota, share))
        }
        self._share = share
        self._prices = dict(prices or {})
        self._reserved_output_tokens = reserved_output_tokens
        self._callers: dict[str, Caller] = {}

    def caller(self, key_id: str | None, quota: Quota | None, tenant: str) -> Caller:
        """`key_id`: None where the gateway is open, and only tenant and model are limited."""
        known = self._callers.get(key_id or "")
        if known is not None and known.quota is quota and known.tenant == tenant:
            return known
        limits = (
            () if key_id is None else _limits("key", key_id, (quota or _UNLIMITED).over(self._default), self._share)
        )
        limits += _limits("tenant", tenant, self._tenants.get(tenant, _UNLIMITED), self._share)
        early = tuple(limit for limit in limits if limit.measure in (Measure.REQUESTS, Measure.PARALLEL))
        if len(self._callers) >= _MOST_CALLERS:
            self._callers.clear()
        made = self._callers[key_id or ""] = Caller(quota, tenant, limits, early)
        return made

    def limits(self, caller: Caller, model: str) -> tuple[Limit, ...]:
        """All that a request for `model` must be within."""
        of_model = self._models.get(model)
        if of_model is None:
            return caller.limits
        limits = caller.by_model.get(model)
        if limits is None:
            limits = caller.by_model[model] = caller.limits + of_model
        return limits

    def amounts(self, model: str, prompt_tokens: int, max_tokens: int | None, choices: int = 1) -> Amounts:
        """What a request takes before it is sent. `max_tokens`: the most each choice may have; None: it names no bound."""
        output_tokens = choices * (self._reserved_output_tokens if max_tokens is None else max_tokens)
        tokens = min(prompt_tokens + output_tokens, _MOST_AMOUNT)
        price = self._prices.get(model)
        cost = 0 if price is None else min(price.worst_micro_usd(prompt_tokens, output_tokens), _MOST_AMOUNT)
        return 1, tokens, 1, tokens, cost

    def used(self, model: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Amounts:
        """What a request turned out to take."""
        tokens = prompt_tokens + output_tokens
        price = self._prices.get(model)
        cost = 0 if price is None else price.micro_usd(prompt_tokens, cached_tokens, output_tokens)
        return 1, tokens, 0, tokens, cost


def _limits(kind: str, name: str, quota: Quota, share: int) -> tuple[Limit, ...]:
    most = (
        quota.requests_per_minute,
        quota.tokens_per_minute,
        quota.parallel_requests,
        quota.tokens_per_day,
        quota.micro_usd_per_day,
    )
    return tuple(
        Limit(f"{kind}:{name}:{measure.name.lower()}", measure, max(1, limit // share))
        for measure, limit in zip(Measure, most, strict=True)
        if limit is not None
    )
