"""Datagrams between the processes of one gateway, each with a socket in a folder that only their user may enter.

A message is on its way at once when it must be (`post_now`) or the bus was quiet, and else at most `FLUSH_S` later, with all
others of that time: what a datagram costs is paid once for many. A peer whose queue in the kernel is full (ten datagrams are
usual) gets the rest with the next flush, in order. A peer that stays behind costs a bounded amount of memory: first the block
names wait for it no longer, then nothing does, and once it takes something again it is told what is open now.

What must hold: between two processes nothing overtakes anything; whatever is lost was dropped here, counted, and the peer is
then told anew. What comes is taken in by turns of `_TURN` datagrams, so that nobody can hold the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gateway.processes.messages import Batch, Begun, Message, decode_batch, encode_batch, size_of

__all__ = ["FLUSH_S", "MAX_DATAGRAM_BYTES", "SUPERVISOR", "Bus", "Outbox"]

_log = logging.getLogger("warmpath.processes")

SUPERVISOR: Final = 0
"""It decides nothing, so it hears with the others' flushes only: each datagram that it need not get is saved."""
FLUSH_S: Final = 0.02
"""How old a message may get here."""
TELL_EVERY_S: Final = 1.0
MAX_DATAGRAM_BYTES: Final = 64 << 10
"""The kernel takes three times as much from one socket before it says stop."""
_MAX_NAMES: Final = 6_000
"""Of one prompt, so that every message fits into a datagram. That is 96,000 tokens; what is behind them is routed by its
beginning, until the replica's own events tell the rest."""
_MAX_PENDING_NAMES: Final = 50_000
_MAX_PENDING: Final = 10_000
"""For one peer: about a second of a machine that does nothing else."""
_TURN: Final = 64


