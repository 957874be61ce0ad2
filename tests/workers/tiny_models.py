"""Small random models of each family, as `transformers` has them and as our loaders would hand them over."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from workers.attention import Attention, Heights, KVCache
from workers.model import Decoder
from workers.model_config import check_tensors, config_from_hf
from workers.plan import Precision
from workers.protocol import Sampling
from workers.step import ScheduledSeq
from workers.weights import Weights

VOCAB: Final = 96
BLOCK_SIZE: Final = 16

GREEDY: Final = Sampling(max_tokens=1, temperature=0.0)

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_GEMMA: Final[dict[str, Any]] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 48,
    "tie_word_embeddings": True,
    "sliding_window": 200,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA_ROPES: Final[dict[str, Any]] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama without groups": {"model_type": "llama", "num_key_value_heads": 4},
    "llama with biases": {"model_type": "llama", "attention_bias": True},
    "llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "linear rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 100},
    "mistral with a wide window": {"model_type": "mistral", "sliding_window": 512, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 with a window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 300,
        "max_window_layers": 1,
    },
    "qwen2 yarn": {"model_type": "qwen2", "rope_parameters": YARN_ROPE},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3 yarn": {"model_type": "qwen3", "rope_parameters": YARN_ROPE | {"attention_factor": 1.3, "beta_fast": 16.0}},
    "gemma3": _GEMMA,
    "gemma3 scaled": _GEMMA | {"rope_parameters": _GEMMA_ROPES, "tie_word_embeddings": False},
}


def make_hf(name: str = "llama", **changes: Any) -> Any:
    """A `transformers` model in fp32 whose every tensor is random, biases and norms too."""
    options = _SIZES | CONFIGS[name] | changes
    torch.manual_seed(0)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = hf_model(config)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape) * 0.3)
            else:
                tensor.copy_(torch.randn(tensor.shape) * 0.15)
    return model


def hf_model(config: Any) -> Any:
    make: Any = AutoModelForCausalLM.from_config  # not annotated there
    return make(config, dtype=torch.float32, attn_implementation="eager").eval()


def weights_of(model: Any) -> Weights:
    config = config_from_hf(model.config.to_dict())
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if config.family == "gemma3":
        tensors |= {name: tensor + 1 for name, tensor in tensors.items() if tensor.dim() == 1}
    check_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return Weights(config, "tiny", tensors.__getitem__)


@torch.no_grad()
def hf_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab]"""
    logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
    return ids


def scheduled(
    tokens: Sequence[int],
    start: int,
    table: Sequence[int],
    *,
    rid: int = 0,
    sample: bool = True,
    sampling: Sampling = GREEDY,
    prompt: Sequence[int] = (),
) -> ScheduledSeq:
    """A row as the engine makes it: its table is cut to what the positions need. `prompt`: all of it, where that matters."""
    num_blocks = -(-(start + len(tokens)) // BLOCK_SIZE)
    return ScheduledSeq(
        rid=rid,
        tokens=list(tokens),
        start=start,
        block_table=list(table[:num_blocks]),
        sample=sample,
        sampling=sampling,
        prompt_len=len(prompt) or start + len(tokens),
        ids=array("I", prompt),
    )


class Steps:
    """A decoder with its cache, stepped by hand."""

    def __init__(self, weights: Weights, precision: Precision = "fp32") -> None:
        config = weights.config
        self._decoder = Decoder(weights, precision, 1024, config.vocab_size)
        self._cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=128,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32 if precision == "fp32" else torch.bfloat16,
        )
        self._attention = Attention(
            num_heads=config.num_heads,
            cache=self._cache,
            heights=Heights(),
            windows=config.windows,
            scale=config.attention_scale,
        )

    def __call__(self, *batch: ScheduledSeq, sampled: Sequence[int] | None = None) -> torch.Tensor:
        """Logits of the rows `sampled`, of all unless told otherwise."""
        ids = [token for seq in batch for token in seq.tokens]
        positions = [seq.start + i for seq in batch for i in range(len(seq.tokens))]
        hidden = self._decoder.forward(
            torch.tensor(ids), torch.tensor(positions), self._cache, self._attention, self._attention.plan(batch)
        )
        return self._decoder.logits(hidden if sampled is None else hidden[list(sampled)])


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
