"""One sequence on its way through the engine: its ids, its blocks, and how far both have come.

A sequence has no phase. It has ids (prompt, then what was generated) and a count of those whose KV is computed; running it
means closing the gap. A prefill, a chunk of one, a decode step and the recomputation after a preemption differ only in how
wide the gap is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.blocks import BlockName
from router.wire import pack_ids
from workers.block_pool import Block, BlockKey, Root
from workers.protocol import Sampling, TokenLogprob

__all__ = ["GrammarState", "Seq"]


class GrammarState(Protocol):
    """How far a sequence has come in its grammar. Both raise `workers.grammar_queue.GrammarError`."""

    def allowed(self) -> bytes | None:
        """Bit i % 8 of byte i // 8: token i may come next, one of them at least. None: any may."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """These have come."""
        ...


@dataclass(slots=True, eq=False)
class Seq:
    rid: int
    root: Root
    ids: array[int]
    prompt_len: int
    sampling: Sampling
    order: tuple[int, int]
    """(priority, number of arrival)."""
    arrived_at: float = 0.0
    """On the engine's clock."""
    patience: float = 0.0
    """Of `workers.protocol.Submit`, as the next one."""
    interrupts: bool = True

    rank: float = 0.0
    """Its place within its priority, on the engine's clock: when it came, and the later the more it had to compute then."""
    blocks: list[Block] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    """The indices of `blocks`, kept beside them because every step hands them to the runner."""
    num_computed: int = 0
    """Ids whose KV is in the blocks, from the first on."""
    num_sealed: int = 0
    """Blocks, from the first on, that are readable by others."""
    prefill_end: int = 0
    """Up to here it is a prefill: the number of ids when it was admitted, last time."""
    cached_tokens: int | None = None
    """Prompt tokens found in the cache when it was admitted for the first time; None before that."""
    expected_cached: int = 0
    """While it waits: tokens that the cache would give, as of the last look."""
    names: list[BlockName] = field(default_factory=list)
    """Of the blocks that others can share, until they are computed,"""
    num_had: int = 0
    """of which so many are cached or computed; the scheduler keeps count of the others."""

    grammar: GrammarState | None = None
    """Stands behind the last id, and is kept over preemptions."""
    began_at: float | None = None
    """When the first step that ran some of it began, on the engine's clock."""
    told: bool = False
    """It has had its first output."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are computed, where the request asked for them."""

    @property
    def urgency(self) -> tuple[int, float]:
        """A smaller one need not wait for a larger one's prefill to end."""
        return self.order[0], self.rank

    def may_interrupt(self, other: Seq) -> bool:
        """While it waits and the other one's prompt is under way."""
        return self.interrupts and self.urgency < other.urgency

    @property
    def turn(self) -> tuple[int, float, int]:
        """A smaller one runs sooner and is preempted later."""
        return self.order[0], self.rank, self.order[1]

    @property
    def num_readable(self) -> int:
        """Ids whose KV may come from the cache: all but the last, which must run to give logits, as must those rows of the
        prompt that are still to tell a logprob."""
        num_told = len(self.prompt_logprobs)
        if self.sampling.prompt_logprobs is not None and num_told < self.prompt_len - 1:
            return num_told
        return len(self.ids) - 1

    @property
    def num_uncomputed(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    def packed(self, start: int, end: int) -> bytes:
        return pack_ids(self.ids[start:end])

    def parent_of(self, position: int) -> Root | Block:
        return self.blocks[position - 1] if position else self.root

    def block_key(self, position: int, parent: Root | Block, block_size: int) -> BlockKey:
        """Key of its block at `position`. A tail that does not fill the block gives a key that no block has."""
        return parent.identity, self.packed(position * block_size, (position + 1) * block_size)

    def hold(self, blocks: list[Block]) -> None:
        """Append blocks to those it holds."""
        self.blocks += blocks
        self.table += [block.index for block in blocks]
