"""What a decoder looks like: `ModelConfig`, read from a Hugging Face ``config.json`` or from GGUF metadata.

One decoder (`workers.model`) serves several families; what differs between them is a flag here. Whatever a file asks for and
the decoder does not do is refused by name, because a model that runs with half of its configuration ignored answers with
plausible nonsense. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.gguf_file import read_gguf
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported

__all__ = [
    "ModelConfig",
    "check_tensors",
    "config_from_gguf",
    "config_from_hf",
    "read_config",
    "read_json",
    "tensor_shapes",
    "weight_files",
]

_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_divisors: tuple[float, ...] = ()
    """Scaled RoPE: by how much the frequency of each pair of dimensions is divided. Empty: by nothing."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k, before RoPE (Qwen3)."""
    tied_head: bool = False
    """The output head is the embedding."""

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in (*sizes, "max_positions", "norm_eps", "rope_theta"):
            if getattr(self, name) <= 0:
                raise ModelDamaged(f"the model's {name} is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelDamaged(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelUnsupported(f"RoPE needs an even head size, the model has {self.head_dim}")
        if self.rope_divisors and len(self.rope_divisors) != self.head_dim // 2:
            raise ModelDamaged(f"{len(self.rope_divisors)} RoPE divisors for heads of {self.head_dim}")

    def rope_frequencies(self) -> list[float]:
        """Radians a token, for each pair of dimensions of a head."""
        frequencies = _frequencies(self.rope_theta, self.head_dim)
        if not self.rope_divisors:
            return frequencies
        return [frequency / divisor for frequency, divisor in zip(frequencies, self.rope_divisors, strict=True)]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name. Loaders translate to these names; the decoder asks for them."""
    hidden, heads, kv_heads = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (heads,), "self_attn.k_proj.bias": (kv_heads,)}
        layer["self_attn.v_proj.bias"] = (kv_heads,)
    if config.o_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ModelDamaged` unless every tensor of the model is there in its shape. Others are left alone."""
    wanted = tensor_shapes(config)
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelDamaged(f"the model has no tensor {missing[0]}{more}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelDamaged(
                f"tensor {name} is {list(found[name])}; by the model's configuration it is {list(shape)}"
            )


def read_config(path: Path) -> ModelConfig:
    """Of a .gguf file or a Hugging Face folder."""
    if path.is_dir():
        return config_from_hf(read_json(path / "config.json"))
    file = read_gguf(path)
    return config_from_gguf(file.metadata, {name: entry.shape for name, entry in file.tensors.items()})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, one or its shards, whether they exist or not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelDamaged(f"{index} has no weight_map")
    # Names only: an index must not lead out of its folder.
    return [folder / Path(name).name for name in sorted(set(map(str, weight_map.values())))]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelDamaged(f"{path} is no JSON object")
    return value


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """From a ``config.json``."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ModelUnsupported(f"models of type {family!r} are not implemented; {_implemented()}")
    _refuse_hf(config, family)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    num_heads = _need(config, "num_attention_heads", int)
    hidden_size = _need(config, "hidden_size", int)
    head_dim = config.get("head_dim") or hidden_size // num_heads
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_need(config, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_need(config, "intermediate_size", int),
        num_layers=_need(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_positions=_need(config, "max_position_embeddings", int),
        norm_eps=_need(config, "rms_norm_eps", float),
        rope_theta=theta,
        rope_divisors=_rope_divisors(rope, theta, head_dim),
        qkv_bias=family == "qwen2" or bias,
        o_bias=family != "qwen2" and bias,
        qk_norm=family == "qwen3",
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse_hf(config: Mapping[str, Any], family: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelUnsupported(f"activation {config['hidden_act']!r} is not implemented; silu is")
    if config.get("quantization_config"):
        raise ModelUnsupported("this folder holds quantized weights; take the original one, or a GGUF file")
    if config.get("mlp_bias"):
        raise ModelUnsupported("a bias in the MLP is not implemented")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelUnsupported("RoPE over a part of each head is not implemented")
    # Qwen configurations always name a window and say elsewhere whether it is used; Mistral's say it by null.
    if config.get("sliding_window") and config.get("use_sliding_window", family in ("llama", "mistral")):
        raise ModelUnsupported("sliding-window attention is not implemented")


def _frequencies(theta: float, head_dim: int) -> list[float]:
    return [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]


def _rope_divisors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ()
    if kind not in ("linear", "llama3"):
        raise ModelUnsupported(f"RoPE scaling {kind!r} is not implemented; linear and llama3 are")
    factor = _need(rope, "factor", float)
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    # Llama 3.1 and later: frequencies that turn often within the original context stay, those that turn seldom are
    # stretched by the whole factor, with a ramp between.
    low, high = _need(rope, "low_freq_factor", float), _need(rope, "high_freq_factor", float)
    original = _need(rope, "original_max_position_embeddings", int)
    turns = [original * frequency / (2 * math.pi) for frequency in _frequencies(theta, head_dim)]
    kept = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    return tuple(1 / ((1 - part) / factor + part) for part in kept)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """From a GGUF file's metadata, and its tensors' shapes for what the metadata leaves out.

    Llama 3's RoPE scaling is no metadata there but a tensor of divisors, which `workers.load_gguf` adds.
    """
    family = metadata.get("general.architecture")
    if family not in _FAMILIES:
        raise ModelUnsupported(f"GGUF models of type {family!r} are not implemented; {_implemented()}")

    def get(key: str) -> Any:
        return metadata.get(f"{family}.{key}")

    def need(key: str, kind: type[int] | type[float]) -> Any:
        return _need(metadata, f"{family}.{key}", kind)

    if get("attention.sliding_window"):
        raise ModelUnsupported("sliding-window attention is not implemented")
    if get("expert_count"):
        raise ModelUnsupported("mixture-of-experts models are not implemented")
    hidden_size = need("embedding_length", int)
    num_heads = need("attention.head_count", int)
    head_dim = get("attention.key_length") or hidden_size // num_heads
    if get("rope.dimension_count") not in (None, head_dim):
        raise ModelUnsupported("RoPE over a part of each head is not implemented")
    kind = get("rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise ModelUnsupported(f"RoPE scaling {kind!r} is not implemented; linear and llama3 are")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelDamaged("the file has no token embedding")
    return ModelConfig(
        family=family,
        vocab_size=embedding[0],
        hidden_size=hidden_size,
        intermediate_size=need("feed_forward_length", int),
        num_layers=need("block_count", int),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        max_positions=need("context_length", int),
        norm_eps=need("attention.layer_norm_rms_epsilon", float),
        rope_theta=float(get("rope.freq_base") or 10_000.0),
        rope_divisors=(need("rope.scaling.factor", float),) * (head_dim // 2) if kind == "linear" else (),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied_head="output.weight" not in tensors,
    )


def _implemented() -> str:
    return "implemented are " + ", ".join(_FAMILIES)


def _need(config: Mapping[str, Any], key: str, kind: type[int] | type[float]) -> Any:
    """A positive number, or `ModelDamaged`."""
    value = config.get(key)
    known = (int,) if kind is int else (int, float)
    if not isinstance(value, known) or isinstance(value, bool) or value <= 0:
        raise ModelDamaged(f"the model's configuration says {value!r} for {key}")
    return kind(value)
