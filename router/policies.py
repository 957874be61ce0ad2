"""A policy is a function: the replicas that may take a prompt → the one that shall, and why.

`cost` is ours; the others are baselines to compare with. A policy sees seconds and tokens only, never replicas, so it cannot
depend on anything that `/explain` does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from router.settings import PolicyName
from router.trust import Trust

__all__ = ["POLICIES", "Candidate", "Policy", "Turn"]


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One replica as a choice for one prompt."""

    replica: str
    eligible: bool
    why_not: str
    matched_tokens: int
    uncached_tokens: int
    wait_s: float
    own_s: float
    cost_s: float
    """(wait + w · own) ÷ weight."""
    trust: Trust


@dataclass(frozen=True, slots=True)
class Turn:
    """What a choice may depend on beside the candidates."""

    draw: float
    """Random, in [0, 1)."""
    number: int
    """How many prompts were sent before this one."""
    tie_ratio: float


Policy = Callable[[Sequence[Candidate], Turn], tuple[Candidate, str]]


def cost(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    """Least seconds. Among equals the longest match, which is less work for the fleet, then the least wait, then at random."""
    limit = min([candidate.cost_s for candidate in candidates]) * (1 + turn.tie_ratio)
    near = [candidate for candidate in candidates if candidate.cost_s <= limit]
    longest = max([candidate.matched_tokens for candidate in near])
    near = [candidate for candidate in near if candidate.matched_tokens == longest]
    least_wait = min([candidate.wait_s for candidate in near])
    best = [candidate for candidate in near if candidate.wait_s == least_wait]
    chosen = best[int(turn.draw * len(best))]
    if len(candidates) == 1:
        return chosen, "only_replica"
    longest_of_all = max([candidate.matched_tokens for candidate in candidates])
    if not longest_of_all:
        return chosen, "no_prefix"
    return chosen, "longest_prefix" if longest == longest_of_all else "prefix_busy"


def round_robin(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    return candidates[turn.number % len(candidates)], "round_robin"


def random(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    return candidates[int(turn.draw * len(candidates))], "random"


POLICIES: Final[dict[PolicyName, Policy]] = {"cost": cost, "round_robin": round_robin, "random": random}
