from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.tiny_models import CONFIGS, LLAMA3_ROPE, make_hf
from workers.model_config import (
    ModelConfig,
    check_tensors,
    config_from_gguf,
    config_from_hf,
    read_config,
    read_json,
    tensor_shapes,
)
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 112,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def test_what_a_short_configuration_leaves_out_has_the_usual_values() -> None:
    config = config_from_hf(LLAMA)

    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10_000.0)
    assert (config.tied_head, config.qkv_bias, config.o_bias, config.qk_norm, config.rope_divisors) == (False,) * 4 + (
        (),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_those_of_transformers(name: str) -> None:
    model = make_hf(name)

    shapes = tensor_shapes(config_from_hf(model.config.to_dict()))

    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert shapes == wanted


def test_llama3_rope_is_read_in_its_old_and_new_form() -> None:
    old = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}

    configs = [
        config_from_hf(LLAMA | {"rope_parameters": LLAMA3_ROPE}),
        config_from_hf(LLAMA | {"rope_scaling": old, "rope_theta": 10_000.0}),
    ]

    assert configs[0] == configs[1]
    assert configs[0].rope_divisors[0] == pytest.approx(1.0)
    assert configs[0].rope_divisors[-1] == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma3_text"}, "gemma3_text"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"mlp_bias": True}, "MLP"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelUnsupported, match=says):
        config_from_hf(LLAMA | changes)


def test_a_window_that_is_switched_off_is_no_window() -> None:
    config_from_hf(LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    config_from_hf(LLAMA | {"model_type": "mistral", "sliding_window": None})


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": None},
        {"hidden_size": "64"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": True},
    ],
)
def test_numbers_that_make_no_model_are_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelDamaged):
        config_from_hf(LLAMA | changes)


def test_gguf_metadata_is_read() -> None:
    config = config_from_gguf(GGUF, {"token_embd.weight": (96, 64), "output.weight": (96, 64)})

    assert config == config_from_hf(LLAMA)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.attention.sliding_window": 512}, "sliding-window"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    ],
)
def test_gguf_metadata_that_is_not_implemented_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelUnsupported, match=says):
        config_from_gguf(GGUF | changes, {"token_embd.weight": (96, 64)})


def test_gguf_metadata_without_a_number_is_damage() -> None:
    metadata = {key: value for key, value in GGUF.items() if key != "llama.block_count"}

    with pytest.raises(ModelDamaged, match=r"llama\.block_count"):
        config_from_gguf(metadata, {"token_embd.weight": (96, 64)})
    with pytest.raises(ModelDamaged, match="embedding"):
        config_from_gguf(GGUF, {})


def test_tensors_are_checked_by_name_and_shape() -> None:
    config = config_from_hf(LLAMA)
    shapes = tensor_shapes(config)
    check_tensors(config, shapes | {"something.else": (1,)})

    with pytest.raises(ModelDamaged, match=r"no tensor model\.norm\.weight"):
        check_tensors(config, {name: shape for name, shape in shapes.items() if name != "model.norm.weight"})
    with pytest.raises(ModelDamaged, match=r"model\.norm\.weight is \[63\]"):
        check_tensors(config, shapes | {"model.norm.weight": (63,)})


def test_files_that_are_no_configuration_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json does not exist"):
        read_config(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelDamaged, match=r"config\.json"):
            read_json(tmp_path / "config.json")


def test_a_configuration_cannot_be_made_wrong() -> None:
    config = config_from_hf(LLAMA)
    values = {name: getattr(config, name) for name in ModelConfig.__slots__}

    with pytest.raises(ModelDamaged, match="divisors"):
        ModelConfig(**values | {"rope_divisors": (1.0,)})
