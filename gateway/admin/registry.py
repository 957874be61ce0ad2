"""Which replicas there are: those in the settings for good, those that registered themselves for as long as they say so.

    PUT        heartbeat   heartbeat          lease ends            forget_after_s later
    ├──────────┼───────────┼──────────────────┼─────────────────────┤
    watched, routed to (when healthy)         not watched, not      removed with all
                                              routed to; what it    that it held
                                              holds is remembered

Operators may also add one by hand: it has no lease, and stays until somebody removes it or the gateway ends.

What must hold: every replica that the router knows is in here, and the other way round; a replica is watched exactly while
it has no lease or its lease runs. An id belongs to the credential that registered it; a live id changes its address only with a
new epoch, so that two processes which share an epoch cannot pull it to and fro.

Knows no HTTP and no clock: `now` is monotonic seconds, and addresses were checked before (`gateway.admin.addresses`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from router import PoolMismatch, Router
from router.wire import ReplicaSpec

__all__ = [
    "Drain",
    "InvalidReplica",
    "Lease",
    "NotHolder",
    "Registrant",
    "Registry",
    "RegistryError",
    "ReplicaConflict",
    "ReplicaMismatch",
    "UnknownReplica",
    "checked_model",
    "checked_replica_id",
    "replica_id_of",
]

_log = logging.getLogger("warmpath.registry")

_ID: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""What a DNS label may be: safe as a path segment, a header value, a metric label."""
_MODEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_:@+-]|[./](?![./])){0,199}")
"""Hub ids, paths and tags, without what could climb out of a folder."""
_EPOCH: Final = re.compile(r"[A-Za-z0-9._:-]{0,64}")
_CREDENTIAL: Final = re.compile(r"[\x21-\x7e]{0,512}")
"""It becomes a header."""
_KINDS: Final = ("warmpath", "openai")

_MAX_REPLICAS: Final = 1024
"""One index bit and one watching task each; whoever has more runs several gateways' worth of fleet."""
_MIN_LEASE_S: Final = 1.0
_SETTINGS: Final = ""
"""Who holds the replicas of the settings; no key has this id."""


class RegistryError(Exception):
    """Base of what registering may fail with; the message is for the caller."""


class InvalidReplica(RegistryError, ValueError):
    """An id, model or other value that no replica can have."""


class UnknownReplica(RegistryError):
    """No such replica, or its lease is over: it must register again."""


class ReplicaConflict(RegistryError):
    """The id is taken, or there is no room for another one."""


class ReplicaMismatch(RegistryError):
    """It is not like the replicas that serve its model already."""


class NotHolder(RegistryError):
    """The replica was registered with another credential."""


def checked_replica_id(value: str) -> str:
    if not _ID.fullmatch(value):
        raise InvalidReplica("A replica id has 1 to 63 characters of a-z, 0-9 and -, with no - at its ends.")
    return value


def replica_id_of(url: str) -> str:
    """The id of a replica that was given none."""
    return re.sub(r"[^a-z0-9]+", "-", url.partition("://")[2].lower()).strip("-")[:63].strip("-")


def checked_model(value: str) -> str:
    if not _MODEL.fullmatch(value):
        raise InvalidReplica(
            "A model's name has up to 200 characters of A-Z, a-z, 0-9 and ._:@+/-, and no '..' or '//'."
        )
    return value


def _check(replica_id: str, spec: ReplicaSpec) -> None:
    checked_replica_id(replica_id)
    checked_model(spec.model)
    if spec.revision:
        checked_model(spec.revision)
    if spec.kind not in _KINDS:
        raise InvalidReplica(f"A replica's kind is one of {', '.join(_KINDS)}.")
    if spec.priority and spec.kind == "warmpath":
        raise InvalidReplica("priority is for replicas of kind openai; own workers are told more than that.")
    if not _EPOCH.fullmatch(spec.epoch):
        raise InvalidReplica("An epoch has up to 64 characters of A-Z, a-z, 0-9 and ._:-")
    if not _CREDENTIAL.fullmatch(spec.credential):
        raise InvalidReplica("A credential has up to 512 printable characters without spaces.")
    if not (math.isfinite(spec.lease_s) and spec.lease_s > 0):
        raise InvalidReplica("lease_s is a positive number of seconds.")


@dataclass(frozen=True, slots=True)
class Registrant:
    """Who asks. Operators may end what others registered."""

    key_id: str
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    lease_s: float
    expires: float
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Drain:
    deadline: float
    """Monotonic seconds by which the operator wants it empty. Nothing is cut then; it only shows as overdue."""


