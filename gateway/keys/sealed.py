"""The records of all keys as one document, which a storage keeps as bytes. Pure.

A document carries its revision and an HMAC under the pepper: whoever can write to the storage but does not have the pepper can
neither make a key nor widen one, and records made with another pepper, which could open nothing, are noticed at once.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.keys.records import KeyRecord, Records
from gateway.keys.ring import KeySecrets

__all__ = ["SealError", "Sealed", "seal", "unseal"]

_VERSION: Final = 2


class SealError(Exception):
    """A document that is not to be trusted; says why, and nothing of what it holds."""


@dataclass(frozen=True, slots=True)
class Sealed:
    revision: int
    """Rises by one with every change."""
    records: Records


class _Document(msgspec.Struct):
    v: int = 0
    revision: int = 0
    mac: str = ""
    keys: msgspec.Raw = msgspec.Raw(b"[]")


def seal(sealed: Sealed, secrets: KeySecrets) -> bytes:
    keys = msgspec.json.format(msgspec.json.encode(list(sealed.records.values())), indent=1)
    mac = _mac(sealed.revision, keys, secrets)
    return msgspec.json.encode(_Document(_VERSION, sealed.revision, mac, msgspec.Raw(keys)))


def unseal(document: bytes, secrets: KeySecrets) -> Sealed:
    """Raises `SealError`."""
    try:
        found = msgspec.json.decode(document, type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise SealError("it holds no records of keys") from None
    if found.v != _VERSION:
        raise SealError(f"it was written by another version of warmpath (format {found.v}, not {_VERSION})")
    keys = bytes(found.keys)
    if not hmac.compare_digest(found.mac.encode(), _mac(found.revision, keys, secrets).encode()):
        raise SealError("it was written with another pepper, or changed since")
    try:
        records = msgspec.json.decode(keys, type=list[KeyRecord])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SealError(f"its records cannot be read: {type(error).__name__}") from None
    return Sealed(found.revision, {record.id: record for record in records})


def _mac(revision: int, keys: bytes, secrets: KeySecrets) -> str:
    return secrets.digest(b"warmpath-keys/%d|%d|%b" % (_VERSION, revision, keys)).hex()
