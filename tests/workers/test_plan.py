from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.tiny_models import make_hf, weights_of
from workers.attention import KVCache
from workers.model_config import ModelConfig
from workers.plan import Precision, kv_bytes_per_token, plan_memory, weights_bytes

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    norm_eps=1e-5,
    rope_theta=1e5,
    tied_head=True,
)


def test_a_token_of_the_default_model_takes_23_kb() -> None:
    assert kv_bytes_per_token(SMOLLM2, fp32=False) == 23_040
    assert kv_bytes_per_token(SMOLLM2, fp32=True) == 46_080
    assert plan_memory(SMOLLM2, "int8", kv_bytes=1 << 30, block_size=16).kv_bytes_per_token == 23_040
    assert plan_memory(SMOLLM2, "fp32", kv_bytes=1 << 30, block_size=16).kv_bytes_per_token == 46_080
    assert plan_memory(SMOLLM2, "int8", kv_bytes=1 << 30, block_size=16, kv_fp32=True).kv_bytes_per_token == 46_080


def test_weights_of_the_default_model() -> None:
    parameters = 134_515_008

    assert weights_bytes(SMOLLM2, "fp32") == 4 * parameters
    assert weights_bytes(SMOLLM2, "bf16") == 2 * parameters + 2 * 61 * 576  # norms stay fp32
    # A byte a weight, and the embedding in bf16 beside the head made of it.
    assert weights_bytes(SMOLLM2, "int8") == pytest.approx(parameters + 2 * 49_152 * 576, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cache_takes_what_was_planned(precision: Precision) -> None:
    config = weights_of(make_hf()).config
    plan = plan_memory(config, precision, kv_bytes=100_000, block_size=16)

    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=plan.num_blocks,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32 if precision == "fp32" else torch.bfloat16,
    )

    assert sum(layer.nbytes for layer in cache.layers) == plan.kv_bytes


@given(kv_bytes=st.integers(23_040 * 16, 1 << 34), length=st.integers(1, 8192))
def test_no_budget_is_exceeded_and_none_left_that_a_block_fits_into(kv_bytes: int, length: int) -> None:
    plan = plan_memory(SMOLLM2, "int8", kv_bytes=kv_bytes, block_size=16)

    assert 0 <= kv_bytes - plan.kv_bytes < 16 * 23_040
    assert plan.max_model_len <= min(8192, plan.num_blocks * 16)
    fit = plan.requests_that_fit(length)
    assert fit * -(-length // 16) <= plan.num_blocks < (fit + 1) * -(-length // 16)


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="368,640"):
        plan_memory(SMOLLM2, "int8", kv_bytes=368_639, block_size=16)


def test_a_longer_context_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="8,192"):
        plan_memory(SMOLLM2, "int8", kv_bytes=1 << 30, block_size=16, max_model_len=8193)


def test_the_plan_is_told_in_four_lines() -> None:
    plan = plan_memory(SMOLLM2, "int8", kv_bytes=512 << 20, block_size=16)

    assert plan.describe() == (
        "weights    183.2 MiB as int8\n"
        "KV cache   511.9 MiB: 23,296 tokens of 23,040 bytes, in 1,456 blocks of 16\n"
        "context    8,192 tokens\n"
        "room for   22 requests of 1,024 tokens at once"
    )
