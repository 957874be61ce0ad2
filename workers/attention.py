"""Paged attention whose answer for a token does not depend on how the step was cut.

The same token can be computed as part of a long prefill chunk, of a short one after a cache hit, or alone in a decode step
among others; library attention gives different bits each time, because the order of its sums follows the shapes. Here every
query meets its keys in *tiles* of 256 that are aligned to absolute positions, always padded to the full 256: its own tile
(masked from its position on), then the earlier ones from the first. Partial results are combined from the tiles' log-sum-exp
in that order. So the sums of one query are the same whatever is computed beside it.

What is left to the library is one tile: the CPU flash kernel on queries against exactly 256 keys. Queries of one tile go to it
together as a *piece* of some height (positions), 1 in decode and up to 256 in prefill, and pieces of equal height in one
call. That a row's bits do not depend on the height holds for the bf16 kernels seen so far when heights above 1 are multiples
of 16; `choose_heights` tries it at start and gives up height (speed), not equality, where it fails.

Group sharing (GQA) is folded into the query rows: a piece of height h has h * group rows for each KV head.

What must hold: memory of the cache is never NaN, because masked keys are multiplied by zero (it starts as zeros); a piece
never crosses a tile.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from workers.engine import ScheduledSeq

__all__ = ["TILE", "Attention", "AttentionPlan", "Heights", "KVCache", "choose_heights"]

TILE: Final = 256
"""Keys a tile. A query's own tile is half padding on average, but smaller ones mean more partial results to combine."""

_ALIGN: Final = 16
"""Piece heights above 1 are multiples: their row counts then leave no odd rest in the kernel's blocks of 32 to 256 rows."""


@dataclass(frozen=True, slots=True)
class Heights:
    """The defaults are the fastest ones; equal bits need those of `choose_heights`."""

    single: int = 1
    """Of a decode step's piece. 1, or more where the kernel treats few rows differently: the rest is padding."""
    most: int = TILE
    """Of a prefill chunk's pieces; divides TILE."""


class KVCache:
    """Keys and values of all layers, in blocks. `layers[i]` is [2 * kv_heads * num_blocks * block_size, head_dim]: blocks of
    one head are contiguous, so a gather copies whole blocks and leaves each head's keys contiguous for the kernel."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        assert TILE % block_size == 0, "a tile is a whole number of blocks"
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        rows = 2 * num_kv_heads * num_blocks * block_size
        self.layers = [_zeros((rows, head_dim), dtype) for _ in range(num_layers)]
        # First row of each head's blocks, keys' heads first.
        self._heads = torch.arange(2 * num_kv_heads) * num_blocks

    def slots(self, block_positions: torch.Tensor) -> torch.Tensor:
        """[N] block * block_size + offset → [N * 2 * kv_heads] rows to write k's heads and v's heads of each token to."""
        return (block_positions[:, None] + self._heads * self.block_size).flatten()

    def tile_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """[U, TILE / block_size] blocks of U tiles → index for `gather`."""
        heads = self._heads.view(2, 1, self.num_kv_heads, 1)
        return (heads + blocks[:, None, :]).flatten()

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """kv [N, 2 * kv_heads, D]"""
        self.layers[layer].index_copy_(0, slots, kv.reshape(-1, self.head_dim))

    def gather(self, layer: int, tile_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of U tiles, each [U, kv_heads, TILE, D]."""
        blocks = self.layers[layer].view(-1, self.block_size * self.head_dim).index_select(0, tile_rows)
        keys, values = blocks.view(2, -1, self.num_kv_heads, TILE, self.head_dim)
        return keys, values


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one sequence within one tile: positions `low` … `high` - 1, padded to `height` from `base`."""

    token: int
    """Row of the query at `low` in the step."""
    low: int
    high: int
    base: int
    height: int
    table: Sequence[int]

    def rows(self) -> list[int]:
        """For each position of the piece, the step's row that holds its query. Padding repeats the nearest."""
        positions = range(self.base, self.base + self.height)
        return [self.token + min(max(p, self.low), self.high - 1) - self.low for p in positions]


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces of one height: P of them, with F earlier tiles between them."""

    num_pieces: int
    rows: torch.Tensor
    """[P * height]"""
    mask: torch.Tensor
    """[P, 1, height * group, TILE]: what each query sees of its own tile."""
    tile_rows: torch.Tensor
    """The P own tiles, then the F earlier ones of each piece in order."""
    owner: torch.Tensor
    """[F]: the piece an earlier tile belongs to."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All of a step's bookkeeping, made once and used by every layer."""

    slots: torch.Tensor
    groups: tuple[_Group, ...]
    outputs: torch.Tensor
    """[N]: row of each token in the groups' results, one after the other."""


