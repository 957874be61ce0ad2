"""A simulated fleet and a gateway in front of it, as two processes started by their command lines and watched over HTTP.

The processes end with the block that started them, whatever happens in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

__all__ = ["Knowledge", "System", "SystemFailure", "running_system"]

Knowledge = Literal["exact", "plain"]
"""exact: own workers with events. plain: the same workers taken for servers that speak OpenAI and tell nothing."""

MODEL: Final = "simulated"
_START_S: Final = 30.0
_STOP_S: Final = 10.0
_KV_BYTES_PER_TOKEN: Final = 128 << 10
"""What `--kv-memory` counts for a simulated token."""

_FIXED_S: Final = 0.02
_RUNNING_S: Final = 0.002
_W_PER_WAIT_S: Final = 8.0
_SATURATED_S: Final = 18.0
"""The gateway's defaults, in seconds of the world that it serves: a world that runs faster has shorter ones."""


class SystemFailure(Exception):
    """The system did not start, or ended too early."""


@dataclass(frozen=True, slots=True)
class System:
    port: int
    replica_ports: tuple[int, ...]
    gateway_pid: int
    fleet_pid: int

    def gateway_cpu_s(self) -> float:
        return _cpu_s(self.gateway_pid)

    def fleet_cpu_s(self) -> float:
        return _cpu_s(self.fleet_pid)

    def computed_tokens(self) -> list[int]:
        """Prompt tokens that each replica had to compute since its start."""
        return [_computed_tokens(port) for port in self.replica_ports]


@contextlib.contextmanager
def running_system(
    policy: str,
    *,
    knowledge: Knowledge,
    replicas: int,
    speedup: float,
    kv_tokens: int,
    tokens_per_chunk: int,
    port: int,
) -> Iterator[System]:
    """A gateway on `port`, its admin API on the next one, replicas on those after it."""
    admin_key = f"wpa-bench-{secrets.token_urlsafe(24)}"
    join_token = f"wpj-fleet-{secrets.token_urlsafe(24)}"
    replica_ports = tuple(range(port + 2, port + 2 + replicas))
    fleet = [
        *("workers", "simulated", "--replicas", str(replicas), "--port", str(replica_ports[0])),
        *("--speedup", str(speedup), "--kv-memory", str(kv_tokens * _KV_BYTES_PER_TOKEN)),
        *("--tokens-per-chunk", str(tokens_per_chunk), "--grace", "0"),
    ]
    gateway = ["gateway", "serve", "--open", "--port", str(port), "--admin-port", str(port + 1), "--policy", policy]
    if knowledge == "exact":
        fleet += ["--gateway", f"http://127.0.0.1:{port + 1}", "--join-token", join_token, "--replica-id", "r"]
    else:
        gateway += ["--replicas", ",".join(f"http://127.0.0.1:{each}" for each in replica_ports)]
    environment = {
        "WARMPATH_ADMIN__KEY": admin_key,
        "WARMPATH_ADMIN__JOIN_TOKEN": join_token,
        "WARMPATH_REGISTRY__PORTS": f'["{replica_ports[0]}-{replica_ports[-1]}"]',
        "WARMPATH_ROUTING__FIXED_S": str(_FIXED_S / speedup),
        "WARMPATH_ROUTING__RUNNING_S": str(_RUNNING_S / speedup),
        "WARMPATH_ROUTING__W_PER_WAIT_S": str(_W_PER_WAIT_S * speedup),
        "WARMPATH_ROUTING__SATURATED_S": str(_SATURATED_S / speedup),
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet_process = stack.enter_context(_process(fleet, folder / "fleet.log", {}))
        gateway_process = stack.enter_context(
            _process([*gateway, "--state-dir", str(folder / "state")], folder / "gateway.log", environment)
        )
        _wait_ready(f"http://127.0.0.1:{port + 1}", admin_key, replicas, knowledge, [fleet_process, gateway_process])
        yield System(port, replica_ports, gateway_process.pid, fleet_process.pid)
        for process in (fleet_process, gateway_process):
            if process.poll() is not None:
                raise SystemFailure(f"{process.args!r} ended early with {process.returncode}")


@contextlib.contextmanager
def _process(args: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    module, *rest = args
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *rest],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        yield process
    except SystemFailure as error:
        raise SystemFailure(f"{error}\n{log.name}: {log.read_text()[-2000:]}") from error
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(
    admin_url: str, key: str, replicas: int, knowledge: Knowledge, processes: Sequence[subprocess.Popen[bytes]]
) -> None:
    deadline = time.monotonic() + _START_S
    with httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=2, trust_env=False) as http:
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in processes):
                raise SystemFailure("a process ended at its start")
            with contextlib.suppress(httpx.TransportError):
                answer = http.get(f"{admin_url}/admin/v1/replicas").raise_for_status().json()
                ready = [
                    each
                    for each in answer["replicas"]
                    if each["healthy"] and (knowledge == "plain" or each["trust"] == "exact")
                ]
                if len(ready) == replicas:
                    return
            time.sleep(0.1)
    raise SystemFailure(f"{replicas} replicas were not ready within {_START_S:g} s")


def _cpu_s(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _computed_tokens(port: int) -> int:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=10).raise_for_status().text
    counts = [
        sum(float(value) for value in re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE))
        for name in ("queries", "hits")
    ]
    return int(counts[0] - counts[1])
