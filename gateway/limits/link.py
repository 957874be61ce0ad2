"""A ledger that is somewhere else: the supervisor of this process, or a Redis.

A link asks and tells; it decides nothing and remembers nothing. What goes wrong is one exception, so that whoever asked can
decide by itself (`gateway.limits.leases`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from gateway.limits.ledger import Change, Granted, Ledger, Limit, Refused

__all__ = ["LedgerLink", "LedgerServer", "LedgerUnavailable", "Post", "RemoteLedger", "patience"]

_DEADLINE_S: Final = 0.25
"""The supervisor answers in well under a millisecond; where it does not, a machine is busy, and waiting longer helps nobody."""

_PARTS: Final = 20
"""An answer takes a few turns of the loop, to send, to read, to wake who asked; that of a new connection some more."""


class LedgerUnavailable(Exception):
    """The ledger gave no answer. `kind` is one of few words, for a metric's label."""

    def __init__(self, kind: str, *, was_sent: bool = True) -> None:
        """`was_sent`: it may have done what it was asked to, or may yet do it."""
        super().__init__(kind)
        self.kind = kind
        self.was_sent = was_sent


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """`Ledger.acquire`."""

    holder: str
    limits: list[Limit]
    amounts: list[int]
    extras: list[int]


class Post(msgspec.Struct, frozen=True, array_like=True, tag="post"):
    """First `Ledger.change`, then `Ledger.renew`."""

    holder: str
    changes: list[Change]
    holds: list[Change]
    dead: list[str]


class LedgerLink(Protocol):
    most_calls: int
    """Of `acquire` at once. More would only wait at the ledger, which takes one after the other, while their deadlines run:
    somebody's burst would look like an outage, and cost everybody else."""

    async def acquire(
        self, holder: str, limits: Sequence[Limit], amounts: Sequence[int], extras: Sequence[int]
    ) -> Granted | Refused:
        """As `Ledger.acquire`. Raises `LedgerUnavailable`, after a bounded time."""

    async def post(self, post: Post, *, surely: bool) -> None:
        """Tell it. `surely`: return only once it knows. Raises `LedgerUnavailable`."""

    async def aclose(self) -> None: ...


@contextlib.asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError in the block when others took so long, which is not the same as so much time.

    It is counted in parts, and each waits for a turn of the event loop, which reads what has come. So where this process is
    busy or was held up, an answer that is there is not too late; else our own work would look like an outage.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as timeout:

        def wait(parts: int) -> None:
            nonlocal timer
            if parts:
                timer = loop.call_later(seconds / _PARTS, wait, parts - 1)
            else:
                timeout.reschedule(loop.time())

        wait(_PARTS)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_message: Final = msgspec.msgpack.Decoder(Ask | Post).decode
_decode_verdict: Final = msgspec.msgpack.Decoder(Granted | Refused).decode


class LedgerServer:
    """The supervisor's side."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """`clock`: monotonic, `wall_clock`: Unix, seconds."""
        self.ledger = ledger
        self._clock = clock
        self._wall_clock = wall_clock
        self._lives: dict[str, set[str]] = {}

    def handle(self, process: str, message: bytes) -> bytes:
        """What a process sent → the answer, b'' where none is due. Raises `msgspec.MsgspecError` for anything else.

        `process`: names it for `forget`.
        """
        told = _decode_message(message)
        now, unix = self._clock(), self._wall_clock()
        lives = self._lives.setdefault(process, set())
        lives.add(told.holder)
        if isinstance(told, Ask):
            extras = told.extras if any(told.extras) else None
            return _encode(self.ledger.acquire(told.holder, told.limits, told.amounts, now, unix, extras))
        self.ledger.change(told.holder, told.changes, now, unix)
        self.ledger.renew(told.holder, told.holds, now, told.dead)
        lives.difference_update(told.dead)
        return b""

    def forget(self, process: str) -> None:
        """It has ended: what it held is free."""
        for holder in self._lives.pop(process, ()):
            self.ledger.forget(holder)


class RemoteLedger:
    """A data process's side."""

    most_calls = 64

    def __init__(
        self,
        call: Callable[[bytes], Awaitable[bytes]],
        post: Callable[[bytes], None],
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        """Both hand a message to `LedgerServer.handle`, in the order in which they are called; `call` waits for its answer.
        Whatever they raise means that the ledger is away.
        """
        self._call = call
        self._post = post
        self._deadline_s = deadline_s

    async def acquire(
        self, holder: str, limits: Sequence[Limit], amounts: Sequence[int], extras: Sequence[int]
    ) -> Granted | Refused:
        return _decode_verdict(await self._ask(Ask(holder, list(limits), list(amounts), list(extras))))

    async def post(self, post: Post, *, surely: bool) -> None:
        if surely:
            await self._ask(post)
            return
        try:
            self._post(_encode(post))
        except Exception as error:
            raise LedgerUnavailable("connection", was_sent=False) from error

    async def aclose(self) -> None:
        """The channel belongs to whoever made it."""

    async def _ask(self, message: Ask | Post) -> bytes:
        try:
            async with patience(self._deadline_s):
                return await self._call(_encode(message))
        except TimeoutError as error:
            raise LedgerUnavailable("timeout") from error
        except Exception as error:  # the channel's own: nobody's request fails by it
            raise LedgerUnavailable("connection") from error
