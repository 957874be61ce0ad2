"""A simulated fleet and a router in front of it, as processes started by their command lines and watched over HTTP.

The processes end with the block that started them, whatever happens in it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from loadtest.arms import Arm, Ours, Peer
from loadtest.processes import Process, Usage, running_process

__all__ = ["MAX_GATEWAYS", "MODEL", "NUM_PORTS", "ORDERS", "FleetShape", "Order", "System", "running_system"]

MODEL: Final = "simulated"

NUM_PORTS: Final = 4
"""In front of the replicas': clients', admin API, and the same of a second gateway; a peer may use the third."""
MAX_GATEWAYS: Final = NUM_PORTS // 2

Order = Literal["asked", "arrival", "short-first"]
"""In which replicas compute prompts. asked: as the router asks for, and as they came where it does not, as no other one does.
arrival: as they came; ours knows it and asks for nothing. short-first: short ones first by themselves, whoever sends them.
"""
ORDERS: Final[Mapping[Order, Sequence[str]]] = {
    "asked": ("--scheduling-policy", "priority"),
    "arrival": (),
    "short-first": ("--patience", "1"),
}
"""With the options of replicas."""

_START_S: Final = 30.0
_POLL_S: Final = 0.1
_KV_BYTES_PER_TOKEN: Final = 128 << 10
"""What `--kv-memory` counts for a simulated token."""

_PREFILL_TOK_S: Final = 8000.0
_FIXED_S: Final = 0.02
_RUNNING_S: Final = 0.002
_W_PER_WAIT_S: Final = 8.0
_SATURATED_S: Final = 18.0
_AWAY_S: Final = 0.6
_MAX_WAIT_S: Final = 2.0
_AHEAD_S: Final = 0.2
"""The gateway's defaults, in seconds of the world that it serves: a world that runs faster has shorter ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    replicas: int
    processes: int
    """Replicas are spread over so many: what one computes holds up those that share its process."""
    speedup: float
    kv_tokens: int
    tokens_per_chunk: int
    order: Order = "asked"


@dataclass(frozen=True, slots=True)
class System:
    ports: tuple[int, ...]
    """Of clients; more than one where there are several gateways."""
    replica_ports: tuple[int, ...]
    routers: tuple[Process, ...]
    fleet: tuple[Process, ...]
    admin_key: str = ""
    """Of our gateways, whose admin listeners are at the ports after those of clients."""
    credential: str = ""
    """Of the replicas behind them."""

    def usage(self) -> tuple[Usage, Usage]:
        """Of the routers and of the fleet."""
        return _sum(self.routers), _sum(self.fleet)

    def check(self) -> None:
        for process in (*self.routers, *self.fleet):
            process.check()


def _sum(processes: Sequence[Process]) -> Usage:
    return sum((process.usage() for process in processes), Usage(0.0, 0.0))


