"""Programs as child processes: started with a log, watched, measured with all their children, and always ended.

Each gets a session of its own, so that what it starts can be ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Process", "SystemFailure", "Usage", "running_process"]

_STOP_S: Final = 10.0
_LOG_TAIL: Final = 2000


class SystemFailure(Exception):
    """A process did not start, or ended too early."""


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_s: float
    waited_s: float
    """For a core, while it had something to do: what others take away from it."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s + other.cpu_s, self.waited_s + other.waited_s)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s - other.cpu_s, self.waited_s - other.waited_s)


class Process:
    """A running program; made by `running_process`."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], log: Path) -> None:
        self._start = start
        self._popen = start()
        self._log = log

    @property
    def pid(self) -> int:
        return self._popen.pid

    def check(self) -> None:
        """Raises SystemFailure if it has ended."""
        code = self._popen.poll()
        if code is not None:
            raise self.failure(f"ended early with {code}")

    def failure(self, what: str) -> SystemFailure:
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        return SystemFailure(f"{Path(str(self._popen.args[0])).name} {what}; the end of its log:\n{tail}")  # type: ignore[index]

    def usage(self) -> Usage:
        """Of it and all its descendants that live."""
        running = waiting = 0
        todo = [self.pid]
        while todo:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for task in Path(f"/proc/{todo.pop()}/task").iterdir():
                    ran, waited, _ = map(int, (task / "schedstat").read_text().split())
                    running, waiting = running + ran, waiting + waited
                    todo += map(int, (task / "children").read_text().split())
        return Usage(running / 1e9, waiting / 1e9)

    def memory_mb(self) -> float:
        """Resident, of it alone."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def kill(self) -> None:
        """As a crash would end it: at once, with what it has started, and without a word."""
        os.killpg(self.pid, signal.SIGKILL)  # the session that we made for it
        self._popen.wait()

    def start_again(self) -> None:
        """One that has ended, in the same way. Raises SystemFailure."""
        with _signals_wait():
            self._popen = self._start()

    def stop(self) -> None:
        """Ask it to end, then make it, and whatever it has left behind."""
        self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            self.kill()


@contextlib.contextmanager
def running_process(args: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """Raises SystemFailure if it cannot be started. Its output goes to the end of `log`."""

    def start() -> subprocess.Popen[bytes]:
        try:
            with log.open("ab") as output:
                return subprocess.Popen(
                    args,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
        except OSError as error:
            raise SystemFailure(f"cannot start {args[0]}: {error.strerror}") from error

    process: Process | None = None
    try:
        with _signals_wait():
            process = Process(start, log)
        yield process
    finally:
        if process is not None:
            process.stop()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Until the end of the block: a handler that raises in the middle of a start would leave a program that nobody ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    usual = {
        number: signal.signal(number, lambda got, _: came.append(got)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for got in came:
            signal.raise_signal(got)
