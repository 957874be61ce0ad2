"""How much memory a model takes and what fits into the rest: arithmetic only, done before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from workers.model_config import ModelConfig, tensor_shapes

__all__ = ["MemoryPlan", "Precision", "kv_bytes_per_token", "plan_memory", "weights_bytes"]

Precision = Literal["fp32", "bf16", "int8"]

_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    precision: Precision
    weights_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    """Tokens of one request, prompt and answer: what the model allows and the KV memory holds."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    def requests_that_fit(self, num_tokens: int) -> int:
        """How many requests of this length, sharing nothing, can run at once."""
        return self.num_blocks // math.ceil(num_tokens / self.block_size)

    def describe(self) -> str:
        """For people, one fact a line."""
        tokens = self.num_blocks * self.block_size
        lengths = sorted({min(1024, self.max_model_len), min(8192, self.max_model_len), self.max_model_len})
        room = ", ".join(f"{self.requests_that_fit(length):,} of {length:,} tokens" for length in lengths)
        return (
            f"weights    {_mib(self.weights_bytes)} as {self.precision}\n"
            f"KV cache   {_mib(self.kv_bytes)}: {tokens:,} tokens of {self.kv_bytes_per_token:,} bytes, "
            f"in {self.num_blocks:,} blocks of {self.block_size}\n"
            f"context    {self.max_model_len:,} tokens\n"
            f"requests   {room} at once, if they share nothing"
        )


def plan_memory(
    config: ModelConfig,
    precision: Precision,
    *,
    kv_bytes: int,
    block_size: int,
    max_model_len: int | None = None,
    kv_fp32: bool = False,
) -> MemoryPlan:
    """Raises ValueError when `kv_bytes` holds no block, or `max_model_len` is more than the model was made for.

    `kv_fp32`: for CPUs that do not multiply bf16; in precision fp32 it goes without saying.
    """
    per_token = kv_bytes_per_token(config, fp32=kv_fp32 or precision == "fp32")
    num_blocks = kv_bytes // (per_token * block_size)
    if not num_blocks:
        raise ValueError(f"a KV memory of {kv_bytes:,} bytes holds no block: one takes {per_token * block_size:,}")
    if max_model_len is not None and max_model_len > config.max_positions:
        raise ValueError(f"the model's context is {config.max_positions:,} tokens; {max_model_len:,} were asked for")
    return MemoryPlan(
        precision=precision,
        weights_bytes=weights_bytes(config, precision),
        kv_bytes_per_token=per_token,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=min(max_model_len or config.max_positions, num_blocks * block_size),
    )


def kv_bytes_per_token(config: ModelConfig, *, fp32: bool) -> int:
    """A key and a value for each layer and KV head, in bf16 unless told otherwise."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * (4 if fp32 else 2)


def weights_bytes(config: ModelConfig, precision: Precision) -> int:
    """Of the packed model: matrices in its precision, int8 ones with an fp32 scale a row, the embedding in bf16 at most, the
    rest in fp32."""
    total = 0
    for name, shape in tensor_shapes(config).items():
        size = math.prod(shape)
        if name == "model.embed_tokens.weight":
            total += size * (4 if precision == "fp32" else 2)
            if config.tied_head and precision == "int8":
                total += _matrix_bytes(shape, precision)  # as the head it is packed once more
        elif len(shape) == 2:
            total += _matrix_bytes(shape, precision)
        else:
            total += 4 * size
    return total


def _matrix_bytes(shape: tuple[int, ...], precision: Precision) -> int:
    scales = 4 * shape[0] if precision == "int8" else 0
    return math.prod(shape) * _BYTES[precision] + scales


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
