"""The ledger in a Redis, for several gateways: one script (`ledger.lua`), one trip for all counters of a request.

No call waits longer than the deadline, and none is tried twice: whatever goes wrong is `LedgerUnavailable`. The client library
would hide an outage behind seconds of retries. What is sent to Redis are digests of counters' names and numbers, no key's text,
and no time, since hosts' clocks differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Final

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.limits.ledger import HOLD_S, Granted, Limit, Refused
from gateway.limits.link import LedgerUnavailable, Post, patience

__all__ = ["RedisLedger", "counter_key", "ledger_script"]

_DEADLINE_S: Final = 0.05
_CONNECTIONS: Final = 16
"""For the trips of a limiter, which are few at once, and for what it tells besides."""
_BATCH: Final = 256
"""Counters in one call of the script, which nobody else's runs beside."""
_KINDS: Final = ("READONLY", "WRONGTYPE", "BUSY", "OOM", "LOADING", "NOAUTH", "NOPERM", "CLUSTERDOWN")
_ODD: Final = ("WRONGTYPE", "hash value is not an integer", "attempt to ")
"""What the server says of another type, and of a hash with other fields; the last is how Lua begins a fault of types."""
_BEFORE_IT_BEGAN: Final = frozenset({"readonly", "busy", "oom", "loading", "noauth", "noperm", "clusterdown"})
"""Refusals that come before the script has changed anything."""
_PREFIX: Final = "{warmpath/1}:limit:"
"""With the version of what is stored there: another one's counters are not looked at."""


_MEND: Final = """
-- KEYS: what should be counters as ledger.lua has them. Those that are not would be in the way of every request: removed.
for _, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  local is_odd = kind ~= 'hash' and kind ~= 'none'
  if kind == 'hash' then
    local fields = redis.call('HGETALL', key)
    for i = 2, #fields, 2 do is_odd = is_odd or not tonumber(fields[i]) end
    local window = redis.call('HMGET', key, 'u', 'o', 'n')
    is_odd = is_odd or (window[1] and not (window[2] and window[3]))
  end
  if is_odd then redis.call('DEL', key) end
end
"""


def ledger_script() -> str:
    return resources.files("gateway.limits").joinpath("ledger.lua").read_text(encoding="utf-8")


@lru_cache(maxsize=1 << 16)
def counter_key(counter: str) -> str:
    return _PREFIX + hashlib.blake2b(counter.encode(), digest_size=16).hexdigest()


class RedisLedger:
    """A `LedgerLink`."""

    most_calls = 8
    """Each takes a connection, and a new one takes longer than a call."""

    def __init__(
        self, url: str, *, deadline_s: float = _DEADLINE_S, hold_s: float = HOLD_S, script: str | None = None
    ) -> None:
        """`url`: ``redis://`` or ``rediss://``, with password and database. `script`: another one, for tests. Raises ValueError
        for what is no such URL.
        """
        self._deadline_s = deadline_s
        self._hold_s = hold_s
        self._script = ledger_script() if script is None else script
        self._digest = hashlib.sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=None,  # for all of a call there is one deadline
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=None,
            # What else a new connection would say costs round trips, for nothing that is used here.
            protocol=2,
            driver_info=None,
        )
        self._redis = redis.asyncio.Redis.from_pool(pool)

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def acquire(
        self, holder: str, limits: Sequence[Limit], amounts: Sequence[int], extras: Sequence[int]
    ) -> Granted | Refused:
        arguments: list[str | int | float] = ["ask", holder, self._hold_s]
        for limit, amount, extra in zip(limits, amounts, extras, strict=True):
            arguments += (int(limit.measure), limit.most, amount, extra)
        answer = await self._run([counter_key(limit.counter) for limit in limits], arguments)
        try:
            return _verdict(msgspec.convert(answer, list[int]), limits, extras)
        except (msgspec.MsgspecError, ValueError, IndexError) as error:  # no Redis, or not our script's answer
            raise LedgerUnavailable("other") from error

    async def post(self, post: Post, *, surely: bool) -> None:
        parts = [
            Post(post.holder, post.changes[begin : begin + _BATCH], [], [])
            for begin in range(0, len(post.changes), _BATCH)
        ]
        parts += [
            Post(post.holder, [], post.holds[begin : begin + _BATCH], post.dead)
            for begin in range(0, len(post.holds), _BATCH)
        ]
        if not parts and surely:
            parts = [post]
        for place, part in enumerate(parts):
            try:
                await self._post(part)
            except LedgerUnavailable as error:
                if place == 0:
                    raise
                raise LedgerUnavailable(error.kind) from error  # a part of it was done

    async def _post(self, post: Post) -> None:
        arguments: list[str | int | float] = ["post", post.holder, self._hold_s, len(post.changes)]
        for change in post.changes:
            arguments += (int(change.measure), change.held, change.spent, change.bucket)
        for hold in post.holds:
            arguments += (int(hold.measure), hold.held)
        arguments += post.dead
        await self._run([counter_key(change.counter) for change in (*post.changes, *post.holds)], arguments)

    async def _run(self, keys: list[str], arguments: list[str | int | float]) -> Any:
        try:
            async with patience(self._deadline_s):
                try:
                    return await self._call(keys, arguments)
                except ResponseError as error:
                    if not _is_odd(str(error)):
                        raise
                    await self._redis.eval(_MEND, len(keys), *keys)
                    return await self._call(keys, arguments)
        except (TimeoutError, RedisTimeoutError) as error:
            raise LedgerUnavailable("timeout") from error
        except (RedisConnectionError, OSError) as error:
            raise LedgerUnavailable("connection") from error
        except (RedisError, ValueError, IndexError) as error:  # the last two: what the client's parser stumbles over
            kind = _kind(str(error))
            if kind == "readonly":
                await self._drop_connections()  # the primary is somewhere else by now
            raise LedgerUnavailable(kind, was_sent=kind not in _BEFORE_IT_BEGAN) from error

    async def _call(self, keys: list[str], arguments: list[str | int | float]) -> Any:
        try:
            return await self._redis.evalsha(self._digest, len(keys), *keys, *arguments)
        except NoScriptError:  # a new server, or one that was told to forget
            return await self._redis.eval(self._script, len(keys), *keys, *arguments)

    async def _drop_connections(self) -> None:
        await self._redis.connection_pool.disconnect(inuse_connections=False)


def _verdict(told: list[int], limits: Sequence[Limit], extras: Sequence[int]) -> Granted | Refused:
    """Raises ValueError or IndexError for what `ledger.lua` would not say."""
    if not told[0]:
        _, place, wait_ms, reset_ms, left = told
        return Refused(limits[place], wait_ms / 1000 if wait_ms >= 0 else None, reset_ms / 1000, left)
    middle = 2 + len(limits)
    if len(told) not in (middle, middle + len(limits)):
        raise ValueError("another number of limits")
    return Granted(told[1], told[2:middle], told[middle:] if any(extras) else [])


def _is_odd(message: str) -> bool:
    """Whether what lies under a counter's name is no counter of ours. Nobody else has any business there."""
    return any(sign in message for sign in _ODD)


def _kind(message: str) -> str:
    """Most have no class of their own, and what goes wrong inside the script is told behind the script's name."""
    return next((kind.lower() for kind in _KINDS if kind in message), "other")
