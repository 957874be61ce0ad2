"""A policy is a function: the replicas that may take a prompt → the one that shall, and why.

`cost` is ours; the others are the published ones, to compare with: what each of them does wrong is in docs/routing.md. A policy
sees seconds, tokens and counts only, never replicas, so it cannot depend on anything that `/explain` does not show. Those that
match prefixes are given our exact match, which is more than their originals have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import xxhash

from router.settings import PolicyName
from router.trust import Trust

__all__ = ["KEY_TOKENS", "POLICIES", "Candidate", "Policy", "Turn"]

KEY_TOKENS: Final = 1024
"""Prompts that agree in so many first tokens are one conversation to `consistent_hash`: more than most system prompts have."""

_MOST_OVER_MEAN: Final = 1.25
"""Of `consistent_hash`: requests of one replica over the mean, as the paper on bounded loads and most proxies have it."""

_LEAST_MATCHED: Final = 0.5
_IMBALANCE: Final = 32
_IMBALANCE_RATIO: Final = 1.1
"""Of `prefix`: SGLang's router's defaults. A share of the prompt, requests, and most over fewest requests."""

_STICKY_MATCHED: Final = 0.8
"""Of `sticky_until_saturated`: llm-d's default."""


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
    """(wait + away + (w + delayed) · own) ÷ weight."""
    trust: Trust
    inflight: int
    """Requests sent there that have not ended."""
    away_s: float = 0.0
    """What its being another gateway's first choice counts against it."""
    delayed: int = 0
    """Prompts sent there before that would be computed after this one."""


class Turn(msgspec.Struct, frozen=True):
    """What a choice may depend on beside the candidates."""

    draw: float
    """Random, in [0, 1)."""
    number: int
    """How many prompts were sent before this one."""
    tie_ratio: float
    key: int
    """The same for all prompts of a conversation."""
    saturated_s: float


Policy = Callable[[Sequence[Candidate], Turn], tuple[Candidate, str]]


def cost(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    """Least seconds. Among equals the longest match, which is less work for the fleet, then the least wait, then at random."""
    if len(candidates) == 1:
        return candidates[0], "only_replica"
    limit = min([candidate.cost_s for candidate in candidates]) * (1 + turn.tie_ratio)
    best: list[Candidate] = []
    longest = longest_of_all = 0
    least_wait = math.inf
    for candidate in candidates:
        matched = candidate.matched_tokens
        if matched > longest_of_all:
            longest_of_all = matched
        if candidate.cost_s > limit or matched < longest:
            continue
        wait = candidate.wait_s + candidate.away_s
        if matched == longest and wait > least_wait:
            continue
        if matched > longest or wait < least_wait:
            best.clear()
            longest, least_wait = matched, wait
        best.append(candidate)
    chosen = best[int(turn.draw * len(best))]
    if not longest_of_all:
        return chosen, "no_prefix"
    return chosen, "longest_prefix" if longest == longest_of_all else "prefix_busy"


def round_robin(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    return candidates[turn.number % len(candidates)], "round_robin"


def random(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    return candidates[int(turn.draw * len(candidates))], "random"


def least_load(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    """Fewest requests in flight, whatever they cost."""
    return _fewest_requests(candidates, turn), "least_load"


def power_of_two(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    """The one of two random replicas that has fewer requests in flight."""
    count = len(candidates)
    if count == 1:
        return candidates[0], "only_replica"
    first, second = divmod(int(turn.draw * count * (count - 1)), count - 1)
    pair = candidates[first], candidates[second + (second >= first)]
    return min(pair, key=lambda candidate: candidate.inflight), "power_of_two"


def consistent_hash(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    """A conversation's own order of replicas; the first of them whose load is within bounds."""
    ranked = sorted(
        candidates, key=lambda each: xxhash.xxh3_64_intdigest(each.replica.encode(), turn.key), reverse=True
    )
    total = sum([candidate.inflight for candidate in candidates]) + 1
    most = math.ceil(_MOST_OVER_MEAN * total / len(candidates))
    chosen = next(candidate for candidate in ranked if candidate.inflight < most)
    return chosen, "hashed" if chosen is ranked[0] else "hashed_next"


def prefix(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    """The longest match if it is most of the prompt and requests are spread evenly, else the fewest requests."""
    counts = [candidate.inflight for candidate in candidates]
    if max(counts) - min(counts) > _IMBALANCE and max(counts) > _IMBALANCE_RATIO * min(counts):
        return _fewest_requests(candidates, turn), "imbalance"
    longest = max([candidate.matched_tokens for candidate in candidates])
    matching = [candidate for candidate in candidates if candidate.matched_tokens == longest]
    if _matched_share(matching[0]) > _LEAST_MATCHED:
        return _fewest_requests(matching, turn), "longest_prefix"
    return _fewest_requests(candidates, turn), "no_prefix"


def sticky_until_saturated(candidates: Sequence[Candidate], turn: Turn) -> tuple[Candidate, str]:
    """The least wait among those that hold nearly all of the prompt, unless another one would answer that much sooner."""
    sticky = [candidate for candidate in candidates if _matched_share(candidate) >= _STICKY_MATCHED]
    if not sticky:
        return _least_wait(candidates, turn), "no_prefix"
    soonest = [min([each.wait_s + each.own_s for each in group]) for group in (sticky, candidates)]
    if soonest[0] - soonest[1] > turn.saturated_s:
        return _least_wait(candidates, turn), "prefix_busy"
    return _least_wait(sticky, turn), "longest_prefix"


def _matched_share(candidate: Candidate) -> float:
    return candidate.matched_tokens / max(candidate.matched_tokens + candidate.uncached_tokens, 1)


def _fewest_requests(candidates: Sequence[Candidate], turn: Turn) -> Candidate:
    fewest = min([candidate.inflight for candidate in candidates])
    best = [candidate for candidate in candidates if candidate.inflight == fewest]
    return best[int(turn.draw * len(best))]


def _least_wait(candidates: Sequence[Candidate], turn: Turn) -> Candidate:
    least = min([candidate.wait_s for candidate in candidates])
    best = [candidate for candidate in candidates if candidate.wait_s == least]
    return best[int(turn.draw * len(best))]


POLICIES: Final[dict[PolicyName, Policy]] = {
    "cost": cost,
    "round_robin": round_robin,
    "random": random,
    "least_load": least_load,
    "power_of_two": power_of_two,
    "consistent_hash": consistent_hash,
    "prefix": prefix,
    "sticky_until_saturated": sticky_until_saturated,
}
