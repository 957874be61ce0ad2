"""Which replicas a data process routes to: the supervisor's list, taken over as a whole and applied as a difference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from gateway.admin.registry import Registry
from gateway.watch import Watcher
from router import PoolMismatch, Router
from router.wire import ReplicaSpec

__all__ = ["Member", "Membership", "members_of"]

_log = logging.getLogger("warmpath.processes")


class Member(msgspec.Struct, frozen=True):
    """One replica, as the supervisor has it."""

    id: str
    spec: ReplicaSpec
    """With its credential."""
    weight: float
    cordoned: bool
    draining: bool
    watched: bool
    """False: its lease is over, and what it holds is remembered for a while."""


def members_of(registry: Registry, router: Router) -> list[Member]:
    return [
        Member(
            view.id,
            router.spec(view.id),
            view.weight,
            view.cordoned,
            view.draining,
            registry.is_live(view.id),
        )
        for view in router.replicas()
        if view.id in registry
    ]


class Membership:
    """Keeps a router and a watcher as the last list says."""

    def __init__(self, router: Router, watcher: Watcher, clock: Callable[[], float]) -> None:
        self._router = router
        self._watcher = watcher
        self._clock = clock
        self._members: dict[str, Member] = {}

    def take_over(self, members: Sequence[Member]) -> None:
        wanted = {member.id: member for member in members}
        gone = [
            replica_id
            for replica_id, member in self._members.items()
            if replica_id not in wanted or _is_for_another_pool(member.spec, wanted[replica_id].spec)
        ]
        for replica_id in gone:  # first all of them: their model may go to another kind of replica
            self._watcher.stop(replica_id)
            self._router.remove(replica_id)
            del self._members[replica_id]
        for member in wanted.values():
            self._take(member)

    def _take(self, member: Member) -> None:
        before = self._members.get(member.id)
        is_new = before is None or before.spec != member.spec
        if is_new:
            try:
                self._router.add(member.id, member.spec, self._clock())
            except PoolMismatch as error:
                _log.error("replica %s is left out: %s", member.id, error)
                return
        self._members[member.id] = member
        self._router.patch(member.id, weight=member.weight, cordoned=member.cordoned, draining=member.draining)
        if not member.watched:
            self._watcher.stop(member.id)
            self._router.set_health(member.id, False, self._clock())
        elif is_new or before is None or not before.watched:
            self._watcher.start(member.id, member.spec)


def _is_for_another_pool(before: ReplicaSpec, now: ReplicaSpec) -> bool:
    """One without a model has no pool yet."""
    return bool(before.model) and (before.model, before.kind, before.revision) != (now.model, now.kind, now.revision)
