"""Keys in Redis, for gateways that share them: one hash, changed by one script.

Redis holds the sealed document alone. The pepper stays with the gateways, so what is in Redis neither opens anything nor can be
changed by whoever reaches it. Errors are told by their class: their texts may hold the URL, and that the password.
"""

from __future__ import annotations

from typing import Final, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.keys.store import KeyStoreError, version_of

__all__ = ["RedisStorage"]

_KEY: Final = "warmpath:keys"
_ANSWER_S: Final = 1.0
_CONNECTIONS: Final = 4
_FAULTS: Final = (RedisError, OSError, ValueError, IndexError)
"""The last two come from the client library's parser, where what answers is no Redis."""

_REPLACE: Final = """
-- KEYS[1]: hash {version, document}
-- ARGV: the version that must be there ('' for none), the new version, the new document
-- Returns 1 when the new document is stored, also by an earlier call whose answer was lost.
local current = redis.call('HGET', KEYS[1], 'version') or ''
if current == ARGV[2] then return 1 end
if current ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'document', ARGV[3])
return 1
"""


class RedisStorage:
    is_shared = True
    place = "Redis"

    def __init__(self, url: str) -> None:
        """Connects when it is first used. Raises `KeyStoreError` for what is no URL of a Redis."""
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_ANSWER_S,
                max_connections=_CONNECTIONS,
                # A connection that Redis closed while it was idle fails once; the script may be run twice.
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError:
            raise KeyStoreError("redis.url is no redis://, rediss:// or unix:// URL") from None
        self._replace = self._redis.register_script(_REPLACE)

    async def load(self) -> bytes | None:
        try:
            return cast("bytes | None", await self._redis.hget(_KEY, "document"))
        except _FAULTS as error:
            raise _failed(error) from None

    async def version(self) -> str:
        try:
            found = cast("bytes | None", await self._redis.hget(_KEY, "version"))
        except _FAULTS as error:
            raise _failed(error) from None
        return found.decode("ascii", "replace") if found is not None else ""

    async def replace(self, document: bytes, expected: str) -> bool:
        try:
            return bool(await self._replace(keys=[_KEY], args=[expected, version_of(document), document]))
        except _FAULTS as error:
            raise _failed(error) from None

    async def aclose(self) -> None:
        await self._redis.aclose()


def _failed(error: Exception) -> KeyStoreError:
    return KeyStoreError(f"Redis cannot be used: {type(error).__name__}")
