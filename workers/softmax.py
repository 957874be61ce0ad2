"""Sums over rows of logits, with bits that depend on the row alone.

Torch lets threads share the sum of one long row, and then its bits are other ones than those of the same row among others. So
one row is summed as two.
"""

from __future__ import annotations

import torch

__all__ = ["log_softmax", "row_sums"]


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """[R, V] → [R, 1]"""
    if len(x) == 1:
        return x.expand(2, -1).sum(-1, keepdim=True)[:1]
    return x.sum(-1, keepdim=True)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """fp32 [R, V] → the natural logarithms of the tokens' probabilities, [R, V]."""
    centred = logits - logits.amax(-1, keepdim=True)
    return centred.sub_(row_sums(centred.exp()).log_())
