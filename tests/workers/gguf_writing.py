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


_GEMMA = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, family: str = "llama") -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, suffix = stem.split(".", 3)
    known = _SUFFIXES | _GEMMA if family == "gemma3" else _SUFFIXES
    return f"blk.{layer}.{known[suffix]}.{kind}"


def write_gguf(
    path: Path,
    weights: Weights,
    names: Mapping[str, tuple[int, ...]],
    kind: GGMLQuantizationType,
    metadata: Mapping[str, Any] = {},
    extra: Mapping[str, torch.Tensor] = {},
    packed: Mapping[str, tuple[Any, GGMLQuantizationType]] = {},
) -> None:
    """Matrices as `kind`, vectors in fp32; q and k of Llama models permuted, as llama.cpp's converter does.

    `packed`: tensors that are given as the file's bytes, in place of those of `weights`.
    """
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
    tensors = {gguf_name(name, config.family): _permuted(weights, name) for name in names} | dict(extra)
    for name, tensor in tensors.items():
        if name in packed:
            data, stored = packed[name]
            writer.add_tensor(name, data, raw_dtype=stored)
            continue
        stored = kind if tensor.dim() == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(tensor.float().numpy()), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def k_blocks(kind: GGMLQuantizationType, seed: int = 0, shape: tuple[int, int] = (64, 256)) -> tuple[Any, torch.Tensor]:
    """A matrix in a K type, which the package reads but does not write: its bytes, and what they mean by the format's
    description. Drawn as the numbers that a block consists of, so no search for good scales is needed."""
    generator = np.random.default_rng(seed)
    count = shape[0] * shape[1] // 256
    scale = generator.uniform(0.5, 2, (count, 1)).astype(np.float16)
    if kind == GGMLQuantizationType.Q6_K:
        q = generator.integers(0, 64, (count, 256))
        scales = generator.integers(-128, 128, (count, 16))
        # Two halves of 128; in each, groups of 32: low bits of groups 0 and 2 share bytes, 1 and 3 too, high bits all four.
        group = q.reshape(count, 2, 4, 32)
        low = np.concatenate(
            [group[:, :, 0] % 16 | group[:, :, 2] % 16 << 4, group[:, :, 1] % 16 | group[:, :, 3] % 16 << 4], 2
        )
        top = np.bitwise_or.reduce([group[:, :, i] // 16 << 2 * i for i in range(4)])
        parts = [low, top, scales.astype(np.int8).view(np.uint8), scale.view(np.uint8)]
        values = scale.astype(np.float32) * np.repeat(scales, 16, 1) * (q - 32)
    else:
        bits = 5 if kind == GGMLQuantizationType.Q5_K else 4
        q = generator.integers(0, 1 << bits, (count, 256))
        lowest = generator.uniform(0.5, 2, (count, 1)).astype(np.float16)
        s, m = generator.integers(0, 64, (2, count, 8))
        # Eight groups of 32, each with a 6-bit scale and minimum, of which the last four give their top bits to the first.
        packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] % 16 | m[:, 4:] % 16 << 4]
        group = q.reshape(count, 4, 2, 32)
        low = group[:, :, 0] % 16 | group[:, :, 1] % 16 << 4
        eighth = q.reshape(count, 8, 32)
        high = [np.bitwise_or.reduce([eighth[:, i] // 16 << i for i in range(8)])] if bits == 5 else []
        parts = [scale.view(np.uint8), lowest.view(np.uint8), *packed, *high, low]
        scaled = scale.astype(np.float32) * s
        values = np.repeat(scaled, 32, 1) * q - np.repeat(lowest.astype(np.float32) * m, 32, 1)
    data = np.concatenate([np.asarray(part).reshape(count, -1).astype(np.uint8) for part in parts], 1)
    return data.reshape(shape[0], -1), torch.from_numpy(values.reshape(shape).astype(np.float32))


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
