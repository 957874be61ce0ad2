"""``.gguf`` → `Weights`.

Any tensor type that the `gguf` package can dequantize is taken, whatever the mix; the engine's own precision is chosen later
(`workers.quant`). Three things differ from a Hugging Face folder: names; in Llama files the order of the rows of q and
k, which are stored for RoPE on neighbouring dimensions; in Gemma files the weights of norms, which have the 1 added already
that a folder leaves to the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from workers.gguf_file import GgufFile, TensorEntry, read_gguf
from workers.model_config import ModelConfig, check_tensors, config_from_gguf
from workers.model_errors import ModelDamaged, ModelUnsupported
from workers.weights import Weights, digest_files

__all__ = ["load_gguf"]

_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER: Final = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PERMUTED: Final = ("llama", "mistral")
"""Families whose files hold q and k rows permuted."""

_ROWS: Final = 1024

_ROPE_DIVISORS: Final = "rope_freqs.weight"


def load_gguf(path: Path) -> Weights:
    file = read_gguf(path)
    _check_complete(file)
    config = config_from_gguf(file.metadata, {name: entry.shape for name, entry in file.tensors.items()})
    layer = _GEMMA_LAYER if config.post_norms else _LAYER
    names = {_hf_name(name, layer): name for name in file.tensors}
    if _ROPE_DIVISORS in file.tensors:
        divisors = _dequantize(file, file.tensors[_ROPE_DIVISORS]).tolist()
        config = replace(config, rope_divisors=tuple(divisors))
    check_tensors(config, {hf: file.tensors[name].shape for hf, name in names.items()})

    def load(name: str) -> torch.Tensor:
        tensor = _dequantize(file, file.tensors[names[name]])
        return _unpermute(tensor, config, name) if config.family in _PERMUTED else tensor

    return Weights(config, digest_files([path]), load)


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Names that we do not know stay as they are; nobody asks for them."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    known: Mapping[str, str] = _TOP if layer is None else layer_names
    if stem not in known:
        return name
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{known[stem]}.{kind}"


def _check_complete(file: GgufFile) -> None:
    for name, entry in file.tensors.items():
        end = entry.offset + _num_bytes(name, entry)
        if end > len(file.data):
            raise ModelDamaged(f"{file.path} is truncated: {len(file.data)} bytes, tensor {name} ends at {end}")


def _num_bytes(name: str, entry: TensorEntry) -> int:
    try:
        group, group_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(entry.ggml_type)]
    except ValueError as error:
        raise ModelUnsupported(f"tensor {name} has the unknown GGUF type {entry.ggml_type}") from error
    row = entry.shape[-1] if entry.shape else 1
    if row % group:
        raise ModelDamaged(f"tensor {name} has rows of {row} values, its type packs {group} at a time")
    return math.prod(entry.shape[:-1]) * (row // group) * group_bytes


def _dequantize(file: GgufFile, entry: TensorEntry) -> torch.Tensor:
    kind = GGMLQuantizationType(entry.ggml_type)
    num_bytes = _num_bytes("", entry)
    if kind == GGMLQuantizationType.BF16:
        # The only 16-bit type that the engine computes in; no copy here.
        count = num_bytes // 2
        return torch.frombuffer(file.data, dtype=torch.bfloat16, count=count, offset=entry.offset).view(entry.shape)
    data = np.frombuffer(file.data, np.uint8, num_bytes, entry.offset)
    if kind == GGMLQuantizationType.F32:
        return torch.from_numpy(data.view(np.float32).reshape(entry.shape))
    rows = data.reshape(math.prod(entry.shape[:-1]), -1)
    values = np.empty((len(rows), entry.shape[-1]), np.float32)
    try:
        # The package takes several times the result for its own arrays: a few rows at a time.
        for start in range(0, len(rows), _ROWS):
            values[start : start + _ROWS] = dequantize(rows[start : start + _ROWS], kind)
    except NotImplementedError as error:
        raise ModelUnsupported(f"GGUF tensors of type {kind.name} cannot be read") from error
    return torch.from_numpy(values.reshape(entry.shape))


def _unpermute(tensor: torch.Tensor, config: ModelConfig, name: str) -> torch.Tensor:
    """Rows of each head from 0, half, 1, half + 1, … to 0, 1, …, as Hugging Face has them."""
    if ".q_proj." in name:
        num_heads = config.num_heads
    elif ".k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return tensor
    pairs = tensor.view(num_heads, config.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