class Attention:
    def __init__(self, *, num_heads: int, cache: KVCache, heights: Heights) -> None:
        self._cache = cache
        self._heights = heights
        self._group_size = num_heads // cache.num_kv_heads
        self._visible = _causal(cache.dtype)

    def plan(self, batch: Sequence[ScheduledSeq]) -> AttentionPlan:
        """The tokens of the batch, one row after the other, are the step's N queries."""
        size = self._cache.block_size
        positions = [
            seq.block_table[position // size] * size + position % size
            for seq in batch
            for position in range(seq.start, seq.start + len(seq.tokens))
        ]
        by_height: dict[int, list[_Piece]] = defaultdict(list)
        for piece in _pieces(batch, self._heights):
            by_height[piece.height].append(piece)
        outputs = [0] * len(positions)
        done = 0
        for height, pieces in by_height.items():
            for piece in pieces:
                first = done + piece.low - piece.base
                outputs[piece.token : piece.token + piece.high - piece.low] = range(
                    first, first + piece.high - piece.low
                )
                done += height
        return AttentionPlan(
            slots=self._cache.slots(torch.tensor(positions)),
            groups=tuple(self._group(pieces) for pieces in by_height.values()),
            outputs=torch.tensor(outputs),
        )

    def attend(self, layer: int, q: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """q [N, H, D] → [N, H * D] fp32. KV of the step must have been written before."""
        results = [self._attend_group(layer, q, group) for group in plan.groups]
        joined = torch.cat(results) if len(results) > 1 else results[0]
        return joined.index_select(0, plan.outputs).float()

    def _attend_group(self, layer: int, q: torch.Tensor, group: _Group) -> torch.Tensor:
        keys, values = self._cache.gather(layer, group.tile_rows)
        num_pieces, num_heads, dim = group.num_pieces, self._cache.num_kv_heads, q.shape[-1]
        # [P, height, kv_heads, group, D] → [P, kv_heads, height * group, D]
        rows = q.index_select(0, group.rows).view(num_pieces, -1, num_heads, self._group_size, dim)
        queries = rows.transpose(1, 2).reshape(num_pieces, num_heads, -1, dim)
        out, lse = _tiles(queries, keys[:num_pieces], values[:num_pieces], group.mask)
        if len(group.owner):
            one = num_pieces == 1  # then no copy for each tile
            earlier = queries.expand(len(group.owner), -1, -1, -1) if one else queries.index_select(0, group.owner)
            more, more_lse = _tiles(earlier, keys[num_pieces:], values[num_pieces:])
            out = _combine(out, lse, more, more_lse, group.owner)
        out = out.view(num_pieces, num_heads, -1, self._group_size, dim).transpose(1, 2)
        return out.reshape(-1, num_heads * self._group_size * dim)

    def _group(self, pieces: list[_Piece]) -> _Group:
        per_tile = TILE // self._cache.block_size
        own: list[int] = []
        earlier: list[int] = []
        owner: list[int] = []
        for index, piece in enumerate(pieces):
            tile = piece.base // TILE
            blocks = piece.table[tile * per_tile : (tile + 1) * per_tile]
            own += blocks
            own += [0] * (per_tile - len(blocks))  # any block will do, its keys are masked
            earlier += piece.table[: tile * per_tile]
            owner += [index] * tile
        offsets = torch.tensor([p % TILE for piece in pieces for p in range(piece.base, piece.base + piece.height)])
        visible = self._visible.index_select(0, offsets).view(len(pieces), -1, 1, TILE)
        return _Group(
            num_pieces=len(pieces),
            rows=torch.tensor([row for piece in pieces for row in piece.rows()]),
            mask=visible.expand(-1, -1, self._group_size, -1).reshape(len(pieces), 1, -1, TILE),
            tile_rows=self._cache.tile_rows(torch.tensor(own + earlier).view(-1, per_tile)),
            owner=torch.tensor(owner, dtype=torch.int64),
        )


def _pieces(batch: Sequence[ScheduledSeq], heights: Heights) -> list[_Piece]:
    pieces: list[_Piece] = []
    token = 0
    for seq in batch:
        low, end = seq.start, seq.start + len(seq.tokens)
        if len(seq.tokens) == 1:
            base = low - low % heights.single
            pieces.append(_Piece(token, low, end, base, heights.single, seq.block_table))
            token += 1
            continue
        while low < end:
            high = min(end, low - low % heights.most + heights.most)
            base = low - low % _ALIGN
            height = -(-(high - base) // _ALIGN) * _ALIGN
            pieces.append(_Piece(token, low, high, base, height, seq.block_table))
            token += high - low
            low = high
    return pieces


def _tiles(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [B, kv_heads, rows, D] against one tile each, [B, kv_heads, TILE, D] → results and log-sum-exp
    [B, kv_heads, rows]. The kernel of F.scaled_dot_product_attention, by its own name: only so it tells the latter."""
    out: torch.Tensor
    lse: torch.Tensor
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, attn_mask=mask)
    return out, lse


def _combine(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor, owner: torch.Tensor
) -> torch.Tensor:
    """Join each piece's result over its own tile, out [P, kv_heads, rows, D], with those over its earlier tiles, more
    [F, kv_heads, rows, D], in the order of `owner`. Weights are relative to the largest, which is the same in any order."""
    top = lse.scatter_reduce(0, owner.view(-1, 1, 1).expand_as(more_lse), more_lse, "amax")
    weight = (lse - top).exp_()
    more_weight = (more_lse - top.index_select(0, owner)).exp_()
    total = weight.index_add(0, owner, more_weight)
    result = out * weight.unsqueeze(-1)
    result.index_add_(0, owner, more * more_weight.unsqueeze(-1))
    return result.div_(total.unsqueeze(-1))


def _causal(dtype: torch.dtype) -> torch.Tensor:
    """[TILE, TILE]: 0 where the query at that offset sees the key, -inf where it does not."""
    return torch.full((TILE, TILE), float("-inf"), dtype=dtype).triu_(1)


def _zeros(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only once they are written to: torch.zeros would touch all of the budget at start."""
    return torch.frombuffer(mmap.mmap(-1, shape[0] * shape[1] * dtype.itemsize), dtype=dtype).view(shape)


@torch.inference_mode()
def choose_heights(*, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Heights:
    """The heights with which this machine's kernel gives every row the bits it has in a piece of height 16."""
    group = num_heads // num_kv_heads
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((TILE, num_kv_heads, group, head_dim), *[(1, num_kv_heads, TILE, head_dim)] * 2)
    )
    visible = _causal(dtype)

    def run(height: int, *, masked: bool) -> list[torch.Tensor]:
        """Results and log-sum-exp by (position, kv_head, group), for as many positions as whole pieces hold."""
        num_pieces = TILE // height
        rows = queries[: num_pieces * height].view(num_pieces, height, num_kv_heads, group, head_dim)
        mask = visible[: num_pieces * height].view(num_pieces, 1, height, 1, TILE).expand(-1, -1, -1, group, -1)
        shape = (num_pieces, -1, -1, -1)
        out, lse = _tiles(
            rows.transpose(1, 2).flatten(2, 3),
            keys.expand(shape),
            values.expand(shape),
            mask.flatten(2, 3) if masked else None,
        )
        order = (num_pieces, num_kv_heads, height, group)
        return [part.reshape(*order, -1).transpose(1, 2).flatten(0, 1) for part in (out, lse)]

    reference = {masked: run(_ALIGN, masked=masked) for masked in (False, True)}

    def agrees(height: int) -> bool:
        for masked, wanted in reference.items():
            for part, whole in zip(run(height, masked=masked), wanted, strict=True):
                if not torch.equal(part, whole[: len(part)]):
                    return False
        return True

    most = TILE if all(agrees(height) for height in range(2 * _ALIGN, TILE + 1, _ALIGN)) else _ALIGN
    return Heights(single=next(height for height in (1, 2, 4, 8, _ALIGN) if agrees(height)), most=most)
