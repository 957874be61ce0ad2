"""All keys of a gateway: the ring that counts now, and the changes to it, kept in a storage that may be shared.

What must hold:
- A change is in the storage before it counts, and is made on what the storage holds then, so that of several gateways none
  undoes another's (compare-and-set; tried again when another one was first).
- When the storage fails, the last known ring serves on and changes are refused. Nobody is let in because it is down.
- Of a shared storage, what others change is seen within `POLL_S` and the time to read it.
- A storage that lost its last writes (a failover, a flush) gets them again: a key that was revoked stays so.

Keys from the settings are a layer over the stored ones: known to this gateway, changed by its settings, never stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import msgspec

from gateway.keys.records import (
    KeyConflict,
    KeyRecord,
    KeyScope,
    Records,
    UnknownKey,
    added,
    joined,
    live,
    patched,
    revoked,
    rotated,
)
from gateway.keys.ring import KeyRing, KeySecrets
from gateway.keys.sealed import Sealed, SealError, seal, unseal
from gateway.keys.texts import PREFIXES, KeyKind, new_id, new_text, parse_text
from gateway.limits import Quota
from gateway.repeating import repeat

__all__ = ["POLL_S", "GivenKey", "KeyStorage", "KeyStore", "KeyStoreError", "version_of"]

_log = logging.getLogger("warmpath.keys")

POLL_S: Final = 1.0
_CHANGE_S: Final = 3.0
"""A change that takes longer is given up: an operator waits for it."""
_BACK_OFF_S: Final = 0.02
"""At most, before a change is tried again because another gateway was first: a few round trips."""

T = TypeVar("T")


class KeyStoreError(Exception):
    """The keys cannot be read or changed now; the message says why and holds no secret."""


class KeyStorage(Protocol):
    """Keeps one document. Every method raises `KeyStoreError` when it cannot, within a bounded time."""

    @property
    def is_shared(self) -> bool:
        """Whether others may change it."""

    @property
    def place(self) -> str:
        """For messages; without credentials."""

    async def load(self) -> bytes | None: ...

    async def version(self) -> str:
        """`version_of` the document that `load` would give now, more cheaply."""

    async def replace(self, document: bytes, expected: str) -> bool:
        """Whether `document` is stored; it is not when what was there is not of version `expected`."""

    async def aclose(self) -> None: ...


def version_of(document: bytes | None) -> str:
    return hashlib.sha256(document).hexdigest() if document is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKey:
    """A key of the operator's choice: either its text, or its id and the digest of a text that stays elsewhere."""

    kind: KeyKind
    name: str
    tenant: str = "default"
    group: str | None = None
    text: str | None = None
    id: str = ""
    digest: str = ""
    scopes: tuple[KeyScope, ...] = ()
    models: tuple[str, ...] = ()
    limits: Quota = field(default_factory=Quota)
    expires: float | None = None
    debug: bool = False

    def __repr__(self) -> str:
        return f"GivenKey({self.kind}, {self.name})"

    def record(self, secrets: KeySecrets, now: float) -> KeyRecord:
        """Raises `KeyStoreError`, which does not repeat the text."""
        key_id, digest = self.id, self.digest
        if self.text is not None:
            parsed = parse_text(self.text.encode())
            if parsed is None or parsed.kind != self.kind:
                raise KeyStoreError(
                    f"the key '{self.name}': one of kind {self.kind} is written {PREFIXES[self.kind]}-ID-SECRET "
                    "with 4-32 of a-z 0-9 as ID and 16-128 of A-Z a-z 0-9 _ - as SECRET"
                )
            key_id, digest = parsed.id, secrets.digest(parsed.text).hex()
        return KeyRecord(
            id=key_id,
            kind=self.kind,
            name=self.name,
            tenant=self.tenant,
            group=self.group or self.tenant,
            digest=digest,
            created=now,
            expires=self.expires,
            scopes=self.scopes,
            models=self.models,
            limits=self.limits,
            debug=self.debug,
            source="settings",
        )


