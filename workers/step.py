"""What the engine and a runner hand each other at each step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from workers.protocol import EngineInfo, Sampling, TokenLogprob

__all__ = ["RowResult", "Runner", "ScheduledSeq"]


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
    """One row of a step: run `tokens` at positions `start`… and write their KV into the blocks of `block_table`."""

    rid: int
    tokens: Sequence[int]
    """Ids to run now, at least one: one in a decode step, up to the step's token budget in a prefill chunk."""
    start: int
    """Position of the first of them. KV of all earlier positions is already in the blocks."""
    block_table: Sequence[int]
    """Physical blocks, in order, that cover exactly positions 0 … start + len(tokens) - 1 (the last may be part filled).
    Only for the time of the step: afterwards it may change."""
    sample: bool
    """True: return the id chosen for position start + len(tokens). False for all chunks of a prefill but its last."""
    sampling: Sampling
    prompt_len: int
    """The client's prompt; ids at later positions were generated."""
    ids: array[int]
    """All of the sequence's so far, those to run now and later ones included. Only for the time of the step."""
    allowed: bytes | None = None
    """A bit for each token that the grammar allows now (`workers.adjust.Draw`); None: there is no grammar."""

    @property
    def num_prompt_logprobs(self) -> int:
        """How many of its rows tell how likely the prompt's next token was: those before the prompt's last one."""
        if self.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(len(self.tokens), self.prompt_len - 1 - self.start))


class RowResult(NamedTuple):
    """What a step gives for one row."""

    token: int | None = None
    """The id chosen, where `sample` is True."""
    logprob: TokenLogprob | None = None
    """Of that id, where the request asked for it."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Of the tokens at positions `start` + 1 …, `num_prompt_logprobs` of them."""


class Runner(Protocol):
    """What computes: weights, KV memory and sampler. Knows no requests, queues or prefix cache.

    It has one block more than `info.num_blocks`, the last one, for the engine's own probe.
    """

    @property
    def info(self) -> EngineInfo: ...

    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        """Run every row; for each, what came of it.

        A row's result must not depend on the other rows. May raise: then nothing that this batch wrote is used.
        """
        ...
