"""A model that computes in a millisecond and knows the default model's words, if not their order: two random layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.default_model import default_model
from workers.tokenizer_files import load_tokenizer_files

__all__ = ["save_tiny_model"]

_WIDTH: Final = 64
_KV_WIDTH: Final = 32
_CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_LAYER: Final = {
    "input_layernorm": (_WIDTH,),
    "self_attn.q_proj": (_WIDTH, _WIDTH),
    "self_attn.k_proj": (_KV_WIDTH, _WIDTH),
    "self_attn.v_proj": (_KV_WIDTH, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH),
    "post_attention_layernorm": (_WIDTH,),
    "mlp.gate_proj": (_WIDTH, _WIDTH),
    "mlp.up_proj": (_WIDTH, _WIDTH),
    "mlp.down_proj": (_WIDTH, _WIDTH),
}


def save_tiny_model(folder: Path) -> None:
    """As a Hugging Face folder. Skips the test where the default model, whose tokenizer it has, cannot be had."""
    import torch  # only for tests that have a real engine
    from safetensors.torch import save_file

    files = load_tokenizer_files(default_model())
    (folder / "tokenizer.json").write_text(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(files.config_json)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (_CONFIG["vocab_size"], _WIDTH), "norm": (_WIDTH,)}
    for layer in range(_CONFIG["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _LAYER.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
