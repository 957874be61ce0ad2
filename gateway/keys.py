"""Who may: keys as HMAC digests, and the secrets that digests and cache salts are made with.

A key's text is ``wp-<id>-<secret>`` and is seen once, when the key is made. What is kept in ``keys.json`` is its id and
HMAC-SHA256(pepper, text); the pepper lies in another file, so a copy of the records alone lets nobody guess offline. A secret
carries 256 random bits, which is why a fast hash is enough.

The kinds are told apart by their prefix, which is part of what is digested: a client's key is never an admin's.

    wp-   client   the OpenAI API
    wpa-  admin    everything under /admin/v1
    wpj-  join     replicas that register themselves, and nothing else

What must hold: a `KeyRecord` comes out of `identify` only for a text whose digest was compared, in constant time; whatever
goes wrong on the way is None, never a record. No key's text is stored, logged or put into an error.

Files are replaced whole by rename, mode 0600. One process owns a folder; calls that change it write to disk and may come
from several threads.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import string
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import msgspec

__all__ = ["KeyKind", "KeyRecord", "KeyStore", "KeyStoreError", "Label", "checked_label"]

_log = logging.getLogger("warmpath.keys")

KeyKind = Literal["client", "admin", "join"]
_LABEL: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}(?!\n)$"
"""`$` alone would let a last line feed pass."""
Label = Annotated[str, msgspec.Meta(pattern=_LABEL)]
"""A name that people choose: safe in logs, headers and file names."""

_PREFIXES: Final[dict[KeyKind, str]] = {"client": "wp", "admin": "wpa", "join": "wpj"}
_KINDS: Final[dict[str, KeyKind]] = {prefix: kind for kind, prefix in _PREFIXES.items()}
_TEXT: Final = re.compile(rb"(wp[aj]?)-([a-z0-9]{4,32})-([A-Za-z0-9_-]{16,128})")
_BEARER: Final = re.compile(rb"(?i:bearer) +([\x21-\x7e]+) *")
_MAX_HEADER_BYTES: Final = 256

_ID_ALPHABET: Final = string.ascii_lowercase + string.digits
_ID_CHARS: Final = 10
_SECRET_ALPHABET: Final = string.ascii_letters + string.digits
"""No punctuation: a double click selects the whole secret."""
_SECRET_CHARS: Final = 43
"""62 ** 43 > 2 ** 256."""

_NOBODY: Final = "00" * 32
"""The digest compared with when the id is unknown, so that both ways cost the same."""


def checked_label(value: str) -> str:
    """Raises ValueError for what is no `Label`."""
    if not re.match(_LABEL, value):
        raise ValueError("a name has 1 to 63 characters of A-Z, a-z, 0-9 and ._@-, and begins with a letter or a digit")
    return value


class KeyStoreError(Exception):
    """The files of a key store cannot be used; the message says which and why."""


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
    debug: bool = False
    """Whether answers say how they were routed."""
    requests_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """None: the gateway's default."""
    revoked: bool = False


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyRecord]
    v: Literal[1] = 1


class _SecretsFile(msgspec.Struct, forbid_unknown_fields=True):
    pepper: str
    fleet_secret: str
    v: Literal[1] = 1


