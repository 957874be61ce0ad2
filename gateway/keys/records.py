"""What is known of a key, and the changes that may be made to the records of all keys. Pure: values in, values out.

What must hold after any change: no more than two live keys share kind, tenant and name, so that a key can always be rotated
and forgotten ones do not pile up; an id is never given twice; an admin key that is the last one cannot be revoked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from gateway.keys.texts import KeyKind
from gateway.limits import Quota

__all__ = [
    "ALL_SCOPES",
    "MAX_LIVE",
    "MAX_RECORDS",
    "KeyConflict",
    "KeyRecord",
    "KeyScope",
    "KeySource",
    "Label",
    "ModelPattern",
    "Records",
    "UnknownKey",
    "added",
    "checked_label",
    "checked_pattern",
    "joined",
    "live",
    "patched",
    "revoked",
    "rotated",
]

_LABEL: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}(?!\n)$"
"""`$` alone would let a last line feed pass."""
Label = Annotated[str, msgspec.Meta(pattern=_LABEL)]
"""A name that people choose: safe in logs, headers and file names."""

_MODEL: Final = r"^[\x21-\x7e]{1,256}(?!\n)$"
ModelPattern = Annotated[str, msgspec.Meta(pattern=_MODEL)]
"""A model's name, or a glob with * ? [ ] over names, upper and lower case apart."""

KeyScope = Literal["chat", "completions", "responses", "embeddings", "tokenize", "models"]
"""An endpoint, or a few of one purpose: tokenize is both directions, models is the list."""
ALL_SCOPES: Final[frozenset[KeyScope]] = frozenset(get_args(KeyScope))

KeySource = Literal["api", "settings"]

MAX_LIVE: Final = 2
"""Of one kind, tenant and name: the one in use, and its successor."""
MAX_RECORDS: Final = 10_000
"""Each change writes all of them, about 300 bytes each."""


def checked_label(value: str) -> str:
    """Raises ValueError for what is no `Label`."""
    if not re.match(_LABEL, value):
        raise ValueError("a name has 1 to 63 characters of A-Z, a-z, 0-9 and ._@-, and begins with a letter or a digit")
    return value


def checked_pattern(value: str) -> str:
    """Raises ValueError for what is no `ModelPattern`."""
    if not re.match(_MODEL, value):
        raise ValueError("a model's name or glob has 1 to 256 visible ASCII characters")
    return value


class KeyConflict(Exception):
    """A change that the state of the keys forbids. `code` is for programs, the text for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class UnknownKey(LookupError):
    """There is no key with this id."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, as it is stored."""

    id: str
    kind: KeyKind
    name: Label
    tenant: Label
    group: Label
    """Keys of one sharing group may hit each other's cached prefixes; by default a group is a tenant."""
    digest: str
    """Hex HMAC-SHA256 of the key's text."""
    created: float
    """Unix time, seconds, as `expires`."""
    expires: float | None = None
    scopes: tuple[KeyScope, ...] = ()
    """Endpoints it may use; empty is all."""
    models: tuple[ModelPattern, ...] = ()
    """Models it may use; empty is all."""
    limits: Quota = Quota()
    """What is None here is the gateway's default."""
    debug: bool = False
    """Whether answers say how they were routed."""
    revoked: bool = False
    source: KeySource = "api"
    """A key from the settings is changed there."""

    def is_live(self, now: float) -> bool:
        """`now`: Unix seconds."""
        return not self.revoked and (self.expires is None or self.expires > now)

    def may_use(self, scope: KeyScope) -> bool:
        return not self.scopes or scope in self.scopes

    def may_ask(self, model: str) -> bool:
        return not self.models or any(model == pattern or fnmatchcase(model, pattern) for pattern in self.models)


Records = Mapping[str, KeyRecord]
"""By id. Never changed in place."""


def live(records: Iterable[KeyRecord], kind: KeyKind, now: float) -> list[KeyRecord]:
    return [record for record in records if record.kind == kind and record.is_live(now)]


