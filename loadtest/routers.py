"""A gateway of ours over stub replicas, as processes, and how a bench finds out that they serve."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from loadtest.processes import Process, running_process
from loadtest.stub import MODEL

__all__ = ["UNOBSERVED", "Metrics", "Router", "start_ours", "start_stubs", "total", "wait_answering", "wait_serving"]

UNOBSERVED: Final[Mapping[str, str]] = {
    "WARMPATH_LOG__ACCESS": "off",
    "WARMPATH_TELEMETRY__METRICS": "false",
    "WARMPATH_TRACING__EXPORTER": "none",
}
"""A gateway's environment without metrics, traces and access log."""

_START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Router:
    name: str
    port: int
    process: Process
    key: str = ""
    admin_port: int = 0
    """Of ours, as the next one; others have none."""
    admin_key: str = ""

    def peak_mb(self) -> float:
        """The most memory that it has had since `forget_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


class Metrics:
    """What a gateway of ours says of itself: every sample of /metrics by its whole name, labels included."""

    def __init__(self, router: Router) -> None:
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{router.admin_port}",
            headers={"authorization": f"Bearer {router.admin_key}"},
            timeout=30,
            trust_env=False,
            verify=False,
        )

    def read(self) -> dict[str, float]:
        lines = self._client.get("/metrics").raise_for_status().text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def close(self) -> None:
        self._client.close()


def total(metrics: Mapping[str, float], name: str) -> float:
    """The sum over all labels."""
    return sum(value for each, value in metrics.items() if each.partition("{")[0] == name)


def start_stubs(
    stack: contextlib.ExitStack, folder: Path, port: int, replicas: int, options: Sequence[str]
) -> list[str]:
    """The URLs of that many stub replicas in one process (`loadtest.stub`), at `port` and after."""
    ports = range(port, port + replicas)
    command = [sys.executable, "-m", "loadtest.stub", "--ports", ",".join(map(str, ports)), *options]
    stub = stack.enter_context(running_process(command, folder / "stub.log"))
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    wait_serving(f"{urls[0]}/v1/models", stub, {})
    return urls


def start_ours(
    stack: contextlib.ExitStack,
    folder: Path,
    urls: Sequence[str],
    port: int,
    settings: Mapping[str, str] | None = None,
    *,
    name: str = "warmpath",
) -> Router:
    """With keys, a limit so high that it is only counted, an access log and traces. Its admin listener is at the next port.

    `settings`: variables of its environment, over those.
    """
    admin_key = f"wpa-bench-{secrets.token_urlsafe(24)}"
    command = [sys.executable, "-m", "gateway", "serve", "--port", str(port), "--admin-port", str(port + 1)]
    command += ["--replicas", ",".join(urls), "--state-dir", str(folder / f"{name}-state")]
    environment = {
        "WARMPATH_ADMIN__KEY": admin_key,
        "WARMPATH_LOG__ACCESS": str(folder / "access.log"),
        "WARMPATH_TRACING__EXPORTER": "otlp",
        "WARMPATH_TRACING__ENDPOINT": f"{urls[0]}/v1/traces",  # a stub answers any POST
        **(settings or {}),
    }
    process = stack.enter_context(running_process(command, folder / f"{name}.log", environment))
    admin, headers = f"http://127.0.0.1:{port + 1}/admin/v1", {"authorization": f"Bearer {admin_key}"}
    wait_serving(f"{admin}/replicas", process, headers)
    asked = {"kind": "client", "name": "bench", "limits": {"requests_per_minute": 1_000_000}}
    answer = httpx.post(f"{admin}/keys", json=asked, headers=headers, trust_env=False).raise_for_status().json()
    return Router(name, port, process, answer["key"], port + 1, admin_key)


def wait_serving(url: str, process: Process, headers: dict[str, str]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        process.check()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, headers=headers, timeout=2, trust_env=False).is_success:
                return
        time.sleep(0.1)
    raise process.failure(f"is not ready within {_START_S:g} s")


def wait_answering(router: Router) -> None:
    deadline = time.monotonic() + _START_S
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    headers = {"authorization": f"Bearer {router.key}"} if router.key else {}
    url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
    while time.monotonic() < deadline:
        router.process.check()
        with contextlib.suppress(httpx.TransportError):
            if httpx.post(url, json=body, headers=headers, timeout=2, trust_env=False).is_success:
                return
        time.sleep(0.1)
    raise router.process.failure(f"answers nothing within {_START_S:g} s")
