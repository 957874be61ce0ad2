"""The knobs of routing, each with its unit and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

__all__ = ["PolicyName", "RoutingSettings"]

PolicyName = Literal[
    "cost",
    "round_robin",
    "random",
    "least_load",
    "power_of_two",
    "consistent_hash",
    "prefix",
    "sticky_until_saturated",
]

_MAY_BE_ZERO: Final = frozenset(
    {"fixed_s", "running_s", "w_per_wait_s", "tie_ratio", "learned_tokens", "saturated_s", "away_s", "patience"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    policy: PolicyName = "cost"
    prefill_tok_s: float = 8000.0
    """Prefill rate of a replica before anything is known of it or its peers: about an 8B model on one GPU."""
    fixed_s: float = 0.02
    """What a prompt costs even when all of it is cached, until it was learned of a replica that does not tell."""
    bytes_per_token: float = 4.0
    """Bytes of text a token stands for where tokens are unknown, until it was learned: English in current vocabularies."""
    running_s: float = 0.002
    """What each running decode adds to a new prompt's wait, at least. A step delays a prompt by less; the rest stands for
    what prefill and a fuller batch cost those who are being answered. With less, a nearly idle fleet sends everything to
    where the common system prompt is (docs/routing.md)."""
    w_per_wait_s: float = 8.0
    """How much w rises with each second that even the least busy replica would let a prompt wait. With 2 a fleet near
    saturation gave up too much of its cache (docs/routing.md); with 20 a half busy one waits for the cache too long."""
    max_w: float = 11.0
    patience: float = 1.0
    """For how long a prompt lets shorter ones pass: so many times what its own uncached tokens take. In the queue, and at
    replicas that compute in the order they are told. 0 is first come, first served; above 1 little is gained, and the longest
    wait longer (docs/routing.md)."""
    gateways: int = 1
    """How many gateways that hear nothing of each other send to the same replicas."""
    gateway: int = 1
    """Which of them this one is."""
    away_s: float = 0.6
    """How much sooner a prompt must begin at a replica that another gateway chooses first. It stands for what that one
    may have sent there a moment ago: with less, both send their parts of a burst to the same replicas (docs/routing.md)."""
    tie_ratio: float = 0.05
    """Costs this close to the least are equal: rates are measured, and their noise must not send every new prompt to the
    replica that happened to measure best."""
    saturated_s: float = 18.0
    """How much sooner another replica must answer before `sticky_until_saturated` leaves the cache: llm-d's default."""
    same_rate_within: float = 1.3
    """A measured prefill rate within this factor of its pool's mean counts as that mean."""
    optimistic_ttl_s: float = 3.0
    """How long a block that was sent to a replica with events counts without its event, once the prompt was answered."""
    learned_ttl_s: float = 600.0
    """How long a block that was sent to a replica without events counts."""
    learned_tokens: int = 1 << 20
    """KV tokens that a replica which does not tell is taken to hold, until it was learned; 0 learns nothing and routes by
    load."""
    max_blocks: int = 1 << 17
    """Blocks of one replica that are followed by its events: 2 M tokens of 16. Forgetting so many at once takes 10 ms; a
    larger replica is known by what was sent there."""
    index_bytes: int = 1 << 30
    """Memory that the index may take: 4.9 M blocks of a replica, enough for 74 replicas with a million tokens each."""
    load_fresh_s: float = 3.0
    """A load frame older than this is no truth any more; at least one comes every second."""
    stale_after_s: float = 60.0
    """How long the picture of a replica is kept after its events stopped."""
    eject_after: int = 5
    eject_s: float = 30.0
    max_eject_s: float = 300.0
    busy_s: float = 1.0
    """How long a replica that said busy without naming a time is left alone."""
    retry_after_s: float = 1.0
    """What a client is told to wait when nobody can say how long."""

    def __post_init__(self) -> None:
        """Raise ValueError with every fault."""
        faults = []
        if self.policy not in get_args(PolicyName):
            faults.append(f"policy is {self.policy!r}, not one of {', '.join(get_args(PolicyName))}")
        for name in (field.name for field in fields(self) if field.name != "policy"):
            value = getattr(self, name)
            if not 0 <= value < float("inf") or (value == 0 and name not in _MAY_BE_ZERO):
                faults.append(f"{name} is {value}, out of range")
        if self.gateway > self.gateways:
            faults.append(f"gateway is {self.gateway}, above gateways, {self.gateways}")
        at_least_one = ("max_w", "same_rate_within")
        faults += [f"{name} is {getattr(self, name)}, below 1" for name in at_least_one if getattr(self, name) < 1]
        if faults:
            raise ValueError("; ".join(faults))
