"""The key store that the settings ask for: in Redis where one is given, else in the state folder."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.keys.file_storage import FileStorage, read_or_make_secrets
from gateway.keys.store import GivenKey, KeyStorage, KeyStore
from gateway.settings import Secret, Settings

__all__ = ["given_keys", "open_key_store"]


async def open_key_store(settings: Settings, clock: Callable[[], float] = time.time) -> KeyStore:
    """With the keys of the settings in it. `clock`: Unix seconds. Raises `KeyStoreError`."""
    storage = _storage(settings)
    try:
        store = await KeyStore.open(
            storage,
            lambda have_keys: read_or_make_secrets(
                settings.state_dir,
                pepper=_bytes_of(settings.keys.pepper),
                fleet_secret=_bytes_of(settings.keys.fleet_secret),
                have_keys=have_keys,
            ),
            clock,
        )
        store.give(given_keys(settings))
    except BaseException:
        await storage.aclose()
        raise
    return store


def _storage(settings: Settings) -> KeyStorage:
    if settings.redis.url is None:
        return FileStorage(settings.state_dir)
    from gateway.keys.redis_storage import RedisStorage  # the client library takes 0.2 s to import

    return RedisStorage(settings.redis.url.get_secret_value())


def given_keys(settings: Settings) -> list[GivenKey]:
    """What to `give` a store, at the start and when the settings were read again."""
    given = [given for key in settings.keys.static if (given := key.given) is not None]
    if settings.admin.key is not None:
        given.append(GivenKey(kind="admin", name="admin.key", text=settings.admin.key.get_secret_value()))
    if settings.admin.join_token is not None:
        given.append(GivenKey(kind="join", name="admin.join_token", text=settings.admin.join_token.get_secret_value()))
    return given


def _bytes_of(secret: Secret) -> bytes | None:
    return bytes.fromhex(secret.get_secret_value()) if secret is not None else None
