from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from tests.workers.gguf_writing import gguf_name, k_blocks, write_gguf
from tests.workers.tiny_models import (
    CONFIGS,
    Steps,
    hf_logits,
    make_hf,
    random_ids,
    relative_error,
    scheduled,
    weights_of,
)
from workers.gguf_file import read_gguf
from workers.load_gguf import load_gguf
from workers.load_safetensors import load_safetensors
from workers.model_config import tensor_shapes
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported
from workers.weights import Weights

_GEMMA: dict[str, object] = {
    "gemma3.attention.sliding_window": 200,
    "gemma3.attention.sliding_window_pattern": [True, True, False, True],
}
METADATA: dict[str, dict[str, object]] = {
    "qwen2 yarn": {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 256,
    },
    "gemma3": _GEMMA,
    "gemma3 scaled": _GEMMA
    | {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 5e3,
    },
}


def write(path: Path, weights: Weights, kind: Kind = Kind.F32, **options: object) -> Path:
    write_gguf(path, weights, tensor_shapes(weights.config), kind, **options)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    "name", ["llama", "llama tied", "llama with biases", "qwen2", "qwen2 yarn", "qwen3", "gemma3", "gemma3 scaled"]
)
def test_a_written_model_is_read_back(name: str, tmp_path: Path) -> None:
    weights = weights_of(make_hf(name))

    found = load_gguf(write(tmp_path / "model.gguf", weights, metadata=METADATA.get(name, {})))
    if found.config.family == "gemma3":  # of the scale of its scores a file says nothing
        found = replace(found, config=replace(found.config, attention_scale=weights.config.attention_scale))

    assert replace(found.config, norm_eps=weights.config.norm_eps) == weights.config
    assert found.config.norm_eps == pytest.approx(weights.config.norm_eps)
    for tensor in tensor_shapes(weights.config):
        assert torch.equal(found.load(tensor), weights.load(tensor)), tensor


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Kind.F32, 0.0),
        (Kind.F16, 1e-3),
        (Kind.BF16, 4e-3),
        (Kind.Q8_0, 1e-2),
        (Kind.Q5_1, 0.05),
        (Kind.Q5_0, 0.1),
        (Kind.Q4_1, 0.1),
        (Kind.Q4_0, 0.15),
    ],
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
        assert (tensor.float() - wanted).norm() / wanted.norm() <= tolerance, name


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_every_k_type_gives_the_values_that_its_bytes_mean(kind: Kind, tmp_path: Path) -> None:
    model = weights_of(make_hf("llama"))
    config = replace(model.config, intermediate_size=256)  # rows of these types come in groups of 256
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    data, wanted = k_blocks(kind)
    weights = Weights(config, "", tensors.__getitem__)

    found = load_gguf(write(tmp_path / "model.gguf", weights, packed={"blk.1.ffn_down.weight": (data, kind)}))

    torch.testing.assert_close(found.load("model.layers.1.mlp.down_proj.weight"), wanted)
    assert torch.equal(
        found.load("model.layers.0.mlp.down_proj.weight"), tensors["model.layers.0.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize("name", ["llama3 rope", "qwen2 yarn", "gemma3 scaled"])
def test_a_file_gives_the_logits_of_the_folder_it_was_made_of(name: str, tmp_path: Path) -> None:
    model = make_hf(name)
    model.save_pretrained(tmp_path)
    folder = load_safetensors(tmp_path)
    ids = random_ids(300)
    divisors = {"rope_freqs.weight": torch.tensor(folder.config.rope_divisors)} if name == "llama3 rope" else {}

    file = load_gguf(write(tmp_path / "model.gguf", folder, metadata=METADATA.get(name, {}), extra=divisors))
    file = replace(file, config=replace(file.config, attention_scale=folder.config.attention_scale))

    wanted = hf_logits(model, ids)
    for weights in (folder, file):
        assert relative_error(Steps(weights)(scheduled(ids, 0, range(19))), wanted) < 1e-4


def test_norms_of_gemma_have_their_one_in_a_file_and_not_in_a_folder(tmp_path: Path) -> None:
    model = make_hf("gemma3")
    stored = model.state_dict()["model.norm.weight"]
    model.save_pretrained(tmp_path)
    folder = load_safetensors(tmp_path)
    file = load_gguf(write(tmp_path / "model.gguf", folder, metadata=METADATA["gemma3"]))
    entry = read_gguf(tmp_path / "model.gguf").tensors["output_norm.weight"]
    data = bytearray((tmp_path / "model.gguf").read_bytes()[entry.offset :][: 4 * 64])
    in_file = torch.frombuffer(data, dtype=torch.float32)

    assert torch.equal(in_file, stored + 1)
    assert torch.equal(folder.load("model.norm.weight"), stored + 1)
    assert torch.equal(file.load("model.norm.weight"), stored + 1)
    assert torch.equal(folder.load("model.layers.0.mlp.up_proj.weight"), model.model.layers[0].mlp.up_proj.weight)


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
    gemma = Weights(replace(weights.config, family="gemma2"), "", weights.load)

    with pytest.raises(ModelUnsupported, match="gemma2"):
        load_gguf(write(tmp_path / "model.gguf", gemma))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        load_gguf(tmp_path / "model.gguf")


def test_names_of_the_file_lead_to_ours() -> None:
    # The writer's table is the loader's turned round; together they must cover every family.
    for name in CONFIGS:
        config = weights_of(make_hf(name)).config
        assert len({gguf_name(tensor, config.family) for tensor in tensor_shapes(config)}) == len(tensor_shapes(config))
