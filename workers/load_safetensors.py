"""A Hugging Face folder → `Weights`: ``config.json`` and safetensors, in one file or in shards.

Tensors are views of the mapped files, so only what the decoder packs anew takes memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from workers.model_config import check_tensors, read_config, weight_files
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported
from workers.weights import Weights, digest_files

__all__ = ["load_safetensors"]

_DTYPES: Final = ("F32", "F16", "BF16")


def load_safetensors(folder: Path) -> Weights:
    config = read_config(folder)
    paths = weight_files(folder)
    files = [_open(path) for path in paths]
    owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping: keys() is all it has)
    shapes = {}
    for name, file in owner.items():
        view = file.get_slice(name)
        if view.get_dtype() not in _DTYPES:
            raise ModelUnsupported(f"tensor {name} is {view.get_dtype()}; {', '.join(_DTYPES)} can be read")
        shapes[name] = tuple(view.get_shape())
    check_tensors(config, shapes)

    def load(name: str) -> torch.Tensor:
        tensor: torch.Tensor = owner[name].get_tensor(name)
        if config.family == "gemma3" and name.endswith("norm.weight"):
            return tensor.float() + 1  # stored so that zero does nothing
        return tensor.float() if tensor.dtype == torch.float16 else tensor

    return Weights(config, digest_files(paths), load)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} does not exist; a model folder needs its weights as safetensors") from error
    except SafetensorError as error:
        raise ModelDamaged(f"{path} is damaged or truncated: {error}") from error