@contextlib.contextmanager
def running_system(arm: Arm, shape: FleetShape, port: int, *, holds: Path | None = None) -> Iterator[System]:
    """The router on `port`, the replicas `NUM_PORTS` above it. Raises SystemFailure.

    `holds`: a file where gateways of ours write how long they hold their event loops (`loadtest.holds`).
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        if isinstance(arm, Peer):
            system = _start_peer(stack, folder, arm, shape, port)
        else:
            system = _start_ours(stack, folder, arm, shape, port, holds)
        yield system
        system.check()


def _start_ours(
    stack: contextlib.ExitStack, folder: Path, arm: Ours, shape: FleetShape, port: int, holds: Path | None
) -> System:
    ports = _replica_ports(shape, port)
    admin_key = f"wpa-bench-{secrets.token_urlsafe(24)}"
    join_token = f"wpj-fleet-{secrets.token_urlsafe(24)}"
    client_ports = [port + 2 * number for number in range(arm.gateways)]
    joining: list[str] = []
    if arm.knowledge == "exact":
        joining = [word for each in client_ports for word in ("--gateway", f"http://127.0.0.1:{each + 1}")]
        joining += ["--join-token", join_token]
    speedup = shape.speedup
    environment = {
        "WARMPATH_ADMIN__KEY": admin_key,
        "WARMPATH_ADMIN__JOIN_TOKEN": join_token,
        "WARMPATH_REGISTRY__PORTS": f'["{ports[0]}-{ports[-1]}"]',
        "WARMPATH_ROUTING__PREFILL_TOK_S": str(_PREFILL_TOK_S * speedup),
        "WARMPATH_ROUTING__FIXED_S": str(_FIXED_S / speedup),
        "WARMPATH_ROUTING__RUNNING_S": str(_RUNNING_S / speedup),
        "WARMPATH_ROUTING__W_PER_WAIT_S": str(_W_PER_WAIT_S * speedup),
        "WARMPATH_ROUTING__SATURATED_S": str(_SATURATED_S / speedup),
        # The other policies stand for routers that ask for no order.
        "WARMPATH_ROUTING__PATIENCE": "0" if shape.order == "arrival" or arm.policy != "cost" else "1",
        "WARMPATH_ROUTING__GATEWAYS": str(arm.gateways),
        "WARMPATH_ROUTING__AWAY_S": str(_AWAY_S / speedup),
        "WARMPATH_ADMISSION__MAX_WAIT_S": str(_MAX_WAIT_S / speedup),
        "WARMPATH_ADMISSION__AHEAD_S": str(_AHEAD_S / speedup),
    }
    if arm.knowledge == "plain":
        found = [{"url": url, "priority": shape.order == "asked"} for url in _urls(ports)]
        environment["WARMPATH_REPLICAS"] = json.dumps(found)
    if arm.gateways > 1:  # or what one has sent would be of no use to the other
        environment["WARMPATH_KEYS__FLEET_SECRET"] = secrets.token_hex(32)
    credential = secrets.token_urlsafe(24)
    fleet = _start_fleet(stack, folder, shape, ports, joining, {"WARMPATH_CREDENTIAL": credential})
    routers = tuple(
        stack.enter_context(
            running_process(
                _gateway_command(arm, each, folder / f"state-{each}", holds),
                folder / f"router-{each}.log",
                {**environment, "WARMPATH_ROUTING__GATEWAY": str(number)},
            )
        )
        for number, each in enumerate(client_ports, 1)
    )
    trusts = {"exact"} if arm.knowledge == "exact" else {"learning", "blind", "exact"}
    with httpx.Client(headers={"authorization": f"Bearer {admin_key}"}, timeout=2, trust_env=False) as http:

        def ready() -> bool:
            return all(is_ready(f"http://127.0.0.1:{each + 1}") for each in client_ports)

        def is_ready(admin_url: str) -> bool:
            answer = http.get(f"{admin_url}/admin/v1/replicas").raise_for_status().json()
            usable = [each for each in answer["replicas"] if each["healthy"] and each["trust"] in trusts]
            return len(usable) == shape.replicas and http.get(f"{admin_url}/ready").is_success

        _wait(ready, (*routers, *fleet), f"does not see {shape.replicas} replicas that are ready")
    return System(tuple(client_ports), ports, routers, fleet, admin_key, credential)


def _gateway_command(arm: Ours, port: int, state: Path, holds: Path | None) -> list[str]:
    program = ["gateway"] if holds is None else ["loadtest.holds", str(holds), "gateway"]
    command = [sys.executable, "-m", *program, "serve", "--open", "--port", str(port), "--admin-port", str(port + 1)]
    return [*command, "--policy", arm.policy, "--state-dir", str(state), "--processes", str(arm.processes)]


def _start_peer(stack: contextlib.ExitStack, folder: Path, arm: Peer, shape: FleetShape, port: int) -> System:
    """Peers look at their workers when they start, and some only every 30 s again: so the fleet comes first."""
    ports = _replica_ports(shape, port)
    fleet = _start_fleet(stack, folder, shape, ports, [], {})
    with httpx.Client(timeout=2, trust_env=False) as http:

        def fleet_ready() -> bool:
            return all(http.get(f"{url}/health").is_success for url in _urls(ports))

        def router_ready() -> bool:
            body = {"model": MODEL, "prompt": "ready?", "max_tokens": 1}
            return http.post(f"http://127.0.0.1:{port}/v1/completions", json=body).is_success

        _wait(fleet_ready, fleet, "is not healthy")
        command = arm.command(port, port + 2, _urls(ports))
        router = stack.enter_context(running_process(command, folder / "router.log"))
        _wait(router_ready, (router, *fleet), "answers no completion")
    return System((port,), ports, (router,), fleet)


def _start_fleet(
    stack: contextlib.ExitStack,
    folder: Path,
    shape: FleetShape,
    ports: Sequence[int],
    joining: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[Process, ...]:
    processes = []
    for number in range(shape.processes):
        mine = ports[shape.replicas * number // shape.processes : shape.replicas * (number + 1) // shape.processes]
        command = [
            *(sys.executable, "-m", "workers", "simulated", "--replicas", str(len(mine)), "--port", str(mine[0])),
            *("--speedup", str(shape.speedup), "--kv-memory", str(shape.kv_tokens * _KV_BYTES_PER_TOKEN)),
            *("--tokens-per-chunk", str(shape.tokens_per_chunk), "--grace", "0"),
            *ORDERS[shape.order],
            *joining,
        ]
        if joining:
            command += ["--replica-id", f"r{number}"]
        processes.append(stack.enter_context(running_process(command, folder / f"fleet-{number}.log", environment)))
    return tuple(processes)


def _replica_ports(shape: FleetShape, port: int) -> tuple[int, ...]:
    return tuple(range(port + NUM_PORTS, port + NUM_PORTS + shape.replicas))


def _urls(ports: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


def _wait(condition: Callable[[], bool], processes: Sequence[Process], what: str) -> None:
    """Until it holds; a refused connection means not yet. `what`: the first process's fault if it never does."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        for process in processes:
            process.check()
        with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
            if condition():
                return
        time.sleep(_POLL_S)
    raise processes[0].failure(f"{what} within {_START_S:g} s")
