"""The same model in a rotated residual stream, which 8 bits can hold.

In every trained decoder a few dimensions of the residual stream are many times larger than the rest. With one 8-bit scale a
row they leave two or three bits for the others: the default model then no longer knows the capital of France. Between its
norms the stream is only added to and multiplied by matrices, so an orthogonal matrix Q can be worked into these (x Q wherever
the stream is written, Q^T wherever it is read) without changing the function; RMS norms do not notice, once their weights
are moved into the matrices that follow. Q is a product of Hadamard and cosine transforms, which spread each outlier over
all dimensions. (The idea is known from SliceGPT and QuaRot.)

Measured on the default model, 1,919 tokens of chat, int8 against fp32: KL divergence 0.080 without, 0.010 with rotation and
two-byte inputs of the down projection (`workers.quant`), 0.001 for bf16. At run time it costs nothing.

Gemma's norms over what a layer adds stand in the way. With y the output of a product and g the norm's weights, the stream
gets y g / rms(y), and in the rotated one that has to be y g Q / rms(y). The product can be made to give y g Q instead of y,
but then rms(y) is lost: it is that of (y g Q) Q^T / g, so the stream would have to be turned back at run time, for every
row and layer, and bit for bit alike in every batch. Only where all of g is one number is the rms the same. So these models are
not rotated; the inputs of all their products take two bytes instead. Measured on Gemma 3 270M, 1,000 tokens of documentation:
KL divergence 0.006 so, 0.031 with two bytes for the down projection alone, 0.0005 for bf16; prefill takes 1.65 times as long
as with one byte.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch

from workers.model_config import ModelConfig
from workers.weights import Weights

__all__ = ["can_rotate", "rotate"]

_MAX_FACTOR: Final = 64
"""Of the Kronecker product that Q is: applying it costs the sum of its factors for each element, not their product."""

_ROWS: Final = 2048
"""Turned at a time: bounds what a large embedding needs besides its result."""


def can_rotate(config: ModelConfig) -> bool:
    return not config.post_norms


def rotate(weights: Weights) -> Weights:
    """Norm weights become ones, and the head a matrix of its own."""
    assert can_rotate(weights.config)
    factors = _factors(weights.config.hidden_size)

    def reads(name: str, norm: str) -> torch.Tensor:
        """A matrix [out, hidden] that is applied to the normed stream."""
        return _turn(weights.load(name), factors, weights.load(norm).float())

    def writes(name: str) -> torch.Tensor:
        """A matrix [hidden, in], or a bias [hidden], whose result is added to the stream."""
        tensor = weights.load(name)
        if tensor.dim() == 1:
            return _turn(tensor.unsqueeze(0), factors).squeeze(0)
        return _turn(tensor.T, factors).T.contiguous()

    def load(name: str) -> torch.Tensor:
        prefix, _, suffix = name.rpartition("self_attn." if "self_attn." in name else "mlp.")
        if name == "model.embed_tokens.weight":
            return _turn(weights.load(name), factors)
        if name == "lm_head.weight":
            head = "model.embed_tokens.weight" if weights.config.tied_head else name
            return reads(head, "model.norm.weight")
        if name.endswith(("_layernorm.weight", "model.norm.weight")):
            return torch.ones(weights.config.hidden_size)
        if suffix in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            return reads(name, f"{prefix}input_layernorm.weight")
        if suffix in ("gate_proj.weight", "up_proj.weight"):
            return reads(name, f"{prefix}post_attention_layernorm.weight")
        if suffix in ("o_proj.weight", "o_proj.bias", "down_proj.weight"):
            return writes(name)
        return weights.load(name)  # what touches only the inside of a head

    return Weights(replace(weights.config, tied_head=False), weights.digest, load)


def _turn(rows: torch.Tensor, factors: list[torch.Tensor], scale: torch.Tensor | None = None) -> torch.Tensor:
    """rows [N, hidden], each times `scale` [hidden], times the Kronecker product of `factors`. fp32."""
    result = torch.empty(rows.shape)
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS].float()
        if scale is not None:
            part = part * scale
        x = part.reshape(-1, *(len(factor) for factor in factors))
        for factor in factors:
            # Takes the first of the hidden axes and puts the result last: after all of them the order is the old one.
            x = torch.tensordot(x, factor, dims=([1], [0]))
        result[start : start + _ROWS] = x.reshape(part.shape)
    return result


def _factors(size: int) -> list[torch.Tensor]:
    """Orthogonal matrices whose sizes multiply to `size`: a cosine transform for its odd part, Hadamard for the rest."""
    power = size & -size
    factors = [_cosine(size // power)] if size > power else []
    while power > 1:
        part = min(power, _MAX_FACTOR)
        factors.append(_hadamard(part))
        power //= part
    return factors


def _hadamard(size: int) -> torch.Tensor:
    """`size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)


def _cosine(size: int) -> torch.Tensor:
    """The orthogonal discrete cosine transform (II)."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi / size * (k + 0.5) * k.unsqueeze(1)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()
