"""What a process knows of replicas, and by what it learns it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gateway.aliases import Aliases
from gateway.model_cards import ModelCards
from gateway.prepare import Preparer, Prompters
from gateway.settings import Settings
from gateway.upstream.contract import Upstream
from gateway.upstream.http1 import Http1Upstream
from gateway.upstream.httpx_upstream import HttpxUpstream
from gateway.watch import Watcher
from router import Router

__all__ = ["Knowledge", "build_knowledge", "unready"]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a process knows of replicas, and by what."""

    router: Router
    watcher: Watcher
    upstream: Upstream
    prompters: Prompters
    cards: ModelCards
    preparer: Preparer
    aliases: Aliases
    executor: ThreadPoolExecutor

    def apply(self, settings: Settings) -> None:
        """Go by these from now on, and keep all that is known."""
        self.router.configure(settings.routing.router_settings)
        self.watcher.configure(settings.probes.rules)
        self.preparer.configure(settings.prompts.escapes)
        self.aliases.configure(settings.aliases)

    async def aclose(self) -> None:
        await self.watcher.aclose()
        await self.upstream.aclose()
        self.executor.shutdown(wait=False, cancel_futures=True)


def build_knowledge(settings: Settings, router: Router) -> Knowledge:
    upstream: Upstream = Http1Upstream() if settings.upstream.transport == "native" else HttpxUpstream()
    prompters, cards = Prompters(), ModelCards()
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
    return Knowledge(
        router=router,
        watcher=Watcher(router, upstream, prompters, cards, clock=time.monotonic, probes=settings.probes.rules),
        upstream=upstream,
        prompters=prompters,
        cards=cards,
        preparer=Preparer(prompters, executor, settings.prompts.escapes),
        aliases=Aliases(settings.aliases),
        executor=executor,
    )


def unready(router: Router) -> str | None:
    if any(replica.healthy for replica in router.replicas()):
        return None
    return "No replica is healthy."