class KeyStore:
    """All keys of one gateway. Looks up in memory; every change is on disk before it counts."""

    def __init__(
        self, folder: Path, secrets_file: _SecretsFile, records: list[KeyRecord], clock: Callable[[], float]
    ) -> None:
        self._path = folder / "keys.json"
        self._pepper = bytes.fromhex(secrets_file.pepper)
        self._fleet_secret = bytes.fromhex(secrets_file.fleet_secret)
        self._clock = clock
        self._records = {record.id: record for record in records}
        self._change = threading.Lock()

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], float] = time.time) -> Self:
        """The store in `folder`, made if there is none. `clock`: Unix seconds. Raises `KeyStoreError`."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            records = _read_keys(folder / "keys.json")
            return cls(folder, _read_or_make_secrets(folder, records), records, clock)
        except OSError as error:
            raise KeyStoreError(f"cannot use {folder}: {error.strerror}") from error

    # --- looking

    def verify(self, header: bytes, kind: KeyKind) -> KeyRecord | None:
        """The key in an Authorization header if it is valid and of this kind."""
        record = self.identify(header)
        return record if record is not None and record.kind == kind else None

    def identify(self, header: bytes) -> KeyRecord | None:
        """The key in an Authorization header if it is valid, of whatever kind. Never raises."""
        try:
            return self._identify(header)
        except Exception as error:  # nobody is let in by a bug
            _log.error("checking a key failed: %s", type(error).__name__)
            return None

    def _identify(self, header: bytes) -> KeyRecord | None:
        if len(header) > _MAX_HEADER_BYTES or (bearer := _BEARER.fullmatch(header)) is None:
            return None
        text = bearer[1]
        if (parts := _TEXT.fullmatch(text)) is None:
            return None
        record = self._records.get(parts[2].decode())
        known = _NOBODY if record is None else record.digest
        same = hmac.compare_digest(self._digest(text), bytes.fromhex(known))
        if record is None or not same or record.revoked or _KINDS[parts[1].decode()] != record.kind:
            return None
        return None if record.expires is not None and record.expires <= self._clock() else record

    def records(self) -> list[KeyRecord]:
        """Every key that was ever made, the oldest first."""
        return sorted(self._records.values(), key=lambda record: record.created)

    def usable(self, kind: KeyKind) -> list[KeyRecord]:
        """Keys of a kind that would be let in now."""
        now = self._clock()
        return [
            record
            for record in self.records()
            if record.kind == kind and not record.revoked and (record.expires is None or record.expires > now)
        ]

    def salt_for(self, group: str) -> str:
        """What separates a sharing group's cached blocks from all others': hex HMAC of the fleet secret.

        Gateways that shall share their replicas' caches need the same fleet secret.
        """
        return hmac.digest(self._fleet_secret, b"warmpath-salt/1|" + group.encode(), "sha256").hex()

    # --- changing

    def create(
        self,
        kind: KeyKind,
        *,
        name: str,
        tenant: str = "default",
        group: str | None = None,
        debug: bool = False,
        expires: float | None = None,
        requests_per_minute: int | None = None,
    ) -> tuple[KeyRecord, str]:
        """A new key, and its text, which cannot be had again."""
        key_id = _random(_ID_ALPHABET, _ID_CHARS)
        text = f"{_PREFIXES[kind]}-{key_id}-{_random(_SECRET_ALPHABET, _SECRET_CHARS)}"
        record = KeyRecord(
            id=key_id,
            kind=kind,
            name=name,
            tenant=tenant,
            group=group or tenant,
            digest=self._digest(text.encode()).hex(),
            created=self._clock(),
            expires=expires,
            debug=debug,
            requests_per_minute=requests_per_minute,
        )
        self._put(record)
        return record, text

    def adopt(self, text: str, kind: KeyKind, *, name: str, tenant: str = "default") -> KeyRecord:
        """Take a key whose text the operator chose, so that a worker or a script can be given it before the first start.

        The same text again changes nothing; another secret under the same id replaces it. Raises `KeyStoreError`.
        """
        parts = _TEXT.fullmatch(text.encode())
        if parts is None or parts[1].decode() != _PREFIXES[kind]:
            raise KeyStoreError(
                f"a key of kind {kind} is written {_PREFIXES[kind]}-ID-SECRET "
                "with 4-32 of a-z 0-9 as ID and 16-128 of A-Z a-z 0-9 _ - as SECRET"
            )
        key_id = parts[2].decode()
        digest = self._digest(text.encode()).hex()
        known = self._records.get(key_id)
        if known is not None and known.kind == kind and known.digest == digest:
            return known
        record = KeyRecord(
            id=key_id, kind=kind, name=name, tenant=tenant, group=tenant, digest=digest, created=self._clock()
        )
        self._put(record)
        return record

    def revoke(self, key_id: str) -> KeyRecord | None:
        """Let nobody in with this key any more. None when there is no such key. The record stays, its id is used up."""
        record = self._records.get(key_id)
        if record is None or record.revoked:
            return record
        revoked = msgspec.structs.replace(record, revoked=True)
        self._put(revoked)
        return revoked

    def _put(self, record: KeyRecord) -> None:
        with self._change:
            records = {**self._records, record.id: record}
            body = msgspec.json.format(msgspec.json.encode(_KeysFile(list(records.values()))), indent=1)
            try:
                _replace(self._path, body)
            except OSError as error:
                raise KeyStoreError(f"cannot write {self._path}: {error.strerror}") from error
            self._records = records

    def _digest(self, text: bytes) -> bytes:
        return hmac.digest(self._pepper, text, "sha256")


def _random(alphabet: str, length: int) -> str:
    return "".join(secrets.choice(alphabet) for _ in range(length))


def _read_keys(path: Path) -> list[KeyRecord]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_KeysFile).keys
    except FileNotFoundError:
        return []
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KeyStoreError(f"{path} is no key file: {error}") from error


def _read_or_make_secrets(folder: Path, records: list[KeyRecord]) -> _SecretsFile:
    path = folder / "secrets.json"
    if not path.exists():
        if records:
            raise KeyStoreError(
                f"{path} is missing, and without it no key in keys.json is valid: restore it, or remove both"
            )
        made = _SecretsFile(pepper=secrets.token_hex(32), fleet_secret=secrets.token_hex(32))
        _replace(path, msgspec.json.encode(made))
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_SecretsFile)
        if min(len(bytes.fromhex(found.pepper)), len(bytes.fromhex(found.fleet_secret))) < 32:
            raise ValueError("too short")
    except ValueError as error:  # the message of a decoder could repeat what it read
        raise KeyStoreError(f"{path} does not hold a pepper and a fleet secret of 32 bytes in hex") from error
    return found


def _replace(path: Path, body: bytes) -> None:
    """Write a file whole or not at all, readable by its owner only, and on disk when this returns."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
