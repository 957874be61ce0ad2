"""Real models in fp32: our weights, and the same ones in `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.initialization import no_init_weights

from tests.workers.tiny_models import hf_model
from workers.load_gguf import load_gguf
from workers.model_config import tensor_shapes
from workers.weights import Weights


def load_fp32(path: Path) -> Weights:
    """Of a GGUF file, unpacked once for both who compute with them."""
    loaded = load_gguf(path)
    tensors = {name: loaded.load(name).float() for name in tensor_shapes(loaded.config)}
    return Weights(loaded.config, loaded.digest, tensors.__getitem__)


def hf_twin(weights: Weights, model_type: str) -> Any:
    """The model of `transformers` that these are the weights of."""
    config = weights.config
    with no_init_weights():
        model = hf_model(
            AutoConfig.for_model(
                model_type,
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                rms_norm_eps=config.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=config.tied_head,
            )
        )
    model.load_state_dict({name: weights.load(name) for name in tensor_shapes(config)}, strict=False, assign=True)
    if config.tied_head:
        model.tie_weights()
    return model
