"""Whether a replica can generate, judged by its engine's reports. Pure.

The engine reports after every step and at least twice a second when idle. So an idle engine that is silent for
`IDLE_LIMIT_S` has hung. One that computes is silent for as long as its step takes, and a prefill chunk on a slow machine
takes seconds: it gets `STEP_LIMIT_S`. An open socket says nothing: a dead engine behind a living HTTP process would
answer 200 for ever.
"""

from __future__ import annotations

from typing import Final

__all__ = ["find_fault"]

IDLE_LIMIT_S: Final = 2.0
STEP_LIMIT_S: Final = 60.0
"""Far above the slowest step seen, a prefill chunk on one busy core; it bounds how long a wedged kernel goes unnoticed."""


def find_fault(*, alive: bool, busy: bool, silent_s: float) -> str | None:
    """Why the replica is unhealthy, for people; None when it is well."""
    if not alive:
        return "the engine has ended"
    if silent_s > (STEP_LIMIT_S if busy else IDLE_LIMIT_S):
        return f"the engine has not reported for {silent_s:.1f} s"
    return None
