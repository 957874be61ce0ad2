"""What the admin API works on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from gateway.admin.addresses import AllowList, Resolve
from gateway.admin.bodies import DecisionBody, NewKeyBody, RequestRates
from gateway.admin.idempotency import Idempotency
from gateway.admin.live import Live
from gateway.admin.registry import Registry
from gateway.aliases import Aliases
from gateway.keys import KeyStore
from gateway.model_cards import ModelCards
from gateway.reload_plan import Plan
from gateway.settings import Settings
from router import Decision, ReplicaView, Router

__all__ = ["AdminContext", "Insight"]


@dataclass(frozen=True, slots=True)
class Insight:
    """What there is to see of clients' requests, in this process or in all those behind it."""

    metrics: Callable[[Sequence[ReplicaView]], Awaitable[bytes]]
    """In Prometheus's text format, with these replicas."""
    decisions: Callable[[], Awaitable[Sequence[DecisionBody]]]
    """The requests that ended last, the oldest first."""
    unready: Callable[[], str | None]
    """Why the gateway should get no requests now; None when it should."""
    rates: Callable[[], RequestRates]
    """How many requests there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """What the admin API works on."""

    current_settings: Callable[[], Settings]
    """In force now."""
    reload: Callable[[], Awaitable[Plan]]
    """Read the settings again. Raises `SettingsError`; then nothing was changed."""
    keys: KeyStore
    router: Router
    registry: Registry
    insight: Insight
    cards: ModelCards
    aliases: Aliases
    live: Live
    resolve: Resolve
    explain: Callable[[bytes, str | None], Awaitable[tuple[Decision, bool]]]
    """Decide for the body of a request, in a sharing group or the default one, and send nothing; also whether it would have to
    wait before. Raises `ApiError`."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    wall_clock: Callable[[], float]
    """Unix seconds."""
    version: str
    created_keys: Idempotency[NewKeyBody] = field(default_factory=Idempotency)

    @property
    def settings(self) -> Settings:
        return self.current_settings()

    @property
    def unix_offset(self) -> float:
        """Add it to a monotonic time to get Unix time."""
        return self.wall_clock() - self.clock()

    @property
    def allow_list(self) -> AllowList:
        return self.settings.registry.allow_list
