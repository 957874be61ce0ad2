from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from tests.workers.gguf_writing import gguf_name, write_gguf
from tests.workers.tiny_models import CONFIGS, make_hf, weights_of
from workers.load_gguf import load_gguf
from workers.model_config import tensor_shapes
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported
from workers.weights import Weights


def write(path: Path, weights: Weights, kind: Kind = Kind.F32, **options: object) -> Path:
    write_gguf(path, weights, tensor_shapes(weights.config), kind, **options)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("name", ["llama", "llama tied", "llama with biases", "qwen2", "qwen3"])
def test_a_written_model_is_read_back(name: str, tmp_path: Path) -> None:
    weights = weights_of(make_hf(name))

    found = load_gguf(write(tmp_path / "model.gguf", weights))

    assert replace(found.config, norm_eps=weights.config.norm_eps) == weights.config
    assert found.config.norm_eps == pytest.approx(weights.config.norm_eps)
    for tensor in tensor_shapes(weights.config):
        assert torch.equal(found.load(tensor), weights.load(tensor)), tensor


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Kind.F16, 1e-3), (Kind.BF16, 4e-3), (Kind.Q8_0, 1e-2), (Kind.Q4_1, 0.1), (Kind.Q4_0, 0.15), (Kind.Q5_0, 0.1)],
)
def test_every_storage_type_gives_the_values_near_those_written(kind: Kind, tolerance: float, tmp_path: Path) -> None:
    weights = weights_of(make_hf("llama"))
    config = replace(weights.config, intermediate_size=128)  # rows of these types come in groups of 32
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    weights = Weights(config, "", tensors.__getitem__)

    found = load_gguf(write(tmp_path / "model.gguf", weights, kind))

    for name, wanted in tensors.items():
        tensor = found.load(name)
        assert tensor.dtype in (torch.float32, torch.bfloat16)
        assert (tensor.float() - wanted).norm() / wanted.norm() < tolerance, name


def test_rope_divisors_of_llama_3_become_a_part_of_the_configuration(tmp_path: Path) -> None:
    weights = weights_of(make_hf("llama3 rope"))
    divisors = torch.tensor(weights.config.rope_divisors)

    found = load_gguf(write(tmp_path / "model.gguf", weights, extra={"rope_freqs.weight": divisors}))

    assert found.config.rope_divisors == pytest.approx(weights.config.rope_divisors)
    assert found.config.rope_divisors[-1] == pytest.approx(8.0)


def test_digest_tells_files_apart(tmp_path: Path) -> None:
    weights = weights_of(make_hf())
    other = Weights(weights.config, "", lambda name: weights.load(name) + (name == "model.norm.weight"))

    digests = [load_gguf(write(tmp_path / f"{i}.gguf", w)).digest for i, w in enumerate((weights, weights, other))]

    assert digests[0] == digests[1] != digests[2]


def test_a_truncated_file_is_damaged_wherever_it_ends(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", weights_of(make_hf())).read_bytes()
    cut = tmp_path / "cut.gguf"

    for size in (0, 3, 20, 100, 700, len(whole) // 2, len(whole) - 5000):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelDamaged, match=r"truncated|empty|no GGUF"):
            load_gguf(cut)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = weights_of(make_hf())
    names = tensor_shapes(weights.config)
    del names["model.layers.1.mlp.up_proj.weight"]
    write_gguf(tmp_path / "model.gguf", weights, names, Kind.F32)

    with pytest.raises(ModelDamaged, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_gguf(tmp_path / "model.gguf")


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    weights = weights_of(make_hf())
    smaller = Weights(
        weights.config, "", lambda name: weights.load(name)[:50] if "down_proj" in name else weights.load(name)
    )

    with pytest.raises(ModelDamaged, match=r"down_proj\.weight is \[50, 112\].* it is \[64, 112\]"):
        load_gguf(write(tmp_path / "model.gguf", smaller))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    weights = weights_of(make_hf())
    gemma = Weights(replace(weights.config, family="gemma3"), "", weights.load)

    with pytest.raises(ModelUnsupported, match="gemma3"):
        load_gguf(write(tmp_path / "model.gguf", gemma))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        load_gguf(tmp_path / "model.gguf")


def test_names_of_the_file_lead_to_ours() -> None:
    # The writer's table is the loader's turned round; together they must cover every family.
    for name in CONFIGS:
        config = weights_of(make_hf(name)).config
        assert len({gguf_name(tensor) for tensor in tensor_shapes(config)}) == len(tensor_shapes(config))
