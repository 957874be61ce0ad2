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

A layer with a sliding window leaves out the tiles that no query of the own tile can see. Which those are, and which lie on
the window's edge and need a mask, follows from a tile's distance to the own one alone, so it is the same in every step. A query
that sees nothing of an edge tile gives it the weight zero.

Group sharing (GQA) is folded into the query rows: a piece of height h has h * group rows for each KV head.

What must hold: memory of the cache is never NaN, because masked keys are multiplied by zero (it starts as zeros); a piece
never crosses a tile.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from workers.step import ScheduledSeq

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

    def offsets(self) -> range:
        """Of each position within the own tile."""
        return range(self.base % TILE, self.base % TILE + self.height)


@dataclass(frozen=True, slots=True)
class _Masks:
    """What queries see of the tiles that they do not see whole, for one width of window."""

    visible: torch.Tensor
    """[(1 + edges) * TILE, TILE]: for each offset of a query in its own tile, 0 where it sees the key, -inf where not. First of
    its own tile, then of those on the edge. A query that sees nothing of a tile has zeros: what the kernel makes of a row that
    is masked throughout differs between machines, so it is given something to see, of which `blind` takes the weight away."""
    blind: torch.Tensor
    """[(1 + edges) * TILE], fp32: -inf where a query sees nothing, else 0."""
    edges: Mapping[int, int]
    """Distance to the own tile, in tiles → place in `visible`."""
    farthest: int | None
    """Distance of the last tile of which anything is seen; None: no window."""

    @classmethod
    def of(cls, window: int | None, dtype: torch.dtype) -> _Masks:
        query = torch.arange(TILE).unsqueeze(1)
        key = torch.arange(TILE)
        seen = [key <= query]
        edges: dict[int, int] = {}
        farthest = None
        if window is not None:
            seen[0] &= key > query - window
            farthest = (window + TILE - 2) // TILE  # the query at offset 0 sees window - 1 keys before its tile
            for distance in range(max(1, window // TILE - 1), farthest + 1):
                if (distance + 1) * TILE - 1 >= window:  # else even the last query sees its first key
                    edges[distance] = len(seen)
                    seen.append(key - distance * TILE > query - window)
        sees = torch.cat(seen)
        blind = ~sees.any(-1)
        return cls(
            visible=_minus_infinity_where(~sees & ~blind.unsqueeze(1), dtype),
            blind=_minus_infinity_where(blind, torch.float32),
            edges=edges,
            farthest=farthest,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces of one height: P of them. Between them they have E tiles on the edge of the window and F whole ones."""

    num_pieces: int
    rows: torch.Tensor
    """[P * height]"""
    mask: torch.Tensor
    """[P + E, 1, height * group, TILE]: what each query sees of its own tile, and of those on the edge."""
    tile_rows: torch.Tensor
    """The P own tiles, the E on the edge, then the F whole ones, those of each piece in order."""
    owner: torch.Tensor
    """[E + F]: the piece an earlier tile belongs to."""
    blind: torch.Tensor
    """[E, 1, height * group]: -inf where a query sees nothing of a tile on the edge, else 0."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All of a step's bookkeeping, made once and used by every layer."""

    slots: torch.Tensor
    groups: Mapping[int | None, tuple[_Group, ...]]
    """By window. The pieces are the same in each, in the same order."""
    outputs: torch.Tensor
    """[N]: row of each token in the groups' results, one after the other."""


class Attention:
    def __init__(
        self,
        *,
        num_heads: int,
        cache: KVCache,
        heights: Heights,
        windows: Sequence[int | None] = (),
        scale: float | None = None,
    ) -> None:
        """`windows`: of each layer, see `ModelConfig`. `scale`: of the scores, head_dim ** -0.5 unless told otherwise."""
        self._cache = cache
        self._heights = heights
        self._group_size = num_heads // cache.num_kv_heads
        self._scale = scale
        self._windows = tuple(windows) or (None,) * len(cache.layers)
        self._masks = {window: _Masks.of(window, cache.dtype) for window in self._windows}

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
            groups={
                window: tuple(self._group(pieces, masks) for pieces in by_height.values())
                for window, masks in self._masks.items()
            },
            outputs=torch.tensor(outputs),
        )

    def attend(self, layer: int, q: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """q [N, H, D] → [N, H * D] fp32. KV of the step must have been written before."""
        results = [self._attend_group(layer, q, group) for group in plan.groups[self._windows[layer]]]
        joined = torch.cat(results) if len(results) > 1 else results[0]
        return joined.index_select(0, plan.outputs).float()

    def _attend_group(self, layer: int, q: torch.Tensor, group: _Group) -> torch.Tensor:
        keys, values = self._cache.gather(layer, group.tile_rows)
        num_pieces, num_heads, dim = group.num_pieces, self._cache.num_kv_heads, q.shape[-1]
        # [P, height, kv_heads, group, D] → [P, kv_heads, height * group, D]
        rows = q.index_select(0, group.rows).view(num_pieces, -1, num_heads, self._group_size, dim)
        queries = rows.transpose(1, 2).reshape(num_pieces, num_heads, -1, dim)
        num_masked, num_edges = len(group.mask), len(group.blind)
        masked = torch.cat([queries, queries.index_select(0, group.owner[:num_edges])]) if num_edges else queries
        out, lse = self._tiles(masked, keys[:num_masked], values[:num_masked], group.mask)
        parts = [(out[num_pieces:], lse[num_pieces:] + group.blind)] if num_edges else []
        whole = group.owner[num_edges:]
        if len(whole):
            one = num_pieces == 1  # then no copy for each tile
            earlier = queries.expand(len(whole), -1, -1, -1) if one else queries.index_select(0, whole)
            parts.append(self._tiles(earlier, keys[num_masked:], values[num_masked:]))
        if parts:
            more, more_lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            out = _combine(out[:num_pieces], lse[:num_pieces], more, more_lse, group.owner)
        out = out.view(num_pieces, num_heads, -1, self._group_size, dim).transpose(1, 2)
        return out.reshape(-1, num_heads * self._group_size * dim)

    def _tiles(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _tiles(queries, keys, values, mask, self._scale)

    def _group(self, pieces: list[_Piece], masks: _Masks) -> _Group:
        per_tile = TILE // self._cache.block_size
        own: list[int] = []
        tiles: dict[bool, list[int]] = {
            True: [],
            False: [],
        }  # blocks of the earlier ones, by whether they are on the edge
        owner: dict[bool, list[int]] = {True: [], False: []}
        edges: list[int] = []  # the row of `masks` that each query has for each tile on the edge
        for index, piece in enumerate(pieces):
            own_tile = piece.base // TILE
            blocks = piece.table[own_tile * per_tile : (own_tile + 1) * per_tile]
            own += blocks
            own += [0] * (per_tile - len(blocks))  # any block will do, its keys are masked
            first = max(0, own_tile - masks.farthest) if masks.farthest is not None else 0
            for tile in range(first, own_tile):
                on_edge = own_tile - tile in masks.edges
                tiles[on_edge] += piece.table[tile * per_tile : (tile + 1) * per_tile]
                owner[on_edge].append(index)
                if on_edge:
                    edges += [masks.edges[own_tile - tile] * TILE + offset for offset in piece.offsets()]
        rows = torch.tensor([offset for piece in pieces for offset in piece.offsets()] + edges)
        height = pieces[0].height
        blind = masks.blind.index_select(0, rows[len(pieces) * height :]).view(-1, 1, height, 1)
        return _Group(
            num_pieces=len(pieces),
            rows=torch.tensor([row for piece in pieces for row in piece.rows()]),
            mask=masks.visible.index_select(0, rows)
            .view(-1, height, 1, TILE)
            .expand(-1, -1, self._group_size, -1)
            .reshape(-1, 1, height * self._group_size, TILE),
            tile_rows=self._cache.tile_rows(torch.tensor(own + tiles[True] + tiles[False]).view(-1, per_tile)),
            owner=torch.tensor(owner[True] + owner[False], dtype=torch.int64),
            blind=blind.expand(-1, -1, -1, self._group_size).flatten(2),
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
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [B, kv_heads, rows, D] against one tile each, [B, kv_heads, TILE, D] → results and log-sum-exp
    [B, kv_heads, rows]. The kernel of F.scaled_dot_product_attention, by its own name: only so it tells the latter."""
    out: torch.Tensor
    lse: torch.Tensor
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=mask, scale=scale
    )
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


def _minus_infinity_where(where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(where.shape, dtype=dtype).masked_fill_(where, float("-inf"))


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
    # Nothing masked, an own tile, and one on the edge of a window.
    masks = _Masks.of(TILE, dtype)
    visible = {None: None, "own": masks.visible[:TILE], "edge": masks.visible[TILE:]}

    def run(height: int, kind: str | None) -> list[torch.Tensor]:
        """Results and log-sum-exp by (position, kv_head, group), for as many positions as whole pieces hold."""
        num_pieces = TILE // height
        rows = queries[: num_pieces * height].view(num_pieces, height, num_kv_heads, group, head_dim)
        mask = visible[kind]
        if mask is not None:
            mask = mask[: num_pieces * height].view(num_pieces, 1, height, 1, TILE).expand(-1, -1, -1, group, -1)
        shape = (num_pieces, -1, -1, -1)
        out, lse = _tiles(
            rows.transpose(1, 2).flatten(2, 3),
            keys.expand(shape),
            values.expand(shape),
            mask.flatten(2, 3) if mask is not None else None,
        )
        order = (num_pieces, num_kv_heads, height, group)
        return [part.reshape(*order, -1).transpose(1, 2).flatten(0, 1) for part in (out, lse)]

    reference = {kind: run(_ALIGN, kind) for kind in visible}

    def agrees(height: int) -> bool:
        for kind, wanted in reference.items():
            for part, whole in zip(run(height, kind), wanted, strict=True):
                if not torch.equal(part, whole[: len(part)]):
                    return False
        return True

    most = TILE if all(agrees(height) for height in range(2 * _ALIGN, TILE + 1, _ALIGN)) else _ALIGN
    return Heights(single=next(height for height in (1, 2, 4, 8, _ALIGN) if agrees(height)), most=most)
