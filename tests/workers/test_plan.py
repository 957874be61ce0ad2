from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.tiny_models import make_hf, weights_of
from workers.__main__ import _serve_command
from workers.attention import KVCache
from workers.model_config import ModelConfig, config_from_hf
from workers.plan import Precision, kv_bytes_per_token, plan_memory, weights_bytes
from workers.quant import supports_bf16

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

# A model of 70 billion parameters: 80 layers, 8 KV heads of 128 dimensions.
LLAMA_70B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131_072,
    norm_eps=1e-5,
    rope_theta=5e5,
)
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
}


def test_published_figures_of_a_70b_model() -> None:
    assert kv_bytes_per_token(LLAMA_70B, fp32=False) == 327_680
    assert pytest.approx(312, abs=1) == 1000 * 327_680 / (1 << 20)
    assert weights_bytes(LLAMA_70B, "bf16") == pytest.approx(2 * 70.55e9, rel=0.001)


def test_published_figure_of_qwen3_8b_on_a_gpu_of_180_gb() -> None:
    # About 121 requests of 8k tokens: what 90 % of the memory, the part that servers use, leaves beside the weights.
    config = config_from_hf(QWEN3_8B)
    kv_bytes = int(0.9 * 180e9) - weights_bytes(config, "bf16")

    plan = plan_memory(config, "bf16", kv_bytes=kv_bytes, block_size=16)

    assert weights_bytes(config, "bf16") == pytest.approx(16.38e9, rel=0.001)
    assert plan.requests_that_fit(8192) == pytest.approx(121, abs=1)


def test_a_folder_with_nothing_but_a_configuration_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    options = ["--plan-only", "--precision", "bf16", "--kv-memory", "145.6GB", "--cache", str(tmp_path / "cache")]

    result = CliRunner().invoke(_serve_command, [str(tmp_path), *options])

    assert result.exit_code == 0
    assert "weights    15,623.2 MiB as bf16" in result.output
    if supports_bf16():  # else the KV cache is in fp32 here
        assert "tokens of 147,456 bytes" in result.output
        assert "120 of 8,192 tokens, 24 of 40,960 tokens at once" in result.output


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
        "requests   22 of 1,024 tokens, 2 of 8,192 tokens at once, if they share nothing"
    )
