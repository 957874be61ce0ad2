"""Which sequences run in the next step, and over how many of their ids.

Knows sequences and blocks; nothing of runners, sampling or messages. One step has a token budget, so that a long prompt
is cut into chunks and those who already generate wait for one chunk at most, never for a whole prompt.

In order: sequences that generate, ongoing prefills, waiting ones; but a waiting one may go before an ongoing prefill that is
less urgent, which a long prompt would else hold up for seconds. More urgent is what has a higher priority, and within a
priority what came sooner and has less to compute: each lets pass the shorter ones that come within its patience (`Submit`). So
short prompts hardly wait for long ones, and nobody waits for ever. Waiting ones are admitted in that order, and only when the
whole of what they have and one id more fit; their blocks are taken at once, so a prefill never runs out of memory halfway. A
sequence that generates and finds no block takes those of the last in that order, which starts again from its ids later, mostly
from the cache.

What must hold:
- Every step with something to do runs something: the sequence first in order is never preempted for another one, and the
  length limit makes sure that it fits alone.
- Who runs gets a token in every step: one is admitted only from the budget that all others leave over. So there are never
  more running than tokens in the budget, and of equally urgent ones at most one has an unfinished prefill.
- A sequence is waiting or running or forgotten, and holds blocks only while running.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import Final, NamedTuple

from router.blocks import block_names, matchable_blocks
from workers.block_pool import Block, BlockKey, BlockPool
from workers.sequence import Seq
from workers.wanted import Wanted

__all__ = ["Scheduler", "Slice"]


_LOOK_AHEAD: Final = 16
"""How many waiting sequences may be stepped over in one step; each costs a look into the cache."""

_turn: Final = attrgetter("turn")


class Slice(NamedTuple):
    """Run `num_tokens` ids of `seq`, from its first uncomputed one on."""

    seq: Seq
    num_tokens: int


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        token_budget: int,
        prefills_per_step: int | None = None,
        prefill_s: Callable[[int], float] = lambda num_tokens: 0.0,
    ) -> None:
        """`prefills_per_step` is for runners to whom a prompt costs more than its tokens; None bounds the tokens alone.
        `prefill_s`: what so many tokens take to compute; with 0 the order is first come, first served.
        """
        self._pool = pool
        self._block_size = pool.block_size
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._prefills_per_step = max_num_seqs if prefills_per_step is None else prefills_per_step
        self._prefill_s = prefill_s
        self._waiting: list[Seq] = []  # both sorted by Seq.turn
        self._running: list[Seq] = []
        self._wanted = Wanted()  # blocks that these two still have to compute
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of sequences at their first admission, and how many of them the cache gave
        self.num_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def num_pending_tokens(self) -> int:
        """Tokens to compute before everybody here generates. Blocks that several want are computed once."""
        waiting = sum(len(seq.ids) - seq.expected_cached for seq in self._waiting)
        running = sum(seq.num_uncomputed for seq in self._running if seq.prefilling)
        return waiting + running - self._wanted.num_free * self._block_size

    def add(self, seq: Seq) -> None:
        self._expect(seq)
        seq.rank = seq.arrived_at + seq.patience * self._prefill_s(len(seq.ids) - seq.expected_cached)
        insort(self._waiting, seq, key=_turn)

    def remove(self, seq: Seq) -> None:
        """Forget a sequence, wherever it is, and give its blocks back."""
        if seq in self._running:
            self._running.remove(seq)
            self._release(seq)
        else:
            self._waiting.remove(seq)
        self._has(seq, len(seq.names))

    def schedule(self) -> list[Slice]:
        """What to run now. The blocks for it are taken; `advance` is due for each slice that ran."""
        before = self.num_preemptions
        slices = self._schedule_decodes()
        budget = self._token_budget - len(slices)
        may_admit = (
            self.num_preemptions == before
        )  # else the next one admitted would take back what was just taken away
        ongoing = [seq for seq in self._running if seq.prefilling]
        for others, seq in zip(reversed(range(len(ongoing))), ongoing, strict=True):
            if may_admit and self._waiting and self._waiting[0].may_interrupt(seq):
                admitted = self._admit(budget - others - 1, before=seq)
                budget -= sum(piece.num_tokens for piece in admitted)
                slices += admitted
            slices.append(Slice(seq, min(seq.num_uncomputed, budget - others)))
            budget -= slices[-1].num_tokens
        if may_admit:
            slices += self._admit(budget)
        return slices

    def advance(self, piece: Slice) -> None:
        """The slice has run: what it filled becomes readable."""
        seq = piece.seq
        seq.num_computed += piece.num_tokens
        size = self._block_size
        while (seq.num_sealed + 1) * size <= seq.num_computed:
            position = seq.num_sealed
            parent = seq.parent_of(position)
            block = self._pool.seal(seq.blocks[position], parent, seq.packed(position * size, (position + 1) * size))
            seq.blocks[position] = block
            seq.table[position] = block.index
            seq.num_sealed += 1
        if seq.num_had < len(seq.names):
            had = min(seq.num_sealed, len(seq.names))
            self._wanted.compute(seq.names[seq.num_had : had])
            seq.num_had = had

    def _schedule_decodes(self) -> list[Slice]:
        slices: list[Slice] = []
        for seq in [seq for seq in self._running if not seq.prefilling]:
            if not seq.blocks:
                continue  # preempted a moment ago, for one before it
            if self._reserve_next(seq):
                slices.append(Slice(seq, 1))
        return slices

    def _reserve_next(self, seq: Seq) -> bool:
        """Make sure of a block for the next id. False: there was none, and `seq` itself was the last in order."""
        if len(seq.ids) <= len(seq.blocks) * self._block_size:
            return True
        while not self._pool.num_available:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.hold(self._pool.allocate(1))
        return True

    def _preempt(self, seq: Seq) -> None:
        self._running.remove(seq)
        self._release(seq)
        self._expect(seq)
        insort(self._waiting, seq, key=_turn)
        self.num_preemptions += 1

    def _admit(self, budget: int, before: Seq | None = None) -> list[Slice]:
        """Start waiting ones with at most so many tokens; `before`: only those that are more urgent than this one."""
        slices: list[Slice] = []
        ongoing = [seq for seq in self._running if seq.prefilling]
        filling = {self._filling_key(seq) for seq in ongoing}
        room = self._prefills_per_step - sum(before is None or seq.turn < before.turn for seq in ongoing)
        for seq in self._waiting[: self._max_num_seqs + _LOOK_AHEAD]:
            if budget <= 0 or room <= 0 or len(self._running) == self._max_num_seqs:
                break
            if before is not None and not seq.may_interrupt(before):
                break
            matched = self._look(seq)
            if self._wanted_key(seq, matched) in filling:
                continue  # a running prefill computes this very block: wait a step and share it
            if not self._try_start(seq, matched):
                break  # nobody overtakes the one that waits for memory, or it could wait for ever
            self._waiting.remove(seq)
            filling.add(self._filling_key(seq))
            slices.append(Slice(seq, min(seq.num_uncomputed, budget)))
            budget -= slices[-1].num_tokens
            room -= 1
        return slices

    def _filling_key(self, seq: Seq) -> BlockKey:
        return seq.block_key(seq.num_sealed, seq.parent_of(seq.num_sealed), self._block_size)

    def _wanted_key(self, seq: Seq, matched: list[Block]) -> BlockKey | None:
        """Of the first block that the cache could give, but has not."""
        if len(matched) == seq.num_readable // self._block_size:
            return None
        return seq.block_key(len(matched), matched[-1] if matched else seq.root, self._block_size)

    def _try_start(self, seq: Seq, matched: list[Block]) -> bool:
        """Take what is cached and blocks for the rest and one id more, or nothing."""
        needed = len(seq.ids) // self._block_size + 1 - len(matched)
        unused = sum(1 for block in matched if not block.users)
        if needed > self._pool.num_available - unused:
            return False
        self._pool.acquire(matched)
        seq.hold(matched)
        seq.hold(self._pool.allocate(needed))
        seq.num_sealed = len(matched)
        seq.num_computed = len(matched) * self._block_size
        seq.prefill_end = len(seq.ids)
        if seq.cached_tokens is None:
            # Of a resumed one the cache may give more than the prompt; what is told is what the prompt alone would have got.
            most = matchable_blocks(seq.prompt_len, self._block_size) * self._block_size
            seq.cached_tokens = min(seq.num_computed, most)
            self.num_prompt_tokens += seq.prompt_len
            self.num_cached_tokens += seq.cached_tokens
        insort(self._running, seq, key=_turn)
        return True

    def _release(self, seq: Seq) -> None:
        self._pool.release(seq.blocks)
        seq.blocks = []
        seq.table = []
        seq.num_computed = seq.num_sealed = seq.prefill_end = 0

    def _expect(self, seq: Seq) -> None:
        """It will wait: count what is to compute for it."""
        self._has(seq, len(seq.names))
        seq.names = block_names(seq.packed(0, seq.num_readable), seq.root.name, self._block_size)
        seq.num_had = len(seq.names)
        self._look(seq)

    def _look(self, seq: Seq) -> list[Block]:
        """What the cache holds of the ids that may be read from it, of one that waits."""
        matched = self._pool.match(seq.root, seq.packed(0, seq.num_readable))
        seq.expected_cached = len(matched) * self._block_size
        self._has(seq, len(matched))
        return matched

    def _has(self, seq: Seq, count: int) -> None:
        """Of the blocks that it can share, the first `count` need not be computed for it."""
        if count < seq.num_had:
            self._wanted.add(seq.names[count : seq.num_had])
        else:
            self._wanted.remove(seq.names[seq.num_had : count])
        seq.num_had = count
