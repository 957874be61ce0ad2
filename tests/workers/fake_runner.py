"""A runner whose KV memory holds token ids, so that a test sees whether block tables lead to the right context.

The next id is a hash of the whole context as read back through the block table. A wrong table, a block overwritten while
somebody reads it, or a cache hit on the wrong block therefore changes the text that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.wire import pack_ids
from workers.protocol import EngineInfo, Grammar, Sampling, Submit, TokenLogprob
from workers.step import RowResult, ScheduledSeq

VOCAB = 50
EOS = 49


def next_id(context: Sequence[int], sampling: Sampling) -> int:
    """The model: a pure function of everything before, with an end now and then."""
    return xxhash.xxh3_64_intdigest(pack_ids(context), sampling.seed) % VOCAB


def logprob_of(context: Sequence[int], num_top: int | None) -> TokenLogprob:
    """Made up: of the last of these ids, after the others."""
    value = -float(xxhash.xxh3_64_intdigest(pack_ids(context)) % 1000)
    return TokenLogprob(value, [(top, value - top) for top in range(num_top or 0)])


def answer(prompt: Sequence[int], sampling: Sampling, max_len: int) -> list[int]:
    """What an engine must say, computed without one."""
    context = list(prompt)
    while len(context) - len(prompt) < sampling.max_tokens and len(context) < max_len:
        context.append(next_id(context, sampling))
        if (context[-1] == EOS and not sampling.ignore_eos) or context[-1] in sampling.stop_token_ids:
            break
    return context[len(prompt) :]


def make_info(
    *, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, max_model_len: int = 4096
) -> EngineInfo:
    return EngineInfo(
        model="fake",
        revision="",
        precision="fp32",
        numerics="fake",
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_ids=[EOS],
        weights_bytes=0,
        kv_bytes_per_token=0,
    )


def make_submit(
    rid: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    salt: str = "",
    priority: int = 0,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    resume: Sequence[int] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> Submit:
    return Submit(
        rid=rid,
        request_id=f"request-{rid}",
        prompt=pack_ids(prompt),
        salt=salt,
        priority=priority,
        resume=pack_ids(resume),
        sampling=Sampling(
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        ),
    )


class FakeRunner:
    """`fail_when` makes a step raise; the KV it should have written is spoiled then."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.batches: list[list[ScheduledSeq]] = []
        self.num_failures_to_come = 0
        self._kv: list[list[int | None]] = [[None] * info.block_size for _ in range(info.num_blocks + 1)]

    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        self.batches.append(list(batch))
        failing = self.num_failures_to_come > 0
        self._write(batch, spoiled=failing)
        if failing:
            self.num_failures_to_come -= 1
            raise MemoryError("no room for activations")
        return [self._result(row) for row in batch]

    def _result(self, row: ScheduledSeq) -> RowResult:
        context = self._context(row)
        targets = range(row.start + 1, row.start + 1 + row.num_prompt_logprobs)
        prompt_logprobs = [
            logprob_of((*context, *row.ids[len(context) :])[: target + 1], row.sampling.prompt_logprobs)
            for target in targets
        ]
        if not row.sample:
            return RowResult(prompt_logprobs=prompt_logprobs)
        token = next_id(context, row.sampling)
        if row.allowed is not None:
            choice = [i for i in range(8 * len(row.allowed)) if row.allowed[i // 8] >> i % 8 & 1]
            token = choice[token % len(choice)]
        logprob = logprob_of([*context, token], row.sampling.logprobs) if row.sampling.logprobs is not None else None
        return RowResult(token, logprob, prompt_logprobs)

    def _write(self, batch: Sequence[ScheduledSeq], *, spoiled: bool) -> None:
        size = self.info.block_size
        written: set[tuple[int, int]] = set()
        for row in batch:
            end = row.start + len(row.tokens)
            assert row.tokens
            assert len(row.block_table) == -(-end // size)
            assert len(set(row.block_table)) == len(row.block_table)
            for position, token in enumerate(row.tokens, row.start):
                slot = (row.block_table[position // size], position % size)
                assert slot not in written, "two rows write to the same place"
                written.add(slot)
                self._kv[slot[0]][slot[1]] = None if spoiled else token

    def _context(self, row: ScheduledSeq) -> list[int]:
        size = self.info.block_size
        context: list[int] = []
        for position in range(row.start + len(row.tokens)):
            token = self._kv[row.block_table[position // size]][position % size]
            assert token is not None, "reads what nobody has written"
            context.append(token)
        return context
