"""The one form in which every loader hands over a model: its configuration and its tensors by name.

Tensors are made when asked for and not kept, so loading never holds a second copy of the model: the decoder takes one, packs
it in its own precision, and lets it go before it takes the next.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from workers.model_config import ModelConfig

__all__ = ["Weights", "digest_files"]


@dataclass(frozen=True, slots=True)
class Weights:
    config: ModelConfig
    digest: str
    """Equal digests: the same numbers, up to what an attacker could do. A part of `EngineInfo.numerics`."""
    load: Callable[[str], torch.Tensor]
    """Name (`workers.model_config.tensor_shapes`) → fp32 or bf16 tensor, whichever holds the file's values. Its memory may be
    the file's own, so it is for reading. A norm's weight is what is multiplied by, in every family."""


def digest_files(paths: Iterable[Path]) -> str:
    """XXH3-128 of the files' bytes in this order. 10 GB/s: it costs no more than the reading that loading needs anyway."""
    hasher = xxhash.xxh3_128(b"warmpath-weights/1")
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
    return hasher.hexdigest()
