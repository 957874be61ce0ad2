from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from workers.model_errors import ModelDamaged, ModelError, ModelNotFound, ModelUnsupported

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
GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 112,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}

QWEN = {key.replace("llama.", "qwen2."): value for key, value in GGUF.items() if key.startswith("llama.")}


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
        ({"model_type": "gemma3"}, "'gemma3'"),
        ({"model_type": ["llama"]}, "llama"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "truncate"),
        ({"hidden_act": "gelu"}, "gelu"),
        (GEMMA | {"hidden_activation": "silu"}, "silu"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "soft-capped"),
        (GEMMA | {"use_bidirectional_attention": True}, "later tokens"),
        (GEMMA | {"layer_types": ["chunked_attention"]}, "chunked"),
        (GEMMA | {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "window"),
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
    off: list[dict[str, Any]] = [
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "mistral", "sliding_window": None},
        {"sliding_window": None},
    ]

    assert [config_from_hf(LLAMA | changes).windows for changes in off] == [()] * 3


def test_each_family_says_in_its_own_way_which_layers_have_a_window() -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        return config_from_hf(LLAMA | changes).windows

    qwen: dict[str, Any] = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64}
    assert windows(model_type="mistral", sliding_window=64) == (64, 64)
    assert windows(model_type="mistral") == (4096, 4096)  # what `transformers` takes when a file says nothing
    assert windows(**qwen, max_window_layers=1) == (None, 64)
    assert windows(**qwen, layer_types=["sliding_attention", "full_attention"]) == (64, None)
    assert windows(**GEMMA) == (512,) * 5 + (None, 512)
    assert windows(**GEMMA, sliding_window_pattern=2) == (512, None) * 3 + (512,)


def test_a_short_gemma_configuration_has_the_usual_values() -> None:
    config = config_from_hf(LLAMA | GEMMA)

    assert (config.family, config.head_dim, config.rope_theta, config.local_rope_theta) == ("gemma3", 256, 1e6, 1e4)
    assert (config.attention_scale, config.embedding_scale) == (None, 8.0)
    assert config.qk_norm
    assert config.post_norms
    assert config.gelu
    assert config.tied_head
    assert [config.is_local(layer) for layer in range(7)] == [True] * 5 + [False, True]


def test_gemma_scales_the_rope_of_layers_that_see_everything() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }

    configs = [config_from_hf(LLAMA | GEMMA | form) for form in (old, new)]

    assert configs[0] == configs[1]
    assert configs[0].rope_frequencies()[0] == pytest.approx(1 / 8)
    assert configs[0].rope_frequencies(local=True)[:2] == pytest.approx([1.0, 5e3 ** (-2 / 256)])


def test_yarn_makes_room_for_what_it_was_made_for() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

    config = config_from_hf(LLAMA | {"model_type": "qwen2", "rope_scaling": rope})

    assert config.max_positions == 4096
    assert config.rope_divisors[0] == 1.0
    assert config.rope_divisors[-1] == pytest.approx(4.0)
    assert config.rope_magnitude == pytest.approx(1.1386, abs=1e-4)


JUNK: tuple[Any, ...] = (None, "x", -1, 0, 1, 2, 1.5, float("inf"), float("nan"), True, [], ["x"], {}, {"rope_type": 3})
HF_KEYS = (
    *LLAMA,
    "head_dim",
    "num_key_value_heads",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "query_pre_attn_scalar",
)
ROPE_KEYS = (
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)


@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]),
    kind=st.sampled_from([None, "linear", "llama3", "yarn"]),
    junk=st.dictionaries(st.sampled_from(HF_KEYS), st.sampled_from(JUNK), max_size=2),
    rope_junk=st.dictionaries(st.sampled_from(ROPE_KEYS), st.sampled_from(JUNK), max_size=2),
)
def test_any_configuration_is_read_or_refused(
    family: str, kind: str | None, junk: dict[str, Any], rope_junk: dict[str, Any]
) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | rope_junk
    scaled = {"rope_scaling": rope} if kind else {}

    with contextlib.suppress(ModelError):
        config = config_from_hf(LLAMA | {"model_type": family, "use_sliding_window": True} | scaled | junk)
        assert all(0 < frequency < math.inf for frequency in config.rope_frequencies())


@given(
    family=st.sampled_from(["llama", "qwen2", "gemma3"]),
    junk=st.dictionaries(
        st.sampled_from(
            [
                *(key.removeprefix("llama.") for key in GGUF if key.startswith("llama.")),
                "attention.head_count_kv",
                "attention.key_length",
                "attention.sliding_window",
                "attention.sliding_window_pattern",
                "rope.freq_base",
                "rope.freq_base_swa",
                "rope.scaling.type",
                "rope.scaling.factor",
            ]
        ),
        st.sampled_from([*JUNK, "yarn", "linear"]),
        max_size=3,
    ),
)
def test_any_gguf_metadata_is_read_or_refused(family: str, junk: dict[str, Any]) -> None:
    numbers = {key.removeprefix("llama."): value for key, value in GGUF.items() if key.startswith("llama.")} | junk
    metadata = {"general.architecture": family} | {f"{family}.{key}": value for key, value in numbers.items()}

    with contextlib.suppress(ModelError):
        config_from_gguf(metadata, {"token_embd.weight": (96, 64)})


def test_gguf_files_of_gemma_leave_out_what_the_family_has_in_common() -> None:
    metadata = {key.replace("llama.", "gemma3."): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.block_count": 7, "gemma3.attention.key_length": 256}
    metadata |= {"gemma3.attention.sliding_window": 512, "gemma3.rope.freq_base": 1e6}
    tensors = {"token_embd.weight": (96, 64), "blk.0.attn_q_norm.weight": (256,)}

    found = config_from_gguf(metadata, tensors)
    largest = config_from_gguf(metadata | {"gemma3.block_count": 62}, tensors)
    told = config_from_gguf(
        metadata | {"gemma3.attention.sliding_window_pattern": [False, True] * 3 + [False]}, tensors
    )

    assert found == config_from_hf(LLAMA | GEMMA)
    assert found.attention_scale is None
    assert largest.attention_scale == 0.25  # of hidden size / heads
    assert told.windows == (None, 512) * 3 + (None,)


def test_gguf_yarn_is_that_of_a_folder() -> None:
    metadata = {key.replace("llama.", "qwen2."): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": "qwen2", "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    metadata |= {"qwen2.rope.scaling.original_context_length": 512}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    tensors = dict.fromkeys(("token_embd.weight", "output.weight", "blk.0.attn_q.bias"), (96, 64))

    found = config_from_gguf(metadata, tensors)

    assert found == config_from_hf(LLAMA | {"model_type": "qwen2", "rope_scaling": rope})


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
        ({"general.architecture": "gemma2"}, "gemma2"),
        ({"general.architecture": "qwen2", "qwen2.attention.sliding_window": 512} | QWEN, "sliding-window"),
        ({"llama.final_logit_softcapping": 30.0}, "soft-capped"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.2}, "YaRN"),
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
    for windows in ((64,), (64, 0)):
        with pytest.raises(ModelDamaged, match="windows"):
            ModelConfig(**values | {"windows": windows})
