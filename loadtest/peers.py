"""Other routers that can be had from PyPI, each with its settings for this comparison. `make bench-peers` installs them.

Each runs as its makers ship it, then tuned, then with what it has for conversations, by the header x-session-id. Tuned: a
prompt stays with the replica that holds 0.8 of it, not 0.3. In virtual time that was the best of nine settings of their rule:
TTFT p90 on the trace 2,770 ms instead of 3,254, as good under the other loads. Leaving a replica sooner than they ship it (8 or
4 requests more than another, not 64) changed nothing on the trace and cost seconds with shared prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from loadtest.arms import Peer

__all__ = ["BEST", "PACKAGES", "PINNED", "known_peers"]

PACKAGES: Final = {"sglang-router": "0.3.2", "vllm-router": "0.1.17", "smg": "1.13.0"}

_TUNED: Final = "--cache-threshold 0.8"

_SETTINGS: Final = {
    "sglang-router": {
        "": "--policy cache_aware",
        "tuned": f"--policy cache_aware {_TUNED}",
        "power-of-two": "--policy power_of_two",
        "round-robin": "--policy round_robin",
    },
    "vllm-router": {
        "": "--policy cache_aware",
        "tuned": f"--policy cache_aware {_TUNED}",
        "pinned": "--policy consistent_hash",
    },
    "smg": {
        "": "--policy cache_aware",
        "tuned": f"--policy cache_aware {_TUNED}",
        "pinned": "--policy manual --assignment-mode min_load --routing-key-headers x-session-id",
    },
}

_COMMANDS: Final = {
    "sglang-router": "launch --host 127.0.0.1 --prometheus-host 127.0.0.1 --log-level warn",
    "vllm-router": "--host 127.0.0.1 --log-level warning",
    "smg": "launch --host 127.0.0.1 --prometheus-host 127.0.0.1 --log-level warn",
}

BEST: Final = ("sglang-router:tuned", "vllm-router:tuned", "smg:tuned", "smg:pinned")
"""The settings of each package that are best under some load."""

PINNED: Final = ("vllm-router:pinned", "smg:pinned", "consistent_hash")
"""Those that keep a conversation where it began."""


def known_peers(folder: Path) -> list[Peer]:
    """Those that are installed under `folder`, each in a virtual environment of its own name."""
    found = []
    for package, settings in _SETTINGS.items():
        program = folder / package / "bin" / package
        if not program.exists():
            continue
        places = "--port {port} --prometheus-port {spare_port}"
        for name, flags in settings.items():
            words = (
                str(program),
                *_COMMANDS[package].split(),
                *places.split(),
                *flags.split(),
                "--worker-urls",
                "{workers}",
            )
            found.append(Peer(f"{package}:{name}" if name else package, words))
    return found


if __name__ == "__main__":
    print("\n".join(f"{name} {version}" for name, version in PACKAGES.items()))
