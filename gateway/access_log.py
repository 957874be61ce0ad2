"""One JSON line for each request of the data path: who, what, where to, how long, how it ended.

Never in it: prompts, answers, keys (only their id), headers, queries, paths of the client's. Everything in a line comes from
our own sets and ids or is checked where it came in, and is JSON, so that no value can end a line or hide one.

What must hold: a request never waits for its line, and never fails for it. Lines go into a bounded buffer that a thread
empties; a disk that is full or a pipe that nobody reads costs lines, which are counted.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec

from gateway.job import Record

__all__ = ["AccessLog", "LineWriter", "open_access_log"]

_MAX_WAITING: Final = 8192
"""Lines; 4 MB. At 2,000 requests a second a disk may stall for 4 s before any is lost."""
_EVERY_S: Final = 0.1
"""How late a line may be, beside what `gateway.endings` waits. To wake the thread for each one costs a request more than all
the rest of its line: both want the interpreter at the same time."""
_MANY: Final = 1024
"""So many that wait are written at once, and no more of them are taken out of the buffer at a time."""
_PIPE_BYTES: Final = 4096
"""A pipe takes so much whole or not at all, so that several processes may write to the same one."""
_FILE_BYTES: Final = 64 << 10
"""A file is appended to whole, whatever the size."""
_CLOSE_S: Final = 2.0


class _Line(msgspec.Struct, omit_defaults=True):
    """In the order in which people read it. What is not known is left out."""

    time: str
    request_id: str
    status: int
    endpoint: str
    duration_s: float
    method: str = "POST"
    model: str = ""
    stream: bool = False
    key_id: str = ""
    tenant: str = ""
    error_code: str = ""
    replica: str = ""
    policy: str = ""
    reason: str = ""
    tries: int = 0
    queue_wait_s: float | None = None
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    completion_tokens: int | None = None
    client_retries: int = 0
    trace_id: str = ""


class AccessLog:
    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._encode = msgspec.json.Encoder().encode
        self._second = 0
        self._prefix = ""

    def finished(self, record: Record, ended_at: float) -> None:
        """Write the line of a request that ended. 2 us. `ended_at`: Unix seconds."""
        decision, usage = record.decision, record.usage
        replica = policy = reason = ""
        predicted = prompt_tokens = cached_tokens = completion_tokens = None
        if decision is not None:
            replica, policy, reason = decision.replica_id, decision.policy, decision.reason
            predicted = decision.matched_tokens
        if usage is not None:
            prompt_tokens, completion_tokens = usage.prompt_tokens, usage.completion_tokens
            cached_tokens = usage.cached_tokens
        line = _Line(  # by place: names would cost as much again
            self._time(ended_at),
            record.request_id,
            record.status,
            record.endpoint,
            round(record.duration_s, 6),
            record.method,
            record.model,
            record.stream,
            record.key_id,
            record.tenant,
            record.error_code,
            replica,
            policy,
            reason,
            record.tries,
            round(record.queued_s, 6) if record.queued_s else None,
            round(record.first_byte_s, 6) if record.first_byte_s is not None else None,
            prompt_tokens,
            cached_tokens,
            predicted,
            completion_tokens,
            record.client_retries,
            record.trace.trace_id,
        )
        self._writer.write(self._encode(line) + b"\n")

    @property
    def num_dropped(self) -> int:
        return self._writer.num_dropped

    def close(self) -> None:
        self._writer.close()

    def _time(self, moment: float) -> str:
        """UTC, with milliseconds. Most lines share their second with the one before."""
        second = int(moment)
        if second != self._second:
            self._second, self._prefix = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._prefix}.{int((moment - second) * 1000):03d}Z"


def open_access_log(where: str) -> AccessLog | None:
    """`where`: stdout, stderr, a file's path, or off. Raises OSError for a file that cannot be opened."""
    match where:
        case "off":
            return None
        case "stdout":
            return AccessLog(LineWriter(1))
        case "stderr":
            return AccessLog(LineWriter(2))
        case path:
            return AccessLog(LineWriter(Path(path)))


class LineWriter:
    """Lines to a file or descriptor, by a thread of its own."""

    def __init__(self, target: Path | int) -> None:
        """`target`: a file to append to, or an open descriptor. Raises OSError for a file that cannot be opened."""
        self._num_overflowed = 0
        self._num_failed = 0
        self._path = target if isinstance(target, Path) else None
        self._fd = target if isinstance(target, int) else _open(target)
        self._write_bytes = _FILE_BYTES if stat.S_ISREG(os.fstat(self._fd).st_mode) else _PIPE_BYTES
        self._waiting: deque[bytes] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Lines that were lost: the buffer was full, or writing failed."""
        return self._num_overflowed + self._num_failed

    def write(self, line: bytes) -> None:
        """Never waits, never raises. Called by one thread."""
        if len(self._waiting) >= _MAX_WAITING:
            self._num_overflowed += 1
            return
        self._waiting.append(line)
        if len(self._waiting) == _MANY:
            self._wake.set()

    def close(self) -> None:
        """Write what waits, at most for `_CLOSE_S`. A pipe that nobody reads keeps its thread, which ends with the process."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._path is not None and not self._thread.is_alive():
            os.close(self._fd)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(_EVERY_S)
            self._wake.clear()
            closing = self._closing  # read before the lines are taken: those of before the close are among them
            if self._waiting:
                self._write_waiting()

    def _write_waiting(self) -> None:
        with contextlib.suppress(OSError):  # writing will tell
            self._reopen_if_moved()
        waiting = self._waiting
        while waiting:
            lines = [waiting.popleft() for _ in range(min(len(waiting), _MANY))]
            for piece in _pieces(lines, self._write_bytes):
                try:
                    _write_all(self._fd, b"".join(piece))
                except OSError:
                    self._num_failed += len(piece)

    def _reopen_if_moved(self) -> None:
        """Log rotation renames the file; the next lines belong into a new one of its name."""
        if self._path is None:
            return
        here = os.fstat(self._fd)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev):
            moved, self._fd = self._fd, _open(self._path)
            os.close(moved)


def _pieces(lines: Sequence[bytes], most_bytes: int) -> Iterator[Sequence[bytes]]:
    """The same in order, in groups of so many bytes at most; a longer line is one by itself."""
    ends = list(accumulate(map(len, lines)))
    first, before = 0, 0
    while first < len(lines):
        last = max(bisect_right(ends, before + most_bytes, first), first + 1)
        yield lines[first:last]
        first, before = last, ends[last - 1]


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
