"""From settings to what decides on limits, and what runs beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable

from gateway.limits import LeasingLimiter, Ledger, LedgerLink, Limiter, LocalLimiter, Price, Rules
from gateway.settings import Settings

__all__ = ["build_limiter", "limit_rules", "limiter_running"]

_log = logging.getLogger("warmpath.limits")


def limit_rules(settings: Settings) -> Rules:
    """What settings say of quotas and prices."""
    return Rules(
        settings.limits.quota,
        tenants={name: tenant.quota.quota for name, tenant in settings.tenants.items()},
        models={name: model.quota.quota for name, model in settings.models.items()},
        prices={
            name: Price(model.input_usd, model.cached_input_usd, model.output_usd)
            for name, model in settings.models.items()
        },
        reserved_output_tokens=settings.limits.reserved_output_tokens,
        share=1 if settings.redis.url is not None else settings.limits.hosts,
    )


def build_limiter(
    settings: Settings,
    *,
    supervisor: LedgerLink | None = None,
    processes: int = 1,
    on_mode: Callable[[bool], None] = lambda is_local: None,
    on_error: Callable[[str], None] = lambda kind: None,
) -> Limiter:
    """The ledger is a Redis where settings name one, else the supervisor's, else this process's own.

    `processes`: of this gateway; `on_mode` and `on_error` as `LeasingLimiter` has them. Raises ValueError for a bad URL.
    """
    hosts = settings.limits.hosts
    own = Ledger(hold_s=math.inf)
    link = supervisor
    sharers = processes
    if settings.redis.url is not None:
        from gateway.limits.redis_ledger import RedisLedger  # the client library takes 0.2 s to import

        link = RedisLedger(settings.redis.url.get_secret_value(), deadline_s=settings.redis.deadline_s)
        sharers = hosts * processes
    elif hosts > 1:
        _log.warning(
            "limits: one of %d gateways without a Redis between them, so each limit is divided by %d", hosts, hosts
        )
    if link is None:
        return LocalLimiter(own, time.monotonic, time.time)

    def mode_changed(is_local: bool) -> None:
        if is_local:
            _log.warning("limits: the ledger is away; this process lets a share of 1 in %d through", sharers)
        else:
            _log.info("limits: the ledger is back")
        on_mode(is_local)

    return LeasingLimiter(
        link,
        LocalLimiter(own, time.monotonic, time.time, share=sharers, is_fallback=True),
        time.monotonic,
        name=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
        processes=sharers,
        on_mode=mode_changed,
        on_error=on_error,
    )


@contextlib.asynccontextmanager
async def limiter_running(limiter: Limiter) -> AsyncIterator[None]:
    """What a limiter does beside requests; at the end all that it leased goes back."""
    if not isinstance(limiter, LeasingLimiter):
        yield
        return
    await limiter.begin()
    running = asyncio.create_task(limiter.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await limiter.aclose()