@dataclass(slots=True)
class _Entry:
    spec: ReplicaSpec
    holder: str
    """Id of the key that registered it, or `_SETTINGS`."""
    lease: Lease | None
    """None: it stays until it is removed."""
    live: bool = True
    drain: Drain | None = None


class Registry:
    def __init__(
        self,
        router: Router,
        *,
        lease_s: float,
        forget_after_s: float,
        start_watch: Callable[[str, ReplicaSpec], None],
        stop_watch: Callable[[str], None],
    ) -> None:
        """`start_watch` is called again for a replica that changed; it ends the watch before."""
        self._router = router
        self._lease_s = lease_s
        self._forget_after_s = forget_after_s
        self._start_watch = start_watch
        self._stop_watch = stop_watch
        self._entries: dict[str, _Entry] = {}

    # --- who is there

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._entries

    def lease(self, replica_id: str) -> Lease | None:
        """None for a static replica."""
        return self._entry(replica_id).lease

    def is_live(self, replica_id: str) -> bool:
        """Static, or with a lease that was not seen to end."""
        return self._entry(replica_id).live

    def drain_of(self, replica_id: str) -> Drain | None:
        return self._entry(replica_id).drain

    # --- coming and going

    def configure(self, *, lease_s: float, forget_after_s: float) -> None:
        """From now on; a lease that runs keeps its length until the next heartbeat."""
        self._lease_s = lease_s
        self._forget_after_s = forget_after_s

    def add_static(self, replica_id: str, spec: ReplicaSpec, now: float) -> None:
        """A replica from the settings. Raises `ReplicaConflict` when the id is taken or there is no room, `ReplicaMismatch`."""
        self._require_new(replica_id)
        self._add(replica_id, _Entry(spec, holder=_SETTINGS, lease=None), now)

    def add_by_hand(self, replica_id: str, spec: ReplicaSpec, who: Registrant, now: float) -> None:
        """A replica by an operator's word, without lease; its model may be '' (the first one that it lists).

        Raises `InvalidReplica`, `ReplicaConflict`, `ReplicaMismatch`.
        """
        _check(replica_id, spec if spec.model else msgspec.structs.replace(spec, model="unknown"))
        self._require_new(replica_id)
        self._add(replica_id, _Entry(spec, who.key_id, lease=None), now)

    def faults_of(self, wanted: Mapping[str, ReplicaSpec]) -> list[str]:
        """Why these could not be the replicas of the settings; nothing when they can. Changes nothing."""
        ours = self._static()
        faults = [
            f"the replica id '{replica_id}' is taken by one that was registered"
            for replica_id in wanted
            if replica_id in self._entries and replica_id not in ours
        ]
        if len(self._entries) - len(ours) + len(wanted) > _MAX_REPLICAS:
            faults.append(f"there may be {_MAX_REPLICAS} replicas in all")
        going = frozenset(ours)
        firsts: dict[str, ReplicaSpec] = {}
        for replica_id, spec in wanted.items():
            first = firsts.setdefault(spec.model, spec)
            misfit = self._router.misfit(spec, without=going)
            if spec.model and (first.kind, first.revision) != (spec.kind, spec.revision):
                misfit = f"the replicas of '{spec.model}' are not all of one kind"
            if misfit:
                faults.append(f"the replica '{replica_id}' does not fit: {misfit}")
        return faults

    def set_static(self, wanted: Mapping[str, ReplicaSpec], now: float) -> None:
        """Make these the replicas of the settings: what is the same stays as it is, with all that is known of it.

        Ask `faults_of` before: what it would have told is raised here, half way.
        """
        ours = self._static()
        for replica_id, spec in ours.items():
            if wanted.get(replica_id) != spec:
                self._end(replica_id)
        for replica_id, spec in wanted.items():
            if replica_id not in self._entries:
                self.add_static(replica_id, spec, now)

    def put(self, replica_id: str, spec: ReplicaSpec, who: Registrant, now: float) -> Lease:
        """Register, or renew; `spec.url` is the address that was checked.

        Raises `InvalidReplica`, `ReplicaMismatch`, and `ReplicaConflict`: the id is somebody else's, comes from the settings,
        or is live at another address in this epoch. A restart has a new epoch, wherever it is; what was before it is over.
        """
        _check(replica_id, spec)
        lease = self._new_lease(spec.lease_s, now)
        spec = msgspec.structs.replace(spec, lease_s=lease.lease_s)
        known = self._entries.get(replica_id)
        if known is None:
            self._require_new(replica_id)
            self._add(replica_id, _Entry(spec, who.key_id, lease), now)
            return lease
        if known.lease is None:
            source = "comes from the settings" if known.holder == _SETTINGS else "was added by an operator"
            raise ReplicaConflict(f"The replica '{replica_id}' {source}.")
        if known.holder != who.key_id and not who.is_admin:
            raise ReplicaConflict(f"The replica id '{replica_id}' was registered with another credential.")
        if known.live and known.spec.url != spec.url and known.spec.epoch == spec.epoch:
            raise ReplicaConflict(f"The replica '{replica_id}' is live at another address in the same epoch.")
        if known.live and known.spec == spec:
            known.lease = lease
        else:
            self._renew(replica_id, known, _Entry(spec, known.holder, lease), now)
        return lease

    def beat(self, replica_id: str, epoch: str, who: Registrant, now: float) -> Lease:
        """Prolong a running lease. Raises `UnknownReplica`: register again."""
        known = self._held(replica_id, who)
        if known.lease is None or not known.live or known.lease.expires <= now or known.spec.epoch != epoch:
            raise UnknownReplica(f"The replica '{replica_id}' has no running lease for this epoch: register it again.")
        known.lease = self._new_lease(known.lease.lease_s, now)
        return known.lease

    def remove(self, replica_id: str, who: Registrant) -> None:
        """Forget a replica at once; what runs there runs on. Raises `UnknownReplica`, `NotHolder`."""
        self._held(replica_id, who)
        self._end(replica_id)

    def expire(self, now: float) -> None:
        """End the leases that ran out. Call about once a second."""
        for replica_id, entry in list(self._entries.items()):
            if entry.lease is None:
                continue
            if entry.live and entry.lease.expires <= now:
                _log.warning("replica %s sent no heartbeat for %.0f s", replica_id, entry.lease.lease_s)
                entry.live = False
                self._stop_watch(replica_id)
                self._router.set_health(replica_id, False, now)
            if entry.lease.expires + self._forget_after_s <= now:
                self._forget(replica_id)

    # --- draining

    def drain(self, replica_id: str, deadline_s: float, now: float) -> Drain:
        """Send it nothing new; what runs there runs on. Again: with a new deadline. Raises `UnknownReplica`."""
        entry = self._entry(replica_id)
        entry.drain = Drain(now + deadline_s)
        self._router.patch(replica_id, draining=True)
        return entry.drain

    def stop_drain(self, replica_id: str) -> None:
        """Take it back into service. Raises `UnknownReplica`."""
        self._entry(replica_id).drain = None
        self._router.patch(replica_id, draining=False)

    # --- inside

    def _new_lease(self, wanted_s: float, now: float) -> Lease:
        lease_s = min(max(wanted_s, _MIN_LEASE_S), self._lease_s)
        return Lease(lease_s, now + lease_s)

    def _add(self, replica_id: str, entry: _Entry, now: float) -> None:
        try:
            self._router.add(replica_id, entry.spec, now)
        except PoolMismatch as error:
            raise ReplicaMismatch(f"The replica does not fit: {error}.") from error
        self._entries[replica_id] = entry
        self._start_watch(replica_id, entry.spec)

    def _require_new(self, replica_id: str) -> None:
        if replica_id in self._entries:
            raise ReplicaConflict(f"The replica id '{replica_id}' is taken.")
        if len(self._entries) >= _MAX_REPLICAS:
            raise ReplicaConflict(f"There are {_MAX_REPLICAS} replicas already.")

    def _static(self) -> dict[str, ReplicaSpec]:
        return {replica_id: entry.spec for replica_id, entry in self._entries.items() if entry.holder == _SETTINGS}

    def _renew(self, replica_id: str, known: _Entry, entry: _Entry, now: float) -> None:
        self._add(replica_id, entry, now)
        # A drain is for the process that was to end: a new epoch has ended it.
        entry.drain = known.drain if known.spec.epoch == entry.spec.epoch else None
        self._router.patch(replica_id, draining=entry.drain is not None)

    def _end(self, replica_id: str) -> None:
        if self._entries[replica_id].live:
            self._stop_watch(replica_id)
        self._forget(replica_id)

    def _forget(self, replica_id: str) -> None:
        self._router.remove(replica_id)
        del self._entries[replica_id]

    def _entry(self, replica_id: str) -> _Entry:
        entry = self._entries.get(replica_id)
        if entry is None:
            raise UnknownReplica(f"There is no replica '{replica_id}'.")
        return entry

    def _held(self, replica_id: str, who: Registrant) -> _Entry:
        entry = self._entry(replica_id)
        if entry.holder != who.key_id and not who.is_admin:
            raise NotHolder(f"The replica '{replica_id}' was registered with another credential.")
        return entry
