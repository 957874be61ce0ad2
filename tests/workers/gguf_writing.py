"""Small GGUF files, written with the reference package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from workers.weights import Weights

_SUFFIXES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, suffix = stem.split(".", 3)
    return f"blk.{layer}.{_SUFFIXES[suffix]}.{kind}"


def write_gguf(
    path: Path,
    weights: Weights,
    names: Mapping[str, tuple[int, ...]],
    kind: GGMLQuantizationType,
    metadata: Mapping[str, Any] = {},
    extra: Mapping[str, torch.Tensor] = {},
) -> None:
    """Matrices as `kind`, vectors in fp32; q and k of Llama models permuted, as llama.cpp's converter does."""
    config = weights.config
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for key, value in metadata.items():
        writer.add_key_value(key, value, _value_type(value), _sub_type(value))
    tensors = {gguf_name(name): _permuted(weights, name) for name in names} | dict(extra)
    for name, tensor in tensors.items():
        stored = kind if tensor.dim() == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(tensor.float().numpy()), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """A file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key, value, _value_type(value), _sub_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value_type(value: Any) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.get_type(value)


def _sub_type(value: Any) -> gguf.GGUFValueType | None:
    return gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None


def _permuted(weights: Weights, name: str) -> torch.Tensor:
    tensor = weights.load(name)
    if weights.config.family != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    heads = weights.config.num_heads if ".q_proj." in name else weights.config.num_kv_heads
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
