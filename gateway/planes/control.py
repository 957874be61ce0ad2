"""The control plane: who may, which replicas there are, and by what settings."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp

from gateway.admin.addresses import resolve_host
from gateway.admin.context import AdminContext, Insight
from gateway.admin.live import Live
from gateway.admin.registry import Registry
from gateway.admin.replicas import replica_bodies
from gateway.admin.routes import admin_app
from gateway.hotpath import PUBLIC_GROUP
from gateway.keys import KeyStore, KeyStoreError
from gateway.keys.opening import given_keys
from gateway.planes.explainer import Explainer
from gateway.planes.knowledge import Knowledge
from gateway.reloader import Reloader, SettingsSource
from gateway.repeating import repeat
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from router.wire import ReplicaSpec

__all__ = ["ControlPlane", "build_control_plane"]

_log = logging.getLogger("warmpath.gateway")

_EXPIRE_EVERY_S: Final = 1.0
_DEFAULT_GROUP: Final = "default"
"""Of keys that were made without a tenant."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Who may, which replicas there are, and by what settings."""

    registry: Registry
    admin: ASGIApp
    reloader: Reloader
    live: Live

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Watches the settings and their replicas, and ends leases, while the block runs."""
        self.registry.set_static(_static(self.reloader.settings), time.monotonic())
        tasks = [
            asyncio.create_task(repeat(self._expire_leases, _EXPIRE_EVERY_S, _log, "ending leases")),
            asyncio.create_task(self.reloader.run()),
        ]
        try:
            yield
        finally:
            self.live.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _expire_leases(self) -> None:
        self.registry.expire(time.monotonic())


def build_control_plane(
    settings: Settings,
    knowledge: Knowledge,
    keys: KeyStore,
    insight: Insight,
    telemetry: Telemetry,
    source: SettingsSource | None,
    apply: Callable[[Settings], None],
) -> ControlPlane:
    """`insight`: of the data planes, in this process or in others. `telemetry`: of this process. `apply`: what new settings
    change beside the replicas.
    """
    router, watcher = knowledge.router, knowledge.watcher
    registry = Registry(
        router,
        lease_s=settings.leases.lease_s,
        forget_after_s=settings.leases.forget_after_s,
        start_watch=watcher.start,
        stop_watch=watcher.stop,
    )
    explainer = Explainer(
        router,
        lambda: reloader.settings.admission.max_wait_s,
        knowledge.aliases,
        knowledge.preparer,
        keys,
        PUBLIC_GROUP if settings.server.open else _DEFAULT_GROUP,
        random.random,
    )

    def apply_all(new: Settings) -> None:
        apply(new)
        registry.configure(lease_s=new.leases.lease_s, forget_after_s=new.leases.forget_after_s)
        registry.set_static(_static(new), time.monotonic())
        keys.give(given_keys(new))

    def faults_of(new: Settings) -> list[str]:
        faults = [f"replicas: {fault}" for fault in registry.faults_of(_static(new))]
        try:
            keys.given_records(given_keys(new))
        except KeyStoreError as error:
            faults.append(f"keys.static: {error}")
        return faults

    reloader = Reloader(
        settings,
        source or SettingsSource(load=lambda: settings),
        faults_of=faults_of,
        apply=apply_all,
    )
    telemetry.register(
        "counter",
        "warmpath_config_reloads",
        "Attempts to read the settings again.",
        ("result",),
        lambda: {(result,): count for result, count in reloader.results.items()},
    )
    telemetry.register(
        "counter",
        "warmpath_health_transitions",
        "Times that a replica turned up or down, by its probes or its event stream.",
        ("model", "to"),
        lambda: {(model, to): count for (model, to), count in list(watcher.transitions.items())},
    )
    live = Live(lambda: (replica_bodies(context), insight.rates()), time.time)
    context = AdminContext(
        current_settings=lambda: reloader.settings,
        reload=reloader.reload,
        cards=knowledge.cards,
        aliases=knowledge.aliases,
        live=live,
        keys=keys,
        router=router,
        registry=registry,
        insight=insight,
        resolve=resolve_host,
        explain=explainer.explain,
        clock=time.monotonic,
        wall_clock=time.time,
        version=importlib.metadata.version("warmpath"),
    )
    return ControlPlane(registry, admin_app(context), reloader, live)


def _static(settings: Settings) -> dict[str, ReplicaSpec]:
    return {replica.replica_id: replica.spec for replica in settings.replicas}