class KeyStore:
    """Made by `KeyStore.open`; whoever opens it closes it."""

    def __init__(
        self, storage: KeyStorage, secrets: KeySecrets, clock: Callable[[], float], document: bytes | None
    ) -> None:
        """`document`: what the storage holds. Raises `KeyStoreError`."""
        self._storage = storage
        self._secrets = secrets
        self._clock = clock
        self._given: Records = {}
        self._version = version_of(document)
        self._stored = self._unsealed(document)
        self._subscribers: list[Callable[[KeyRing], None]] = []
        self._change = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._fault: str | None = None
        self._ring = self._new_ring()

    @classmethod
    async def open(
        cls, storage: KeyStorage, secrets: Callable[[bool], KeySecrets], clock: Callable[[], float]
    ) -> KeyStore:
        """`secrets`: reads them, given whether there are keys already. `clock`: Unix seconds. Raises `KeyStoreError`."""
        document = await storage.load()
        return cls(storage, secrets(document is not None), clock, document)

    # --- looking

    @property
    def ring(self) -> KeyRing:
        """The keys as they are now. Replaced as a whole at every change."""
        return self._ring

    @property
    def fault(self) -> str | None:
        """Why the storage could not be read the last time; None when it could."""
        return self._fault

    def subscribe(self, callback: Callable[[KeyRing], None]) -> Callable[[], None]:
        """Call back with every new ring. Returns what ends it."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def salt_for(self, group: str) -> str:
        return self._ring.salt_for(group)

    # --- changing: all raise `KeyStoreError`, and `KeyConflict` or `UnknownKey` where the keys as they are forbid it

    async def create(
        self,
        kind: KeyKind,
        *,
        name: str,
        tenant: str = "default",
        group: str | None = None,
        scopes: tuple[KeyScope, ...] = (),
        models: tuple[str, ...] = (),
        limits: Quota | None = None,
        expires: float | None = None,
        debug: bool = False,
    ) -> tuple[KeyRecord, str]:
        """A new key, and its text, which cannot be had again."""
        now = self._clock()
        key_id, text, digest = self._draw(kind)
        record = KeyRecord(
            id=key_id,
            kind=kind,
            name=name,
            tenant=tenant,
            group=group or tenant,
            digest=digest,
            created=now,
            expires=expires,
            scopes=scopes,
            models=models,
            limits=limits or Quota(),
            debug=debug,
        )
        return await self._changed(lambda records: (added(records, record, now), record)), text

    async def create_first(self, kind: KeyKind, *, name: str) -> str | None:
        """The text of a new key if none of this kind would be let in; of gateways that ask together, one makes it."""
        now = self._clock()
        if live(self._given.values(), kind, now):
            return None
        key_id, text, digest = self._draw(kind)
        record = KeyRecord(
            id=key_id, kind=kind, name=name, tenant="default", group="default", digest=digest, created=now
        )

        def change(records: Records) -> tuple[Records, bool]:
            if live(records.values(), kind, now):
                return records, False
            return added(records, record, now), True

        return text if await self._changed(change) else None

    async def patch(self, key_id: str, changes: Mapping[str, Any]) -> KeyRecord:
        """`changes`: as of `records.patched`, which also says what it raises."""
        self._require_stored(key_id)
        return await self._changed(lambda records: patched(records, key_id, changes, self._clock()))

    async def rotate(self, key_id: str, overlap_s: float) -> tuple[KeyRecord, str]:
        """A successor with everything but the secret; the old key ends after `overlap_s` seconds."""
        self._require_stored(key_id)
        before = self._ring.get(key_id)
        if before is None:
            raise UnknownKey(key_id)
        now = self._clock()
        new_key_id, text, digest = self._draw(before.kind)
        successor = msgspec.structs.replace(before, id=new_key_id, digest=digest, created=now)
        return await self._changed(lambda records: rotated(records, key_id, successor, overlap_s, now)), text

    async def revoke(self, key_id: str) -> KeyRecord:
        """Let nobody in with this key any more. Again is no error."""
        self._require_stored(key_id)
        now = self._clock()
        given = len(live(self._given.values(), "admin", now))
        return await self._changed(lambda records: revoked(records, key_id, now, other_admins=given))

    def give(self, keys: Sequence[GivenKey]) -> None:
        """Replace the keys from the settings: those that are not among `keys` let nobody in any more. All or nothing.

        Raises `KeyStoreError`.
        """
        self._given = self.given_records(keys)
        self._publish()

    def given_records(self, keys: Sequence[GivenKey]) -> Records:
        """What `give` would take them for; changes nothing. Raises `KeyStoreError`."""
        now = self._clock()
        given: dict[str, KeyRecord] = {}
        for key in keys:
            record = key.record(self._secrets, now)
            if record.id in given:
                raise KeyStoreError(f"the key '{key.name}': there is another one with the id {record.id}")
            before = self._given.get(record.id)
            if before is not None and hmac.compare_digest(before.digest, record.digest):
                record = msgspec.structs.replace(record, created=before.created)
            given[record.id] = record
        return given

    # --- other gateways' changes

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """See what others change while the block runs."""
        following = (
            repeat(self.refresh, POLL_S, _log, "looking for changes of keys") if self._storage.is_shared else None
        )
        task = asyncio.create_task(following) if following is not None else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def refresh(self) -> None:
        """Look once whether others changed something. Never raises; `fault` tells."""
        try:
            async with asyncio.timeout(_CHANGE_S), self._change:
                if await self._storage.version() != self._version:
                    await self._catch_up()
        except (KeyStoreError, TimeoutError) as error:
            fault = str(error) or f"{self._storage.place} does not answer"
            if self._fault is None:
                _log.error("keys: %s; those known serve on", fault)
            self._fault = fault
        else:
            if self._fault is not None:
                _log.info("keys: %s answers again", self._storage.place)
            self._fault = None

    async def aclose(self) -> None:
        """Waits for the changes under way."""
        await asyncio.gather(*self._changes, return_exceptions=True)
        await self._storage.aclose()

    # --- inside

    def _draw(self, kind: KeyKind) -> tuple[str, str, str]:
        key_id = new_id()
        text = new_text(kind, key_id)
        return key_id, text, self._secrets.digest(text.encode()).hex()

    def _require_stored(self, key_id: str) -> None:
        if key_id in self._given:
            raise KeyConflict("key_from_settings", f"The key {key_id} stands in the settings: change it there.")

    async def _changed(self, change: Callable[[Records], tuple[Records, T]]) -> T:
        """Runs to its end even if the caller is cancelled: half of a change must not be known to the storage alone."""
        task = asyncio.ensure_future(self._apply(change))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _apply(self, change: Callable[[Records], tuple[Records, T]]) -> T:
        try:
            async with asyncio.timeout(_CHANGE_S), self._change:
                while True:
                    records, result = change(self._stored.records)
                    if records is self._stored.records or await self._replace(records):
                        return result
                    await asyncio.sleep(random.uniform(0, _BACK_OFF_S))  # noqa: S311 - so that two do not stay in step
                    await self._catch_up()
        except TimeoutError:
            raise KeyStoreError(f"{self._storage.place} does not answer, or others keep changing it") from None

    async def _replace(self, records: Records) -> bool:
        new = Sealed(self._stored.revision + 1, records)
        document = seal(new, self._secrets)
        if not await self._storage.replace(document, self._version):
            return False
        self._version, self._stored = version_of(document), new
        self._publish()
        return True

    async def _catch_up(self) -> None:
        document = await self._storage.load()
        stored = self._unsealed(document)
        if stored.revision > self._stored.revision:
            self._version, self._stored = version_of(document), stored
            self._publish()
            return
        if version_of(document) == self._version:
            return
        _log.warning("keys: %s lost its last changes; they are written again", self._storage.place)
        self._version = version_of(document)
        await self._replace(joined(stored.records, self._stored.records))

    def _unsealed(self, document: bytes | None) -> Sealed:
        if document is None:
            return Sealed(0, {})
        try:
            return unseal(document, self._secrets)
        except SealError as error:
            raise KeyStoreError(f"{self._storage.place} cannot be used: {error}") from None

    def _new_ring(self) -> KeyRing:
        return KeyRing({**self._stored.records, **self._given}.values(), self._secrets)

    def _publish(self) -> None:
        self._ring = self._new_ring()
        for callback in list(self._subscribers):
            callback(self._ring)
