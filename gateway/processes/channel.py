"""Calls and posts in both directions over one stream socket: between the supervisor and one data process.

Frames are length-prefixed msgpack. A *post* has no answer; posts are handled in the order in which they were sent. A *call*
has one, in time or not at all. What goes over a channel is bytes: each topic knows its own encoding.

What must hold: whatever one side does, the other waits for nothing longer than its own deadline, and keeps at most
`MAX_FRAME_BYTES` of what came and `_MAX_UNSENT_BYTES` of what it could not send; past that the peer hangs, and the channel
closes. A closed channel stays closed: for a data process it means that its supervisor is gone, and the other way round.

    ChannelError
    ├── ChannelClosed   the peer is gone
    ├── CallTimedOut    it did not answer in time
    └── CallFailed      it refused, or failed
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal

import msgspec

__all__ = [
    "MAX_FRAME_BYTES",
    "Answer",
    "CallFailed",
    "CallTimedOut",
    "Channel",
    "ChannelClosed",
    "ChannelError",
    "Hear",
]

_log = logging.getLogger("warmpath.processes")

MAX_FRAME_BYTES: Final = 64 << 20
"""All keys of a large installation in one frame, several times over."""
_MAX_UNSENT_BYTES: Final = 64 << 20
_MAX_CALLS: Final = 1024
"""That a peer may have open here. The next one is read when one of them is answered."""
_LENGTH_BYTES: Final = 4

Answer = Callable[[bytes], bytes | Awaitable[bytes]]
Hear = Callable[[bytes], object]


class ChannelError(OSError):
    """A call came to nothing."""


class ChannelClosed(ChannelError):
    """The peer is gone."""


class CallTimedOut(ChannelError):
    """The peer did not answer in time. It may do yet what it was asked."""


class CallFailed(ChannelError):
    """The peer does not know the topic, or failed."""


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["post", "call", "answer", "failure"]
    number: int
    topic: str
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode


class Channel:
    """One end. `run` reads until the channel closes; it is the caller's task."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        answers: Mapping[str, Answer],
        hears: Mapping[str, Hear],
    ) -> None:
        """`answers` and `hears`: what is done with calls and posts, by topic; what they raise fails that frame alone."""
        self._reader = reader
        self._writer = writer
        self._answers = answers
        self._hears = hears
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MAX_CALLS)
        self.is_closed = False

    @classmethod
    async def over(
        cls, end: socket.socket, *, answers: Mapping[str, Answer] | None = None, hears: Mapping[str, Hear] | None = None
    ) -> Channel:
        """Takes over a connected Unix stream socket."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, answers=answers or {}, hears=hears or {})

    # --- speaking

    def post(self, topic: str, payload: bytes) -> None:
        """Send it if there is still somebody to send it to; nobody says whether it arrived."""
        self._send(_Frame("post", 0, topic, payload))

    async def call(self, topic: str, payload: bytes, timeout_s: float) -> bytes:
        """Raises `ChannelError`."""
        if self.is_closed:
            raise ChannelClosed("the other process is gone")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(_Frame("call", number, topic, payload))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise CallTimedOut(f"no answer to {topic} within {timeout_s:g} s") from error
        finally:
            del self._waiting[number]

    def _send(self, frame: _Frame) -> None:
        if self.is_closed:
            return
        data = _encode(frame)
        self._writer.writelines((len(data).to_bytes(_LENGTH_BYTES), data))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            _log.error("a process takes nothing of what is sent to it")
            self.close()

    # --- listening

    async def run(self) -> None:
        """Handle what comes until the peer is gone or `close` is called."""
        try:
            while not self.is_closed:
                await self._handle(await self._read())
        except (OSError, EOFError, msgspec.MsgspecError):
            pass
        finally:
            self.close()
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def close(self) -> None:
        """At once; every open call fails."""
        self.is_closed = True
        self._writer.transport.abort()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ChannelClosed("the other process is gone"))

    async def _read(self) -> _Frame:
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
        if length > MAX_FRAME_BYTES:
            raise EOFError("no frame has so many bytes")
        return _decode(await self._reader.readexactly(length))

    async def _handle(self, frame: _Frame) -> None:
        match frame.kind:
            case "post":
                self._hear(frame)
            case "call":
                await self._room.acquire()
                self._answer(frame)
            case _:
                answer = self._waiting.get(frame.number)
                if answer is None or answer.done():  # it came too late
                    return
                if frame.kind == "answer":
                    answer.set_result(frame.payload)
                else:
                    answer.set_exception(CallFailed(frame.payload.decode()))

    def _hear(self, frame: _Frame) -> None:
        try:
            self._hears[frame.topic](frame.payload)
        except Exception:
            _log.exception("a post %s failed", frame.topic)

    def _answer(self, frame: _Frame) -> None:
        """What needs no waiting is answered at once, so that it sees what posts before it have changed, and no later one."""
        try:
            result = self._answers[frame.topic](frame.payload)
        except Exception as error:
            self._fail(frame, error)
        else:
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(self._answer_later(frame, result))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
                return
            assert isinstance(result, bytes)
            self._send(_Frame("answer", frame.number, frame.topic, result))
        self._room.release()

    async def _answer_later(self, frame: _Frame, result: Awaitable[bytes]) -> None:
        try:
            self._send(_Frame("answer", frame.number, frame.topic, await result))
        except Exception as error:
            self._fail(frame, error)
        finally:
            self._room.release()

    def _fail(self, frame: _Frame, error: Exception) -> None:
        _log.error("a call %s failed", frame.topic, exc_info=error)
        self._send(_Frame("failure", frame.number, frame.topic, f"{frame.topic}: {type(error).__name__}".encode()))
