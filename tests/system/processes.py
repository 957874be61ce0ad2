"""Whole systems as a user starts them: the `warmpath` command in processes of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

WARMPATH = str(Path(sys.executable).with_name("warmpath"))


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now; below the kernel's own range, so that no connection takes one meanwhile.

    Test processes that run side by side look in different hundreds, since a port is only taken when its server has started.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in range(20000 + os.getpid() % 100 * 100, 32000):
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)


@dataclass
class Up:
    """A running `warmpath up`."""

    process: subprocess.Popen[str]
    folder: Path
    base_url: str
    api_key: str
    admin_url: str
    admin_key: str
    start_cpu_s: float
    """CPU time that it took, of all its processes."""

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0, timeout=60)

    @property
    def model(self) -> str:
        with self.client as client:
            return next(iter(client.models.list())).id

    def admin(self, method: str, path: str, **options: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        return httpx.request(method, f"{self.admin_url}/admin/v1{path}", headers=headers, **options)  # type: ignore[arg-type]

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Another `warmpath` command in the same folder."""
        return subprocess.run([WARMPATH, *args], cwd=self.folder, capture_output=True, text=True, timeout=240)


def start_up(folder: Path, *args: str) -> Up:
    """Start `warmpath up` in `folder` and wait for its ready line."""
    port, admin_port = map(str, free_ports(2))
    ports = ("--port", port, "--admin-port", admin_port)
    process = subprocess.Popen(
        [WARMPATH, "up", *ports, *args], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    ready = dict(re.findall(r"(\w+)=(\S+)", line))
    if not line.startswith("ready: "):
        process.kill()
        _, stderr = process.communicate()
        raise AssertionError(f"not ready: {line!r} {stderr}")
    return Up(process, folder, **ready, start_cpu_s=cpu_s(process.pid))


def interrupt(up: Up) -> float:
    """Ctrl-C; how long the end took, in seconds."""
    began = time.monotonic()
    up.process.send_signal(signal.SIGINT)
    try:
        up.process.communicate(timeout=30)
    finally:
        up.process.kill()
    return time.monotonic() - began


@contextlib.contextmanager
def running_up(folder: Path, *args: str) -> Iterator[Up]:
    up = start_up(folder, *args)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            interrupt(up)


def processes_of(up: Up) -> set[int]:
    """Ids of the processes that `up` started, their children included."""
    return descendants(up.process.pid)


def cpu_s(pid: int) -> float:
    """CPU time of a process and of all that it has started, in seconds."""
    ticks = 0
    for each in {pid, *descendants(pid)}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and that of children that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found |= set(map(int, children))
            todo += map(int, children)
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _has_huge_pages() -> bool:
    """Whether `gateway.memory.lay_out_heap` gets them at once: Linux 6.1, and not forbidden."""
    with contextlib.suppress(OSError):
        major, minor = map(int, re.findall(r"\d+", os.uname().release)[:2])
        return (major, minor) >= (6, 1) and "[never]" not in Path(
            "/sys/kernel/mm/transparent_hugepage/enabled"
        ).read_text()
    return False


HAS_HUGE_PAGES = _has_huge_pages()


def huge_kb(pid: int) -> int:
    """Of its memory, on huge pages."""
    return int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("AnonHugePages:")[2].split()[0])
