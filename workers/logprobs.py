"""How likely tokens were by the model alone: logarithms of the softmax of its untouched fp32 logits.

What must hold: what is told of a row depends on that row alone, not on how many tokens others ask for. Ties are ordered by id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.protocol import TokenLogprob
from workers.softmax import log_softmax

__all__ = ["token_logprobs"]


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """fp32 logits [R, V], one token and one number of likeliest tokens for each row. A token outside of V is impossible."""
    return [
        TokenLogprob(row[token].item() if token < len(row) else -torch.inf, _likeliest(row, count))
        for row, token, count in zip(log_softmax(logits), tokens, num_top, strict=True)
    ]


def _likeliest(row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Of [V], sorted by (-logprob, id)."""
    count = min(count, len(row))
    if not count:
        return []
    # Which of equal ones `topk` takes, and in what order, is anybody's guess. So take all that are as large as the last.
    (ids,) = (row >= row.topk(count).values[-1]).nonzero(as_tuple=True)
    values, order = row[ids].sort(descending=True, stable=True)
    return list(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
