"""What a decoder looks like: `ModelConfig`, read from a Hugging Face ``config.json`` or from GGUF metadata.

One decoder (`workers.model`) serves several families; what differs between them is a flag here. Whatever a file asks for and
the decoder does not do is refused by name, because a model that runs with half of its configuration ignored answers with
plausible nonsense. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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

_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

_HF_TYPES: Final = {"gemma3_text": "gemma3"} | {family: family for family in _FAMILIES if family != "gemma3"}
"""``model_type`` → family. Hugging Face calls gemma3 what has eyes too."""

_ORIGINAL: Final = "original_max_position_embeddings"

_GEMMA_PATTERN: Final = 6
"""Every sixth layer of Gemma 3 sees everything, the others what is near."""
_GEMMA_LOCAL_THETA: Final = 10_000.0
_GEMMA_GLOBAL_THETA: Final = 1_000_000.0
_GEMMA_27B_LAYERS: Final = 62
"""A GGUF file does not hold the scale of the scores. Only the largest Gemma 3 has one that is not of its head size."""


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
    rope_magnitude: float = 1.0
    """What RoPE multiplies q and k by besides turning them (YaRN)."""
    local_rope_theta: float | None = None
    """Of layers with a window, which then are not scaled either. None: they are as the others."""
    windows: tuple[int | None, ...] = ()
    """How many tokens each layer looks back at, its own included. None: all of them; empty: no layer has a window."""
    attention_scale: float | None = None
    """What the scores are multiplied by; None: head_dim ** -0.5."""
    embedding_scale: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k, before RoPE (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """RMS norms also over what attention and MLP add to the residual stream (Gemma 3)."""
    gelu: bool = False
    """The MLP's gate is GELU (tanh form) instead of SiLU."""
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
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelDamaged(f"windows of {len(self.windows)} layers for a model of {self.num_layers}")
        if any(window is not None and window <= 0 for window in self.windows):
            raise ModelDamaged(f"the model's windows are {self.windows}")

    def is_local(self, layer: int) -> bool:
        """Whether the layer has a RoPE of its own, see `local_rope_theta`."""
        return self.local_rope_theta is not None and bool(self.windows) and self.windows[layer] is not None

    def rope_frequencies(self, *, local: bool = False) -> list[float]:
        """Radians a token, for each pair of dimensions of a head."""
        if local and self.local_rope_theta is not None:
            return _frequencies(self.local_rope_theta, self.head_dim)
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
    if config.post_norms:
        layer |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
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
    family = _HF_TYPES.get(str(config.get("model_type")))
    if family is None:
        raise ModelUnsupported(f"models of type {config.get('model_type')!r} are not implemented; {_implemented()}")
    _refuse_hf(config, family)
    gemma = family == "gemma3"
    num_layers = _need(config, "num_hidden_layers", int)
    num_heads = _need(config, "num_attention_heads", int)
    hidden_size = _need(config, "hidden_size", int)
    head_dim = _optional(config, "head_dim", int, 256 if gemma else hidden_size // num_heads)
    max_positions = _need(config, "max_position_embeddings", int)
    rope, local_theta = _hf_rope(config, family)
    theta = _optional(config, "rope_theta", float, _GEMMA_GLOBAL_THETA if gemma else 10_000.0)
    theta = _optional(rope, "rope_theta", float, theta)
    scaling = _rope_scaling(rope, theta, head_dim, max_positions)
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_need(config, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_need(config, "intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_optional(config, "num_key_value_heads", int, num_heads),
        head_dim=head_dim,
        max_positions=max(max_positions, scaling.max_positions),
        norm_eps=_need(config, "rms_norm_eps", float),
        rope_theta=theta,
        rope_divisors=scaling.divisors,
        rope_magnitude=scaling.magnitude,
        local_rope_theta=local_theta,
        windows=_hf_windows(config, family, num_layers),
        attention_scale=_scale_of(_optional(config, "query_pre_attn_scalar", float, 256.0), head_dim)
        if gemma
        else None,
        embedding_scale=math.sqrt(hidden_size) if gemma else None,
        qkv_bias=family == "qwen2" or bias,
        o_bias=family != "qwen2" and bias,
        qk_norm=family == "qwen3" or gemma,
        post_norms=gemma,
        gelu=gemma,
        # Gemma's files leave out what is usual there.
        tied_head=bool(config.get("tie_word_embeddings", gemma)),
    )


def _refuse_hf(config: Mapping[str, Any], family: str) -> None:
    key, usual = ("hidden_activation", "gelu_pytorch_tanh") if family == "gemma3" else ("hidden_act", "silu")
    if config.get(key, usual) != usual:
        raise ModelUnsupported(f"activation {config[key]!r} is not implemented; for this family {usual} is")
    if config.get("quantization_config"):
        raise ModelUnsupported("this folder holds quantized weights; take the original one, or a GGUF file")
    if config.get("mlp_bias"):
        raise ModelUnsupported("a bias in the MLP is not implemented")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelUnsupported("RoPE over a part of each head is not implemented")
    if config.get("final_logit_softcapping") or config.get("attn_logit_softcapping"):
        raise ModelUnsupported("soft-capped logits are not implemented")
    if config.get("use_bidirectional_attention"):
        raise ModelUnsupported("attention to later tokens is not implemented")


def _hf_rope(config: Mapping[str, Any], family: str) -> tuple[Mapping[str, Any], float | None]:
    """The parameters of RoPE, and the base of the layers with a window where they have one of their own."""
    rope, scaling = _mapping(config, "rope_parameters"), _mapping(config, "rope_scaling")
    if family != "gemma3":
        return rope or scaling, None
    local = _mapping(rope, "sliding_attention")
    if local.get("rope_type", "default") != "default":
        raise ModelUnsupported("RoPE scaling of layers with a window is not implemented")
    theta = _optional(config, "rope_local_base_freq", float, _GEMMA_LOCAL_THETA)
    return _mapping(rope, "full_attention") or scaling, _optional(local, "rope_theta", float, theta)


def _hf_windows(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    """Each family says in its own way which layers have a window; where a file says nothing, `transformers` decides."""
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return ()  # they always name one
    if config.get("sliding_window", family in ("mistral", "gemma3")) in (None, False):
        return ()
    if family == "llama":
        raise ModelUnsupported("sliding-window attention is not implemented for models of type 'llama'")
    window = _optional(config, "sliding_window", int, 4096)
    if family == "mistral":
        return (window,) * num_layers
    types = config.get("layer_types")
    if types is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or not all(kind in known for kind in types):
            raise ModelUnsupported(f"layers of types {types!r} are not implemented")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family == "gemma3":
        return _gemma_windows(window, _optional(config, "sliding_window_pattern", int, _GEMMA_PATTERN), num_layers)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ModelDamaged(f"the model's configuration says {first!r} for max_window_layers")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _gemma_windows(window: int, pattern: int, num_layers: int) -> tuple[int | None, ...]:
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))


def _scale_of(scalar: float, head_dim: int) -> float | None:
    return None if scalar == head_dim else scalar**-0.5


def _frequencies(theta: float, head_dim: int) -> list[float]:
    return [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]


@dataclass(frozen=True, slots=True)
class _RopeScaling:
    divisors: tuple[float, ...] = ()
    magnitude: float = 1.0
    max_positions: int = 0
    """What the scaling was made for; 0: as many as the model says anyway."""


def _rope_scaling(rope: Mapping[str, Any], theta: float, head_dim: int, max_positions: int) -> _RopeScaling:
    """From the parameters as Hugging Face names them.

    `dynamic` is not among them, and not only because no model of these families comes with it: it turns all keys anew when a
    text grows, so no key could be kept for another request.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return _RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelUnsupported(f"RoPE scaling {kind!r} is not implemented; linear, llama3 and yarn are")
    factor = _need(rope, "factor", float)
    if kind == "linear":
        return _RopeScaling((factor,) * (head_dim // 2))
    original = _need({_ORIGINAL: max_positions} | dict(rope), _ORIGINAL, int)
    frequencies = _frequencies(theta, head_dim)
    if kind == "llama3":
        # Llama 3.1 and later: frequencies that turn often within the original context stay, those that turn seldom are
        # stretched by the whole factor, with a ramp between.
        low, high = _need(rope, "low_freq_factor", float), _need(rope, "high_freq_factor", float)
        if low >= high:
            raise ModelDamaged(f"RoPE scaling from {low} to {high} turns")
        turns = [original * frequency / (2 * math.pi) for frequency in frequencies]
        kept = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
        return _RopeScaling(tuple(1 / ((1 - part) / factor + part) for part in kept))
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name):
            raise ModelUnsupported(f"YaRN with {name} is not implemented")
    if rope.get("truncate") is False:
        raise ModelUnsupported("YaRN without truncate is not implemented")
    # YaRN: the same idea with a ramp over the pairs, and longer keys and queries, which sharpens attention.
    fast, slow = _optional(rope, "beta_fast", float, 32.0), _optional(rope, "beta_slow", float, 1.0)
    if theta <= 1 or slow >= fast:
        raise ModelDamaged(f"YaRN from {slow} to {fast} turns, with a RoPE base of {theta}")
    pairs = [head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)]
    first, last = max(math.floor(pairs[0]), 0), min(math.ceil(pairs[1]), head_dim - 1)
    stretched = [min(max((pair - first) / (last - first or 0.001), 0.0), 1.0) for pair in range(head_dim // 2)]
    divisors = tuple(1 / (part / factor + 1 - part) for part in stretched)
    magnitude = _optional(rope, "attention_factor", float, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return _RopeScaling(divisors, magnitude, int(factor * original))


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """From a GGUF file's metadata, and its tensors' shapes for what the metadata leaves out.

    Llama 3's RoPE scaling is no metadata there but a tensor of divisors, which `workers.load_gguf` adds.
    """
    family = metadata.get("general.architecture")
    if family not in _FAMILIES:
        raise ModelUnsupported(f"GGUF models of type {family!r} are not implemented; {_implemented()}")
    gemma = family == "gemma3"

    def get(key: str) -> Any:
        return metadata.get(f"{family}.{key}")

    def need(key: str, kind: type[int] | type[float]) -> Any:
        return _need(metadata, f"{family}.{key}", kind)

    def optional(key: str, kind: type[int] | type[float], default: float) -> Any:
        return _optional(metadata, f"{family}.{key}", kind, default)

    if get("expert_count"):
        raise ModelUnsupported("mixture-of-experts models are not implemented")
    if get("final_logit_softcapping") or get("attn_logit_softcapping"):
        raise ModelUnsupported("soft-capped logits are not implemented")
    hidden_size = need("embedding_length", int)
    num_heads = need("attention.head_count", int)
    num_layers = need("block_count", int)
    head_dim = optional("attention.key_length", int, 256 if gemma else hidden_size // num_heads)
    if get("rope.dimension_count") not in (None, head_dim):
        raise ModelUnsupported("RoPE over a part of each head is not implemented")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelDamaged("the file has no token embedding")
    max_positions = need("context_length", int)
    theta = optional("rope.freq_base", float, _GEMMA_GLOBAL_THETA if gemma else 10_000.0)
    scaling = _rope_scaling(_gguf_rope(get), theta, head_dim, max_positions)
    scalar = hidden_size / num_heads if gemma and num_layers == _GEMMA_27B_LAYERS else head_dim
    return ModelConfig(
        family=family,
        vocab_size=embedding[0],
        hidden_size=hidden_size,
        intermediate_size=need("feed_forward_length", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=optional("attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        max_positions=max(max_positions, scaling.max_positions),
        norm_eps=need("attention.layer_norm_rms_epsilon", float),
        rope_theta=theta,
        rope_divisors=scaling.divisors,
        rope_magnitude=scaling.magnitude,
        local_rope_theta=optional("rope.freq_base_swa", float, _GEMMA_LOCAL_THETA) if gemma else None,
        windows=_gguf_windows(metadata, family, num_layers),
        attention_scale=_scale_of(scalar, head_dim),
        embedding_scale=math.sqrt(hidden_size) if gemma else None,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        post_norms=gemma,
        gelu=gemma,
        tied_head="output.weight" not in tensors,
    )


def _gguf_rope(get: Callable[[str], Any]) -> dict[str, Any]:
    kind = get("rope.scaling.type") or "none"
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelUnsupported(f"RoPE scaling {kind!r} is not implemented; linear, llama3 and yarn are")
    factor = get("rope.scaling.factor")
    rope = {"rope_type": kind, "factor": factor, _ORIGINAL: get("rope.scaling.original_context_length")}
    if kind == "yarn":
        rope |= {"beta_fast": get("rope.scaling.yarn_beta_fast"), "beta_slow": get("rope.scaling.yarn_beta_slow")}
        # Here it comes on top of what the factor gives, there it stands for all of it.
        more = get("rope.scaling.attn_factor") or get("rope.scaling.yarn_attn_factor") or 1.0
        if more != 1.0:
            raise ModelUnsupported("YaRN with an attention factor of its own is not implemented for GGUF files")
    return {key: value for key, value in rope.items() if value is not None}


def _gguf_windows(metadata: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    key = f"{family}.attention.sliding_window"
    if not metadata.get(key):
        return ()
    window = _need(metadata, key, int)
    if family == "gemma3":
        pattern = metadata.get(f"{key}_pattern")
        if isinstance(pattern, list):  # for each layer whether it has a window
            return tuple(window if local else None for local in pattern)
        return _gemma_windows(window, _optional(metadata, f"{key}_pattern", int, _GEMMA_PATTERN), num_layers)
    if family in ("llama", "mistral"):  # Mistral's files call themselves llama; there all layers have it
        return (window,) * num_layers
    raise ModelUnsupported(f"sliding-window attention is not implemented for GGUF models of type {family!r}")


def _implemented() -> str:
    return "implemented are " + ", ".join(_FAMILIES)


def _need(config: Mapping[str, Any], key: str, kind: type[int] | type[float]) -> Any:
    """A positive number, or `ModelDamaged`."""
    value = config.get(key)
    known = (int,) if kind is int else (int, float)
    if not isinstance(value, known) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelDamaged(f"the model's configuration says {value!r} for {key}")
    return kind(value)


def _optional(config: Mapping[str, Any], key: str, kind: type[int] | type[float], default: float) -> Any:
    return default if config.get(key) is None else _need(config, key, kind)


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Empty where there is none."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ModelDamaged(f"the model's configuration says {value!r} for {key}")
    return value or {}