def added(records: Records, record: KeyRecord, now: float) -> Records:
    """Raises `KeyConflict`."""
    if record.id in records:
        raise KeyConflict("key_exists", f"There is a key with the id {record.id}.")
    named = _named_alike(records, record, now)
    if len(named) >= MAX_LIVE:
        ids = " and ".join(sorted(other.id for other in named))
        raise KeyConflict(
            "too_many_live_keys",
            f"Tenant {record.tenant} has {len(named)} live keys named {record.name}: {ids}. Revoke one first.",
        )
    return {**_bounded(records, now), record.id: record}


def patched(records: Records, key_id: str, changes: Mapping[str, Any], now: float) -> tuple[Records, KeyRecord]:
    """`changes`: fields of `KeyRecord` and their new values; of `limits`, those that change, None for no limit.

    Raises `UnknownKey`, `KeyConflict`, and msgspec.ValidationError for limits that are none.
    """
    before = _found(records, key_id)
    if before.revoked:
        raise KeyConflict("key_revoked", f"The key {key_id} is revoked, and stays so.")
    limits = msgspec.convert({**msgspec.structs.asdict(before.limits), **changes.get("limits", {})}, Quota)
    after = msgspec.structs.replace(before, **{**changes, "limits": limits})
    rest = {other_id: other for other_id, other in records.items() if other_id != key_id}
    if not after.is_live(now):
        return {**records, key_id: after}, after
    added(rest, after, now)
    return {**records, key_id: after}, after


def rotated(
    records: Records, key_id: str, successor: KeyRecord, overlap_s: float, now: float
) -> tuple[Records, KeyRecord]:
    """`successor` takes over everything but id, digest and age; the old key ends `overlap_s` seconds from now, or sooner if it
    would anyway. Returns the records and the new one. Raises `UnknownKey` and `KeyConflict`.
    """
    before = _found(records, key_id)
    if not before.is_live(now):
        raise KeyConflict("key_not_live", f"The key {key_id} is revoked or expired: make a new one.")
    ends = now + overlap_s
    old = msgspec.structs.replace(before, expires=ends if before.expires is None else min(ends, before.expires))
    new = msgspec.structs.replace(before, id=successor.id, digest=successor.digest, created=successor.created)
    return added({**records, key_id: old}, new, now), new


def revoked(records: Records, key_id: str, now: float, *, other_admins: int) -> tuple[Records, KeyRecord]:
    """The record stays, its id is used up. `other_admins`: live admin keys that stand elsewhere. Raises `UnknownKey` and
    `KeyConflict`."""
    before = _found(records, key_id)
    admins = live(records.values(), "admin", now)
    if before in admins and len(admins) + other_admins == 1:
        raise KeyConflict("last_admin_key", "This is the last valid admin key: make another one first.")
    after = msgspec.structs.replace(before, revoked=True)
    return {**records, key_id: after}, after


def joined(stored: Records, known: Records) -> Records:
    """Two histories of which neither has all of the other: every record of both, revoked where either says so."""
    gone = {key_id for key_id, record in known.items() if record.revoked}
    return {
        **known,
        **{
            key_id: msgspec.structs.replace(record, revoked=True) if key_id in gone else record
            for key_id, record in stored.items()
        },
    }


def _found(records: Records, key_id: str) -> KeyRecord:
    try:
        return records[key_id]
    except KeyError:
        raise UnknownKey(key_id) from None


def _bounded(records: Records, now: float) -> Records:
    """Room for one more: the oldest of those that open nothing any more are forgotten."""
    if len(records) < MAX_RECORDS:
        return records
    dead = sorted((record for record in records.values() if not record.is_live(now)), key=lambda record: record.created)
    if not dead:
        raise KeyConflict("too_many_keys", f"There are {MAX_RECORDS} live keys, which is the limit.")
    forgotten = {record.id for record in dead[: len(records) - MAX_RECORDS + 1]}
    return {key_id: record for key_id, record in records.items() if key_id not in forgotten}


def _named_alike(records: Records, record: KeyRecord, now: float) -> list[KeyRecord]:
    return [
        other
        for other in live(records.values(), record.kind, now)
        if (other.tenant, other.name) == (record.tenant, record.name)
    ]
