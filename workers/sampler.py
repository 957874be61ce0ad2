"""Logits → token ids, all rows of a step in one call.

Noise has no state: it is a pure function of (seed, choice, position, token id), so the same request gives the same text
alone or in a batch, after a preemption, a retry, or a move to another replica. The token is the arg max of scaled logits plus
Gumbel noise, which is a draw from their softmax.

What must hold: a row's token depends on that row alone. Cuts are therefore by value (what is at least as large as the k-th
stays, ties included), and every sum over a row runs in an order that the other rows cannot change.

Order: what the request wants done to its logits (`workers.adjust`), temperature, min-p, top-k, top-p over what these left. At
least one token always stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from workers.adjust import Draw, adjust
from workers.protocol import Sampling
from workers.softmax import row_sums

__all__ = ["sample"]

_NUCLEUS: Final = 1024
"""Largest logits looked at first for top-p: enough unless a row is very flat. Finding them takes a sixth of a full sort."""

_BELOW_ONE: Final = 1 - 2.0**-24
"""The largest fp32 below 1."""

_MASK64: Final = 0xFFFF_FFFF_FFFF_FFFF


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw], eos_ids: Sequence[int] = ()) -> list[int]:
    """fp32 logits [R, V] → one id a row. `eos_ids` end an answer unless its request ignores them."""
    assert len(logits) == len(draws)
    logits = adjust(logits, draws, eos_ids)
    best = logits.argmax(-1)
    rows = [row for row, draw in enumerate(draws) if not draw.greedy]
    if rows:
        drawn = [draws[row] for row in rows]
        index = torch.tensor(rows)
        scaled = logits.index_select(0, index)
        scaled /= torch.tensor([draw.sampling.temperature for draw in drawn]).unsqueeze(1)
        _cut_unlikely(scaled, [draw.sampling.min_p for draw in drawn])
        _cut(scaled, [draw.sampling for draw in drawn])
        scaled += _gumbel(drawn, scaled.shape[1])
        best[index] = scaled.argmax(-1)
    ids: list[int] = best.tolist()
    return ids


def _cut_unlikely(logits: torch.Tensor, min_ps: Sequence[float]) -> None:
    """Set to -inf, in place, what is less likely than `min_p` times the likeliest."""
    if any(min_ps):
        floors = torch.tensor([math.log(min_p) if min_p else -math.inf for min_p in min_ps]).unsqueeze(1)
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + floors, -math.inf)


def _cut(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Set to -inf, in place, what top-k and top-p leave out."""
    vocab = logits.shape[1]
    rows = [row for row, s in enumerate(samplings) if 0 < s.top_k < vocab or s.top_p < 1]
    if not rows:
        return
    cut = [samplings[row] for row in rows]
    top_k = torch.tensor([s.top_k if 0 < s.top_k < vocab else vocab for s in cut]).unsqueeze(1)
    top_p = torch.tensor([s.top_p if s.top_p < 1 else float("inf") for s in cut]).unsqueeze(1)
    selected = logits.index_select(0, torch.tensor(rows))
    depth = min(vocab, max(s.top_k or _NUCLEUS for s in cut))
    floor, sure = _floor(selected, selected.topk(depth).values, top_k, top_p)
    if not sure.all():  # a flat row: its nucleus goes deeper
        flat = (~sure).flatten()
        ordered = selected[flat].sort(descending=True).values
        floor[flat], _ = _floor(selected[flat], ordered, top_k[flat], top_p[flat])
    logits[rows] = selected.masked_fill_(selected < floor, float("-inf"))


def _floor(
    logits: torch.Tensor, ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least logit that stays, [R, 1], and whether `ordered`, the largest ones of each row, goes deep enough to tell."""
    depth, vocab = ordered.shape[1], logits.shape[1]
    top = ordered[:, :1]
    weights = (ordered - top).exp_().masked_fill_(torch.arange(depth) >= top_k, 0.0)
    sums = weights.cumsum(-1)  # one after the other, so that a deeper `ordered` begins with the same sums
    everything = torch.where(top_k < vocab, sums[:, -1:], row_sums((logits - top).exp_()))
    kept = (sums < top_p * everything).sum(-1, keepdim=True) + 1  # the one that reaches the goal stays too
    kept = torch.minimum(kept, top_k)
    return ordered.gather(1, kept.clamp(max=depth) - 1), kept <= depth


def _gumbel(draws: Sequence[Draw], vocab: int) -> torch.Tensor:
    """Noise [R, V]: -log(-log(u)), u in (0, 1) hashed from the row's key and the token id."""
    keys = [_key(draw) for draw in draws]
    low, high = (torch.tensor([_signed32(key >> shift) for key in keys], dtype=torch.int32) for shift in (0, 32))
    # A 32-bit mixer of two multiplications (constants by C. Wellons); each half of the key enters before one. int32, since
    # it is twice as fast as int64: products wrap as wanted, and right shifts need their copies of the sign masked away.
    x = torch.arange(vocab, dtype=torch.int32) * _signed32(0x9E3779B9) + low.unsqueeze(1)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= high.unsqueeze(1)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed32(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    # Winners have a u near 1, where fp32 is coarse; 1 - u is near 0, where it is fine. So the hash stands for 1 - u.
    # The factor is a little below 2^-31, so that it never becomes 1: the only token left must not get noise of -inf.
    exponential = (x >> 1).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(-_BELOW_ONE * 2.0**-31).log1p_().neg_()
    return exponential.log_().neg_()


def _signed32(x: int) -> int:
    """The low 32 bits, as torch's int32 has them."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _key(draw: Draw) -> int:
    """(seed, choice, position) → 64 bits."""
    key = 0
    for part in (draw.sampling.seed, draw.sampling.choice, draw.position):
        key = _splitmix64(key ^ part)
    return key


def _splitmix64(x: int) -> int:
    """Steele, Lea and Flood's mixer: every input bit changes every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
