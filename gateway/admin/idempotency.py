"""The same answer to a call that was sent again, because its first answer was lost on the way.

What must hold: of equal calls of one caller with one Idempotency-Key, one does something; the same key with another body is a
conflict. Answers are remembered for ten minutes, by this process, and a bounded number of them. An answer may hold the text
of a new key, which is nowhere else: a caller who lost it would have to revoke the key and make another. That is the reason to
keep it so long, and not longer. Failures are not remembered: to try again is right.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

__all__ = ["AnotherBody", "Idempotency"]

_KEPT_S: Final = 600.0
_MAX_KEPT: Final = 128

T = TypeVar("T")


class AnotherBody(Exception):
    """The key was used for another call."""


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    body_digest: bytes
    answer: asyncio.Task[T]
    forgetting: asyncio.TimerHandle
    """Holds the call, and so its answer, until it is over or cancelled."""


class Idempotency(Generic[T]):
    def __init__(self, kept_s: float = _KEPT_S) -> None:
        self._kept_s = kept_s
        self._calls: OrderedDict[tuple[str, bytes], _Call[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    async def once(self, caller: str, key: bytes, body: bytes, do: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `do` gave for this caller and key, or gives now. Raises `AnotherBody`, or what `do` raises."""
        place = (caller, hashlib.sha256(key).digest())
        digest = hashlib.sha256(body).digest()
        call = self._calls.get(place)
        if call is None:
            call = self._begin(place, digest, asyncio.ensure_future(do()))
        elif call.body_digest != digest:
            raise AnotherBody
        # A caller who leaves does not end it for the one who asks again.
        return await asyncio.shield(call.answer)

    def _begin(self, place: tuple[str, bytes], digest: bytes, answer: asyncio.Task[T]) -> _Call[T]:
        def forget() -> None:
            call.forgetting.cancel()
            if self._calls.get(place) is call:
                del self._calls[place]

        def done(answer: asyncio.Task[T]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                forget()

        call = _Call(digest, answer, asyncio.get_running_loop().call_later(self._kept_s, forget))
        answer.add_done_callback(done)
        self._calls[place] = call
        if len(self._calls) > _MAX_KEPT:
            _, oldest = self._calls.popitem(last=False)
            oldest.forgetting.cancel()
        return call
