"""What a request wants done to its logits before a token is drawn of them.

In this order: tokens outside the grammar go, then those that would end the answer too soon; biases are added; the repetition
penalty is applied to tokens of prompt and answer; frequency and presence penalties are taken off those of the answer.

Nothing is remembered between steps: all is a function of the row and of the ids before it. So neither a preemption, nor a
resumption elsewhere, nor the other rows can change a token.

Only multiplications, divisions and sums of two numbers are done to a logit: they are exact up to their one rounding, on any
thread and in any vector, so no care is needed for the bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from workers.protocol import Sampling

__all__ = ["Draw", "adjust"]

_GREEDY_BELOW: Final = 1e-5
"""Temperatures below are greedy: dividing by them would overflow."""

_LEAST_REPETITION_PENALTY: Final = 1e-20
"""Smaller ones count as this: in fp32 they become 0, and what the grammar forbids no number any more."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose one row's token."""

    sampling: Sampling
    position: int
    """Of the token to be chosen, in its sequence."""
    ids: array[int]
    """The ids before it, `position` of them, and perhaps more. Looked at only where there are penalties."""
    prompt_len: int
    """How many of them are the prompt."""
    allowed: bytes | None = None
    """Bit i % 8 of byte i // 8: the grammar allows token i, one of them at least. None: there is no grammar."""

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` has anything to do to its row."""
        s = self.sampling
        return (
            self.allowed is not None
            or bool(s.logit_bias)
            or s.repetition_penalty != 1.0
            or s.frequency_penalty != 0.0
            or s.presence_penalty != 0.0
            or s.min_tokens > 0
        )


def adjust(logits: torch.Tensor, draws: Sequence[Draw], eos_ids: Sequence[int]) -> torch.Tensor:
    """fp32 [R, V] → the same with the rows changed that ask for it. The given ones stay as they are."""
    rows = [row for row, draw in enumerate(draws) if draw.adjusts]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        _adjust_row(logits[row], draws[row], eos_ids)
    return logits


def _adjust_row(logits: torch.Tensor, draw: Draw, eos_ids: Sequence[int]) -> None:
    """[V], in place."""
    sampling, vocab = draw.sampling, len(logits)
    if draw.allowed is not None:
        allowed = np.unpackbits(np.frombuffer(draw.allowed, np.uint8), count=vocab, bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0), float("-inf"))
    if draw.position - draw.prompt_len < sampling.min_tokens:
        _forbid_end(logits, [*sampling.stop_token_ids, *([] if sampling.ignore_eos else eos_ids)])
    if sampling.logit_bias:
        known = [(token, bias) for token, bias in sampling.logit_bias.items() if token < vocab]
        logits[[token for token, _ in known]] += torch.tensor([bias for _, bias in known])
    if sampling.repetition_penalty != 1.0:
        seen = _tensor(draw.ids, 0, draw.position, vocab)
        values = logits[seen]
        penalty = max(sampling.repetition_penalty, _LEAST_REPETITION_PENALTY)
        # A token that is there twice is written twice, with the same value.
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        answer = _tensor(draw.ids, draw.prompt_len, draw.position, vocab)
        said, counts = torch.unique(answer, return_counts=True)
        logits[said] = logits[said] - counts.float() * sampling.frequency_penalty - sampling.presence_penalty


def _forbid_end(logits: torch.Tensor, ends: Sequence[int]) -> None:
    """Unless nothing else is left: a grammar's sentence may be complete before the client has its tokens."""
    index = [token for token in ends if token < len(logits)]
    if not index:
        return
    values = logits[index]
    logits[index] = float("-inf")
    if logits.amax() == float("-inf"):
        logits[index] = values


def _tensor(ids: array[int], start: int, end: int, vocab: int) -> torch.Tensor:
    """ids[start:end] as an index. A prompt may have ids that the model never says, at the end of its embedding."""
    index = torch.from_numpy(np.frombuffer(ids, np.uint32)[start:end].astype(np.int64))  # a copy: the array will grow
    return index[index < vocab]