class Outbox:
    """What one peer is still to get."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.is_behind = True
        """It has missed something, or has just come: it is to be told what is open."""
        self.dropped_names = 0
        self.dropped = 0
        self._names = 0
        """Of all `messages`."""

    def keep(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.messages.append(message)
            if isinstance(message, Begun):
                self._names += len(message.names)
        if len(self.messages) > _MAX_PENDING:
            self.dropped += len(self.take())
            self.is_behind = True
        elif self._names > _MAX_PENDING_NAMES:
            self.messages = [self._without_names(message) for message in self.messages]
            self._names = 0

    def take(self) -> list[Message]:
        """All of it; nothing is left."""
        messages, self.messages, self._names = self.messages, [], 0
        return messages

    def _without_names(self, message: Message) -> Message:
        if not isinstance(message, Begun) or not message.names:
            return message
        self.dropped_names += len(message.names)
        return msgspec.structs.replace(message, names=[])


class Bus:
    """One process's end. `start` and `close` it on the event loop."""

    def __init__(
        self,
        folder: Path,
        process: int,
        *,
        hear: Callable[[Batch], None],
        what_is_open: Callable[[], list[Message]],
        open_numbers: Callable[[], list[Message]],
    ) -> None:
        """`what_is_open`: all that a process must know that has heard nothing. `open_numbers`: what everybody hears once a
        `TELL_EVERY_S`, to forget what is over.
        """
        self._folder = folder
        self._process = process
        self._hear = hear
        self._what_is_open = what_is_open
        self._open_numbers = open_numbers
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._peers: dict[int, Outbox] = {}
        self._messages: list[Message] = []
        self._flush_timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._tell_timer: asyncio.TimerHandle | None = None
        self._flushed_at = float("-inf")
        self._buffer = memoryview(bytearray(MAX_DATAGRAM_BYTES))
        self._gone_dropped = 0
        self.sent = 0
        """Datagrams."""

    @property
    def dropped(self) -> int:
        """Messages that a peer never got."""
        return self._gone_dropped + sum(outbox.dropped for outbox in self._peers.values())

    def start(self) -> None:
        """Raises OSError."""
        self._loop = asyncio.get_running_loop()
        path = self._path(self._process)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket.bind(str(path))
        self._loop.add_reader(self._socket.fileno(), self._take_turn)
        self._tell()

    def close(self) -> None:
        """What was posted before is on its way, unless a peer has no room for it."""
        if self._tell_timer is None:
            self._socket.close()
            return
        self._flush()
        self._tell_timer.cancel()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path(self._process).unlink()

    def set_peers(self, processes: Iterable[int]) -> None:
        """Those that listen now. A new one is told what is open."""
        wanted = set(processes) - {self._process}
        self._gone_dropped += sum(self._peers[gone].dropped for gone in self._peers.keys() - wanted)
        self._peers = {process: self._peers.get(process) or Outbox() for process in sorted(wanted)}
        self._tell_those_behind()

    # --- speaking

    def post(self, message: Message) -> None:
        """To all, in the next flush."""
        self._messages.append(message)
        if self._flush_timer is None:
            wait_s = self._flushed_at + FLUSH_S - self._loop.time()
            if wait_s <= 0:  # the rest of what this turn of the loop has to say goes with it
                self._flush_timer = self._loop.call_soon(self._flush)
            else:
                self._flush_timer = self._loop.call_later(wait_s, self._flush)

    def post_now(self, message: Message) -> None:
        """To all others but the supervisor, before this returns where they have room: whatever is said to a client afterwards,
        they know before it asks.
        """
        self._messages.append(message)
        self._flush(waits=SUPERVISOR)

    def _flush(self, waits: int | None = None) -> None:
        """`waits`: who gets it with a later one."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._flushed_at = self._loop.time()
        messages, self._messages = [_cut(message) for message in self._messages], []
        packed = list(_datagrams(messages)) if messages else []
        for process, outbox in self._peers.items():
            if outbox.is_behind:
                continue  # it will be told anew, which says all of this
            if process == waits:
                outbox.keep(messages)
            elif outbox.messages:
                outbox.keep(messages)
                self._send_kept(process, outbox)
            else:
                self._send(process, outbox, packed)
        if any(outbox.messages for outbox in self._peers.values()) and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_S, self._flush)

    def _send_kept(self, process: int, outbox: Outbox) -> None:
        self._send(process, outbox, _datagrams(outbox.take()))

    def _send(self, process: int, outbox: Outbox, packed: Iterable[Sequence[Message]]) -> None:
        """To one that is not behind. What there is no room for is kept; once that makes it fall behind, the rest is dropped."""
        is_full = False
        for messages in packed:
            if outbox.is_behind:
                outbox.dropped += len(messages)
                continue
            is_full = is_full or not self._try_send(process, outbox, messages)
            if is_full and not outbox.is_behind:
                outbox.keep(messages)

    def _try_send(self, process: int, outbox: Outbox, messages: Sequence[Message]) -> bool:
        data = self._encoded(messages)
        try:
            self._socket.sendto(data, str(self._path(process)))
        except BlockingIOError:
            return False
        except OSError:  # it is not there yet, or no more
            outbox.dropped += len(messages) + len(outbox.take())
            outbox.is_behind = True
            return False
        self.sent += 1
        return True

    def _encoded(self, messages: Sequence[Message]) -> bytes:
        return encode_batch(Batch(self._process, list(messages)))

    def _tell(self) -> None:
        self._tell_timer = self._loop.call_later(TELL_EVERY_S, self._tell)
        self._messages += self._open_numbers()
        self._flush()
        self._tell_those_behind()

    def _tell_those_behind(self) -> None:
        behind = {process: outbox for process, outbox in self._peers.items() if outbox.is_behind}
        if not behind:
            return
        packed = list(_datagrams(self._what_is_open()))
        for process, outbox in behind.items():
            outbox.is_behind = False
            self._send(process, outbox, packed)

    def _path(self, process: int) -> Path:
        return self._folder / f"{process}.sock"

    # --- listening

    def catch_up(self) -> None:
        """Take in what has arrived. Of many datagrams the rest follows by itself."""
        self._take_turn()

    def _take_turn(self) -> None:
        for _ in range(_TURN):
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                _log.error("the bus cannot be read: %s", error.strerror)
                return
            try:
                self._hear(decode_batch(self._buffer[:size]))
            except msgspec.MsgspecError:
                _log.error("what came over the bus cannot be read")
            except Exception:  # one bad message must not end what all others rely on
                _log.exception("what came over the bus failed")


def _cut(message: Message) -> Message:
    if isinstance(message, Begun) and len(message.names) > _MAX_NAMES:
        return msgspec.structs.replace(message, names=message.names[:_MAX_NAMES])
    return message


def _datagrams(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """The same in order, in parts that fit."""
    part: list[Message] = []
    size = 64
    for message in messages:
        more = size_of(message)
        if part and size + more > MAX_DATAGRAM_BYTES:
            yield part
            part, size = [], 64
        part.append(message)
        size += more
    if part:
        yield part
