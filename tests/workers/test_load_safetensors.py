from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.workers.tiny_models import make_hf
from workers.load_safetensors import load_safetensors
from workers.model_config import tensor_shapes
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported


@pytest.fixture
def model() -> Any:
    return make_hf("llama tied")


def tensors_of(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Without the head, which is the embedding once more."""
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def write_config(folder: Path, model: Any, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | changes, default=str))


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_a_folder_with_one_file_is_read(stored: torch.dtype, loaded: torch.dtype, model: Any, tmp_path: Path) -> None:
    write_config(tmp_path, model)
    tensors = tensors_of(model, stored)
    save_file(tensors, tmp_path / "model.safetensors")

    weights = load_safetensors(tmp_path)

    for name in tensor_shapes(weights.config):
        assert torch.equal(weights.load(name), tensors[name].to(loaded))


def test_what_transformers_saves_is_read(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)

    weights = load_safetensors(tmp_path)

    assert weights.config.tied_head
    for name in tensor_shapes(weights.config):
        assert torch.equal(weights.load(name), model.state_dict()[name])


def write_shards(folder: Path, model: Any) -> None:
    write_config(folder, model)
    tensors = tensors_of(model)
    weight_map: dict[str, str] = {}
    for shard, names in enumerate([sorted(tensors)[::2], sorted(tensors)[1::2]]):
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_folder_with_shards_is_read(model: Any, tmp_path: Path) -> None:
    write_shards(tmp_path, model)

    weights = load_safetensors(tmp_path)

    for name in tensor_shapes(weights.config):
        assert torch.equal(weights.load(name), model.state_dict()[name])


def test_a_missing_shard_is_named(model: Any, tmp_path: Path) -> None:
    write_shards(tmp_path, model)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(ModelNotFound, match="model-00002-of-00002"):
        load_safetensors(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_config(folder, model)
    save_file(tensors_of(model), tmp_path / "elsewhere.safetensors")
    index = {"weight_map": dict.fromkeys(tensors_of(model), "../elsewhere.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelNotFound, match="folder/elsewhere"):
        load_safetensors(folder)


def test_a_truncated_file_is_damaged(model: Any, tmp_path: Path) -> None:
    write_config(tmp_path, model)
    path = tmp_path / "model.safetensors"
    save_file(tensors_of(model), path)
    whole = path.read_bytes()

    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelDamaged, match="damaged or truncated"):
            load_safetensors(tmp_path)


def test_a_missing_tensor_is_named(model: Any, tmp_path: Path) -> None:
    write_config(tmp_path, model)
    tensors = tensors_of(model)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(ModelDamaged, match=r"no tensor model\.norm\.weight"):
        load_safetensors(tmp_path)


def test_a_storage_type_that_is_not_read_is_named(model: Any, tmp_path: Path) -> None:
    write_config(tmp_path, model)
    tensors = tensors_of(model)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(ModelUnsupported, match=r"model\.norm\.weight is I8"):
        load_safetensors(tmp_path)


def test_a_folder_without_weights_is_told(model: Any, tmp_path: Path) -> None:
    write_config(tmp_path, model)

    with pytest.raises(ModelNotFound, match="safetensors"):
        load_safetensors(tmp_path)


def test_a_folder_without_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json does not exist"):
        load_safetensors(tmp_path)
