"""The replicas of one model: what they have in common, and who fits.

What must hold: one pool, one key space. Names of blocks are comparable only between replicas that cut and hash a prompt the
same way, so a replica that differs in kind, revision, block size, hash scheme or tokenizer does not serve the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Final, Literal

from router.blocks import (
    BLOCK_SIZE,
    CHUNK_BYTES,
    CHUNK_ENDS,
    CHUNK_SHARE,
    matchable_blocks,
    matchable_chunks,
)
from router.fleet import Replica, ReplicaView, Reservation
from router.index import Index, PrefixIndex, Room
from router.learning import Density
from router.settings import RoutingSettings
from router.text_index import TextIndex
from router.wire import HASH_SCHEME, Hello, ReplicaSpec

__all__ = ["Members", "Pool", "PoolMismatch"]

_TOKENS_PER_CHUNK: Final = CHUNK_BYTES // 4
"""About; what is reckoned with is learned."""
_ENDS: Final = tuple(end // CHUNK_BYTES for end in CHUNK_ENDS)
_SAME_DENSITY: Final = 0.01
_LEAST_MISSING_BLOCKS: Final = 2
"""A prediction is whole blocks and bytes, an answer tokens: that far they may be apart without anything being wrong."""
_MISSING_SHARE: Final = 0.25
"""Of what was predicted. Less may be text of another density in front, or the answer that a talk's next turn repeats."""
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
    bytes_per_token: float = 4.0
    """What a token stands for in a text pool, as far as it was learned."""
    adapter: str = ""
    tokenizer_digest: str = ""
    """'' until a replica's greeting has told it, and in text pools."""


class Members:
    """A pool's record, its index and its replicas."""

    def __init__(self, first: ReplicaSpec, now: float, settings: RoutingSettings, room: Room) -> None:
        own = first.kind == "warmpath"
        self._settings = settings
        self.record = Pool(
            model=first.model,
            revision=first.revision,
            key_space="tokens" if own else "text",
            block_size=BLOCK_SIZE if own else _TOKENS_PER_CHUNK,
            created=now,
            bytes_per_token=settings.bytes_per_token,
        )
        self.index: PrefixIndex = Index(room) if own else TextIndex(room, _ENDS)
        self.density = Density(settings.bytes_per_token)
        self.replicas: dict[str, Replica] = {}

    def configure(self, settings: RoutingSettings) -> None:
        """What was learned from answers stays."""
        self._settings = settings
        for replica in self.replicas.values():
            replica.configure(settings)
        self.share_out()

    def share_out(self) -> None:
        """Each gateway has a part of the replicas to choose first, all about as many. By their ids, the one thing that gateways
        which hear nothing of each other agree on. Call when replicas came or went.
        """
        settings = self._settings
        for place, replica_id in enumerate(sorted(self.replicas)):
            is_ours = place % settings.gateways == settings.gateway - 1
            self.replicas[replica_id].away_s = 0.0 if is_ours else settings.away_s

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

    @property
    def block_tokens(self) -> float:
        """Tokens a block stands for; of text, a unit of `CHUNK_BYTES`."""
        if self.record.key_space == "tokens":
            return self.record.block_size
        return CHUNK_BYTES / self.density.bytes_per_token

    def matchable(self, num_tokens: int, num_bytes: int) -> int:
        """How many blocks of a prompt of that size can be served from a cache."""
        if num_bytes:
            return matchable_chunks(num_bytes)
        return matchable_blocks(num_tokens, self.record.block_size)

    def tokens_of(self, depth: int) -> int:
        """What so many leading blocks of a prompt, at least one, stand for."""
        if self.record.key_space == "tokens":
            return depth * self.record.block_size
        return int(CHUNK_ENDS[depth - 1] / self.density.bytes_per_token)

    def depth_of(self, tokens: int) -> int:
        """The other way round."""
        if not tokens or self.record.key_space == "tokens":
            return tokens // self.record.block_size
        num_bytes = tokens * self.density.bytes_per_token - 1  # a byte is more than a product is off
        return bisect_left(CHUNK_ENDS, num_bytes) + 1

    def capacity_of(self, replica: Replica) -> int:
        """Blocks that a replica's cache is taken to hold: as it says, else as learned, else by the prior."""
        if replica.capacity_blocks:
            return replica.capacity_blocks
        learned = replica.cache_size.blocks
        return int(self._settings.learned_tokens / self.block_tokens) if learned is None else learned

    def view(self, replica: Replica) -> ReplicaView:
        return replica.view(
            bytes_per_token=self.density.bytes_per_token if self.record.key_space == "text" else None,
            capacity_tokens=int(self.capacity_of(replica) * self.block_tokens),
        )

    def misfit(self, hello: Hello) -> str:
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
        if hello.capacity_blocks <= 0:
            return f"a cache of {hello.capacity_blocks} blocks"
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

    # -- what the answers of replicas without events teach

    def prompt_tokens_of(self, reservation: Reservation, reported: int | None) -> int | None:
        """What a prompt came to by its answer, and a lesson for the pool; None where it was known, or is not to be believed."""
        if not reservation.num_bytes or reported is None:
            return None
        if not self.density.learn(reservation.num_bytes, reported):
            return None
        learned = self.density.bytes_per_token
        if abs(learned - self.record.bytes_per_token) > _SAME_DENSITY * learned:
            self.record = replace(self.record, bytes_per_token=learned)
        return reported

    def judge_cache_size(self, reservation: Reservation, cached_tokens: int | None, prompt_tokens: int) -> None:
        """Whether a prompt was cached as far as it should be says how much the replica holds."""
        replica, block = reservation.replica, self.block_tokens
        cached = replica.cached_of(reservation, cached_tokens, prompt_tokens)
        if cached is None:
            return
        predicted, bound = reservation.matched_in(prompt_tokens), self.capacity_of(replica)
        shortfall = block + predicted * CHUNK_SHARE  # what a chunk that is cached only in part leaves out
        if predicted - cached > max(_LEAST_MISSING_BLOCKS * block, _MISSING_SHARE * predicted):
            if reservation.last_sent is not None:
                # How many blocks were used since the first one that is gone: its own later ones and new ones were not.
                new = reservation.num_bytes // CHUNK_BYTES * reservation.uncached_tokens // reservation.prompt_tokens
                gone = int((predicted - cached) / block)
                used_since = replica.holding.expected_since(reservation.last_sent) - new - gone
                replica.cache_size.missed(max(used_since, 0), bound)
        elif (
            cached - predicted > max(_LEAST_MISSING_BLOCKS * block, shortfall, (prompt_tokens - predicted) / 2)
            and replica.holding.expected >= bound
        ):
            replica.cache_size.outlived(bound)

    # -- how fast they are

    def usual_pace(self) -> tuple[float, float]:
        """Prefill rate of a replica that was not measured yet: its peers run the same model, so theirs is the best guess; and
        what a prompt costs on any of them even when all of it is cached. Where nothing was measured, as set.
        """
        rates, fixed_s = [], []
        for replica in self.replicas.values():
            if replica.rate is not None:
                rates.append(replica.rate)
                if replica.fixed_s is not None:
                    fixed_s.append(replica.fixed_s)
        settings = self._settings
        return (
            sum(rates) / len(rates) if rates else settings.prefill_tok_s,
            sum(fixed_s) / len(fixed_s) if fixed_s else settings.fixed_s,
        )
