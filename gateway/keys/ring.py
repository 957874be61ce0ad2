"""Who may, now: every key of a gateway as one value that never changes. Pure; time comes in as an argument.

What must hold: a `KeyRecord` comes out of `identify` only for a text whose digest was compared, in constant time, or for the
same header as one that was; whatever goes wrong on the way is None, never a record. An unknown id costs what a known one costs.

Lookup is O(1) by id. A ring remembers the headers that it let in, by a keyed digest of all of their bytes, for an HMAC of
OpenSSL costs 10 us among everything else that a request does. What it remembers goes with it, so a revocation counts from the
moment a ring is replaced; whether a key has expired is looked at every time.

A ring crosses to another process as bytes (`encode`, `decode`). Those hold the pepper and the fleet secret: they belong on a
private channel between processes of one gateway, and nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable
from typing import Final, Protocol, Self, TypeVar

import msgspec

from gateway.keys.records import KeyRecord, live
from gateway.keys.texts import KeyKind, KeyText, parse_bearer

__all__ = ["KeyRing", "KeySecrets", "RingHolder", "RingSource"]

_log = logging.getLogger("warmpath.keys")
_Name = TypeVar("_Name")
_Value = TypeVar("_Value")

_NOBODY: Final = bytes(32)
"""The digest compared with when the id is unknown, so that both ways cost the same."""
_MOST_REMEMBERED: Final = 4096
"""Headers, and groups' salts."""


class KeySecrets(msgspec.Struct, frozen=True):
    """What digests and cache salts are made with, 32 bytes or more each. Kept apart from the records."""

    pepper: bytes
    fleet_secret: bytes

    def __repr__(self) -> str:
        return "KeySecrets(…)"

    def digest(self, text: bytes) -> bytes:
        return hmac.digest(self.pepper, text, "sha256")


class _Encoded(msgspec.Struct, array_like=True):
    secrets: KeySecrets
    records: list[KeyRecord]


class KeyRing:
    """A snapshot of all keys."""

    __slots__ = ("__weakref__", "_by_id", "_let_in", "_mark", "_records", "_salts", "_secrets")

    def __init__(self, records: Iterable[KeyRecord], secrets: KeySecrets) -> None:
        self._secrets = secrets
        self._records = tuple(records)
        self._by_id = {record.id: (record, bytes.fromhex(record.digest)) for record in self._records}
        self._mark = os.urandom(32)
        """The key of `_let_in`'s digests: nobody outside can make two headers that share one."""
        self._let_in: dict[bytes, KeyRecord] = {}
        self._salts: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"KeyRing({len(self._records)} keys)"

    def verify(self, header: bytes, kind: KeyKind, now: float) -> KeyRecord | None:
        """The key in an Authorization header if it is valid at `now` (Unix seconds) and of this kind. Never raises."""
        record = self.identify(header, now)
        return record if record is not None and record.kind == kind else None

    def identify(self, header: bytes, now: float) -> KeyRecord | None:
        """The key in an Authorization header if it is valid, of whatever kind. Never raises."""
        try:
            digest = hashlib.blake2b(header, digest_size=32, key=self._mark).digest()
            record = self._let_in.get(digest)
            if record is not None:
                return record if record.is_live(now) else None
            key = parse_bearer(header)
            record = self._identify(key, now) if key is not None else None
            if record is not None:
                _remember(self._let_in, digest, record)
            return record
        except Exception as error:  # nobody is let in by a bug
            _log.error("checking a key failed: %s", type(error).__name__)
            return None

    def _identify(self, key: KeyText, now: float) -> KeyRecord | None:
        record, known = self._by_id.get(key.id, (None, _NOBODY))
        same = hmac.compare_digest(self._secrets.digest(key.text), known)
        if record is None or not same or record.kind != key.kind:
            return None
        return record if record.is_live(now) else None

    def get(self, key_id: str) -> KeyRecord | None:
        """Whatever its state."""
        found = self._by_id.get(key_id)
        return found[0] if found is not None else None

    def records(self) -> list[KeyRecord]:
        """Every key that was ever made, the oldest first."""
        return sorted(self._records, key=lambda record: record.created)

    def usable(self, kind: KeyKind, now: float) -> list[KeyRecord]:
        """Keys of a kind that would be let in at `now`, the oldest first."""
        return live(self.records(), kind, now)

    def salt_for(self, group: str) -> str:
        """What separates a sharing group's cached blocks from all others': hex HMAC of the fleet secret.

        Gateways that shall share their replicas' caches need the same fleet secret.
        """
        salt = self._salts.get(group)
        if salt is None:
            salt = hmac.digest(self._secrets.fleet_secret, b"warmpath-salt/1|" + group.encode(), "sha256").hex()
            _remember(self._salts, group, salt)
        return salt

    def encode(self) -> bytes:
        """With its secrets, for another process of this gateway."""
        return msgspec.msgpack.encode(_Encoded(self._secrets, list(self._records)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises msgspec.MsgspecError or ValueError for what no ring of this version wrote."""
        encoded = msgspec.msgpack.decode(data, type=_Encoded)
        return cls(encoded.records, encoded.secrets)


def _remember(known: dict[_Name, _Value], name: _Name, value: _Value) -> None:
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
    known[name] = value


class RingSource(Protocol):
    """Where the ring that counts now is to be had."""

    @property
    def ring(self) -> KeyRing: ...


class RingHolder:
    """The ring of a process that is sent its rings."""

    def __init__(self, ring: KeyRing) -> None:
        self.ring = ring
