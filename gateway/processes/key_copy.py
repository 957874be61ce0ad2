"""The keys of a store, for processes that only look."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from gateway.keys import KeyRecord, KeyStore, _SecretsFile

__all__ = ["decode_keys", "encode_keys"]


class _Keys(msgspec.Struct):
    records: list[KeyRecord]
    pepper: str
    fleet_secret: str


def encode_keys(store: KeyStore) -> bytes:
    return msgspec.msgpack.encode(_Keys(store.records(), store._pepper.hex(), store._fleet_secret.hex()))


def decode_keys(data: bytes) -> KeyStore:
    keys = msgspec.msgpack.decode(data, type=_Keys)
    return KeyStore(Path(), _SecretsFile(keys.pepper, keys.fleet_secret), keys.records, time.time)
