from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.tiny_models import BLOCK_SIZE, scheduled
from workers.attention import TILE, Attention, Heights, KVCache, choose_heights
from workers.vector_math import settle_vector_math

settle_vector_math()  # as the runner does

HEADS, KV_HEADS, DIM = 6, 2, 32
NUM_BLOCKS = 96
FAST = choose_heights(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16)
SAFE = Heights(single=16, most=16)
"""What is left when a machine's kernel fails every comparison."""


class Paged:
    """One layer over one sequence whose q, k and v are given, and whose blocks lie anywhere among garbage."""

    def __init__(
        self, length: int, dtype: torch.dtype, heights: Heights, window: int | None = None, scale: float | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.length = length
        self.window = window
        self.scale = scale
        self.q = torch.randn(length, HEADS, DIM, generator=generator).to(dtype)
        self.kv = torch.randn(length, 2 * KV_HEADS, DIM, generator=generator).to(dtype)
        self.cache = KVCache(
            num_layers=1,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=dtype,
        )
        self.cache.layers[0].copy_(torch.randn(self.cache.layers[0].shape, generator=generator) * 1e4)
        self.table: list[int] = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.attention = Attention(num_heads=HEADS, cache=self.cache, heights=heights, windows=[window], scale=scale)

    def run(self, start: int, end: int) -> torch.Tensor:
        plan = self.attention.plan([scheduled([0] * (end - start), start, self.table)])
        self.cache.write(0, plan.slots, self.kv[start:end])
        return self.attention.attend(0, self.q[start:end], plan)

    def run_cut(self, cuts: Sequence[int]) -> torch.Tensor:
        edges = [0, *sorted({cut for cut in cuts if 0 < cut < self.length}), self.length]
        return torch.cat([self.run(start, end) for start, end in pairwise(edges)])

    def plainly(self) -> torch.Tensor:
        """The definition, in fp64."""
        q = self.q.double().transpose(0, 1)  # [H, N, D]
        k, v = (
            part.double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for part in self.kv.chunk(2, dim=1)
        )
        scores = q @ k.transpose(1, 2) * (self.scale or DIM**-0.5)
        position = torch.arange(self.length)
        back = position.unsqueeze(1) - position
        scores.masked_fill_((back < 0) | (back >= (self.window or self.length)), float("-inf"))
        result: torch.Tensor = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return result


# 7e-7 in fp32. The 2e-5 that were seen now and then in the first computation of a process are told in workers.vector_math.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("heights", [FAST, SAFE])
@pytest.mark.parametrize("window", [None, 1, 100, 255, 256, 257, 513, 1000])
def test_result_is_that_of_the_definition(
    dtype: torch.dtype, tolerance: float, heights: Heights, window: int | None
) -> None:
    paged = Paged(900, dtype, heights, window, scale=None if window is None else 0.3)

    found = paged.run(0, 900)

    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), paged.plainly(), atol=tolerance, rtol=tolerance)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 699), max_size=12),
    heights=st.sampled_from([FAST, SAFE]),
    window=st.none() | st.integers(1, 700),
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(cuts: list[int], heights: Heights, window: int | None) -> None:
    whole = Paged(700, torch.bfloat16, heights, window).run(0, 700)

    assert torch.equal(Paged(700, torch.bfloat16, heights, window).run_cut(cuts), whole)


@pytest.mark.parametrize("heights", [FAST, SAFE])
@pytest.mark.parametrize("window", [None, 200, 256])
def test_bits_of_decoding_are_those_of_prefill(heights: Heights, window: int | None) -> None:
    whole = Paged(520, torch.bfloat16, heights, window).run(0, 520)

    assert torch.equal(Paged(520, torch.bfloat16, heights, window).run_cut(range(520)), whole)


@pytest.mark.parametrize("window", [None, 100, 256, 300])
def test_bits_do_not_depend_on_the_other_rows_of_a_step(window: int | None) -> None:
    lengths = (1, 17, 255, 256, 257, 300, 513, 700)
    alone = Paged(800, torch.bfloat16, FAST, window)
    alone.run(0, 800)
    wanted = [alone.run(length, length + 1) for length in lengths]
    batch = [scheduled([0], length, alone.table) for length in lengths] + [scheduled([0] * 40, 60, alone.table)]

    plan = alone.attention.plan(batch)
    rows = torch.cat([alone.q[[*lengths]], alone.q[60:100]])
    together = alone.attention.attend(0, rows, plan)

    assert torch.equal(together[: len(lengths)], torch.cat(wanted))
    assert torch.equal(together[len(lengths) :], alone.run(60, 100))


def test_a_window_reads_no_tile_outside_of_it() -> None:
    paged = Paged(900, torch.bfloat16, FAST, window=300)
    paged.run(0, 900)
    wanted = paged.run(890, 900)
    blocks = torch.tensor(paged.table[: TILE // BLOCK_SIZE])
    paged.cache.layers[0].view(2 * KV_HEADS, NUM_BLOCKS, -1)[:, blocks] = float("nan")

    assert torch.equal(paged.run(890, 900), wanted)


def test_heads_without_groups_get_rows_enough() -> None:
    # One row a head is a shape of its own for many kernels; whatever is chosen must divide a tile.
    heights = choose_heights(num_heads=4, num_kv_heads=4, head_dim=16, dtype=torch.bfloat16)

    assert TILE % heights.single == 0
    assert TILE % heights.most == 0


def test_a_new_cache_is_zero() -> None:
    cache = KVCache(num_layers=2, num_blocks=3, block_size=16, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)

    assert [layer.shape for layer in cache.layers] == [(2 * 2 * 3 * 16, 8)] * 2
    assert not any(layer.any() for layer in cache.layers)
