"""The replicas of one model: what they have in common, and who fits.

What must hold: one pool, one key space. Names of blocks are comparable only between replicas that cut and hash a prompt the
same way, so a replica that differs in kind, revision, block size, hash scheme or tokenizer does not serve the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from router.blocks import BLOCK_SIZE, CHUNK_BYTES
from router.fleet import Replica
from router.index import Index
from router.text_key import BYTES_PER_TOKEN
from router.wire import HASH_SCHEME, Hello, ReplicaSpec

__all__ = ["Members", "Pool", "PoolMismatch"]

_TOKENS_PER_CHUNK: Final = CHUNK_BYTES // BYTES_PER_TOKEN
_MAX_BLOCK_SIZE: Final = 1024
"""More than any engine uses; the name of such a block would say little about a prompt."""


class PoolMismatch(ValueError):
    """The replica's kind or revision is not that of the replicas which serve this model already."""


@dataclass(frozen=True, slots=True)
class Pool:
    """All that is needed to name the blocks of a prompt for the replicas of a model."""

    model: str
    revision: str
    key_space: Literal["tokens", "text"]
    block_size: int
    """Tokens a name stands for; in a text pool an estimate."""
    created: float
    """When its first replica came, on the clock of `now`."""
    adapter: str = ""
    tokenizer_digest: str = ""
    """'' until a replica's greeting has told it, and in text pools."""


class Members:
    """A pool's record, its index and its replicas."""

    def __init__(self, first: ReplicaSpec, now: float) -> None:
        own = first.kind == "warmpath"
        self.record = Pool(
            model=first.model,
            revision=first.revision,
            key_space="tokens" if own else "text",
            block_size=BLOCK_SIZE if own else _TOKENS_PER_CHUNK,
            created=now,
        )
        self.index = Index()
        self.replicas: dict[str, Replica] = {}

    def require_fit(self, spec: ReplicaSpec) -> None:
        """Raise `PoolMismatch` when a replica registered like this could not be compared with the others."""
        pool = self.record
        if (spec.kind == "warmpath") != (pool.key_space == "tokens"):
            raise PoolMismatch(
                f"a replica of kind {spec.kind!r} cannot join those of {pool.model!r}, of the other kind"
            )
        if spec.revision != pool.revision:
            raise PoolMismatch(
                f"the replicas of {pool.model!r} serve revision {pool.revision!r}, not {spec.revision!r}"
            )

    def misfit(self, hello: Hello, max_blocks: int) -> str:
        """Why a replica with this greeting cannot serve the pool; '' when it can."""
        pool = self.record
        if pool.key_space == "text":
            return "a replica of kind openai has no event stream"
        if hello.v != 1 or hello.hash != HASH_SCHEME:
            return f"speaks version {hello.v} with block names {hello.hash!r}, needed are 1 and {HASH_SCHEME!r}"
        if (hello.model, hello.revision, hello.adapter) != (pool.model, pool.revision, pool.adapter):
            return (
                f"serves {hello.model!r} revision {hello.revision!r} adapter {hello.adapter!r}, "
                f"registered is {pool.model!r} revision {pool.revision!r} adapter {pool.adapter!r}"
            )
        if not 0 < hello.capacity_blocks <= max_blocks:
            return f"capacity of {hello.capacity_blocks} blocks is not within 1 to {max_blocks}"
        if not pool.tokenizer_digest:
            return "" if 0 < hello.block_size <= _MAX_BLOCK_SIZE else f"block size {hello.block_size} is out of range"
        if (hello.block_size, hello.tokenizer_digest) != (pool.block_size, pool.tokenizer_digest):
            return (
                f"block size {hello.block_size} and tokenizer {hello.tokenizer_digest!r}, "
                f"the pool has {pool.block_size} and {pool.tokenizer_digest!r}"
            )
        return ""

    def learn(self, hello: Hello) -> None:
        """The first greeting that fits settles what registering did not tell."""
        if not self.record.tokenizer_digest:
            self.record = replace(self.record, block_size=hello.block_size, tokenizer_digest=hello.tokenizer_digest)

    def usual_rate(self, prior: float) -> float:
        """Prefill rate of a replica that was not measured yet: its peers run the same model, so theirs is the best guess."""
        known = [replica.rate for replica in self.replicas.values() if replica.rate is not None]
        return sum(known) / len(known) if known else prior

    @staticmethod
    def rate_of(replica: Replica, usual: float, same_within: float) -> float:
        """The rate to reckon with: its own only where it is clearly not that of its peers.

        Equal replicas measure apart, by what else their machines do and by the prompts that they got. Taken at face value
        that would move talks from one to the other for nothing; and a replica that once looked slow would get no prompt that
        could show otherwise.
        """
        rate = replica.rate
        return usual if rate is None or usual / same_within <= rate <= usual * same_within else rate
