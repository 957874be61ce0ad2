"""Whether a replica can generate, judged by its engine's reports. Pure.

The engine reports after every step and at least twice a second when idle. So an idle engine that is silent for
`IDLE_LIMIT_S` has hung. One that computes is silent for as long as its step takes, and says in advance how long one can take
(`workers.rates`): ten seconds on most machines. One whose last step failed says that too. When idle for long it tries a step of
its own. An open socket says nothing: a dead engine behind a living HTTP process would answer 200 for ever.
"""

from __future__ import annotations

from typing import Final

__all__ = ["IDLE_LIMIT_S", "find_fault"]

IDLE_LIMIT_S: Final = 2.0


def find_fault(*, alive: bool, busy: bool, silent_s: float, step_limit_s: float, failing: bool) -> str | None:
    """Why the replica is unhealthy, for people; None when it is well."""
    if not alive:
        return "the engine has ended"
    if silent_s > (step_limit_s if busy else IDLE_LIMIT_S):
        return f"the engine has not reported for {silent_s:.1f} s"
    if failing:
        return "the engine's last step failed"
    return None
