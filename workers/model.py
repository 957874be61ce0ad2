"""The decoder: token ids of a step in, hidden states out, and logits of those rows for which somebody wants them.

One code path for every family in `workers.model_config`: pre-norm layers, grouped-query attention with RoPE, gated MLP; some
have windows, norms over heads, or norms over what a layer adds. All
rows of a step, decodes and prefill chunks alike, pass through as one flat batch; only attention knows which row belongs to
whom. The residual stream is fp32 in every precision.

RoPE is one complex multiplication: rows of q and k are packed so that the two dimensions of a pair are neighbours. Scores
do not change, since q and k are permuted alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import embedding, rms_norm, silu

from workers.attention import Attention, AttentionPlan, KVCache
from workers.model_config import ModelConfig
from workers.plan import Precision
from workers.quant import Linear, make_linear
from workers.rotate import can_rotate, rotate
from workers.weights import Weights

__all__ = ["Decoder"]


_GRAIN: Final = 32_768
"""Elementwise operations give no thread less than this many values,"""
_SERIAL: Final = 16_384
"""and leave up to this many to one: GELU, whose limit is lower than that of others."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """[heads + kv_heads, D]"""
    local_rope: bool
    o: Linear
    o_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    down_norm: torch.Tensor | None


class Decoder:
    def __init__(self, weights: Weights, precision: Precision, max_len: int, num_tokens: int) -> None:
        """Packs every tensor of `weights`, one after the other. Positions up to `max_len` - 1 can be run.

        `num_tokens`: ids that the tokenizer knows. Embeddings are often padded beyond them; such ids get no logits, so that
        nobody can choose one (vllm#21951).
        """
        # Inputs that keep their outliers take two bytes each.
        rotated = precision == "int8" and can_rotate(weights.config)
        if rotated:
            weights = rotate(weights)
        config = weights.config
        self.config = config
        # Rows are read of it, nothing is multiplied: half precision loses only bits that int8 and bf16 layers lose anyway.
        table = weights.load("model.embed_tokens.weight")
        self._embedding = table.to(torch.float32 if precision == "fp32" else torch.bfloat16)
        del table
        head = self._embedding if config.tied_head else weights.load("lm_head.weight")
        self._head = make_linear(precision, head[:num_tokens], outliers=not rotated)
        del head
        self._norm = weights.load("model.norm.weight").float()
        self._layers = [_load_layer(weights, precision, i, rotated=rotated) for i in range(config.num_layers)]
        self._ropes = {local: _rope(config, max_len, local=local) for local in {x.local_rope for x in self._layers}}

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        attention: Attention,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """ids [N], positions [N] → fp32 hidden states [N, hidden], for `logits`. Writes the step's KV."""
        config = self.config
        num_q, num_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        # [N, 1, D / 2]
        ropes = {local: rope.index_select(0, positions).unsqueeze(1) for local, rope in self._ropes.items()}
        h = embedding(ids, self._embedding).float()  # [N, hidden]
        if config.embedding_scale is not None:
            h *= config.embedding_scale
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._rms_norm(h, layer.input_norm)).view(-1, num_q + 2 * num_kv, dim)
            qk = qkv[:, : num_q + num_kv]  # a view: what follows changes qkv in place
            if layer.qk_norm is not None:
                qk.copy_(rms_norm(qk, (dim,), eps=config.norm_eps)).mul_(layer.qk_norm)
            torch.view_as_complex(qk.view(*qk.shape[:-1], -1, 2)).mul_(ropes[layer.local_rope])
            qkv = qkv.to(cache.dtype)
            cache.write(index, plan.slots, qkv[:, num_q:])
            attended = layer.o(attention.attend(index, qkv[:, :num_q], plan))
            h += attended if layer.o_norm is None else self._rms_norm(attended, layer.o_norm)
            gate, up = layer.gate_up(self._rms_norm(h, layer.mlp_norm)).chunk(2, dim=-1)
            added = layer.down(self._activate_(gate).mul_(up))
            h += added if layer.down_norm is None else self._rms_norm(added, layer.down_norm)
        return h

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden], at least one row → fp32 [R, num_tokens]."""
        return self._head(self._rms_norm(hidden, self._norm))

    def _activate_(self, gate: torch.Tensor) -> torch.Tensor:
        """In place: at 512 rows a fresh tensor would cost as much as the product that made this one."""
        for part in _evenly(gate):
            if self.config.gelu:
                torch.ops.aten.gelu_(part, approximate="tanh")
            else:
                silu(part, inplace=True)
        return gate

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _evenly(rows: torch.Tensor) -> list[torch.Tensor]:
    """Cut so that an elementwise operation on each part gives whole rows to each thread.

    Left to itself torch cuts anywhere in a row. Where a vector of the CPU goes beyond the cut, single values are computed, and
    a single exp or tanh has other bits than one in a vector: results would depend on the number of rows.
    """
    threads, (num_rows, width) = torch.get_num_threads(), rows.shape
    if threads == 1:
        return [rows]
    shared = num_rows - num_rows % threads
    if shared * width < threads * _GRAIN:
        shared = 0
    few = max(1, _SERIAL // width)
    columns = [slice(first, first + _SERIAL) for first in range(0, width, _SERIAL)]  # whole vectors
    parts = [rows[start : start + few, column] for start in range(shared, num_rows, few) for column in columns]
    return [rows[:shared], *parts] if shared else parts


def _rope(config: ModelConfig, max_len: int, *, local: bool) -> torch.Tensor:
    """[max_len, D / 2] complex. fp32 angles, as the models were trained with."""
    frequencies = torch.tensor(config.rope_frequencies(local=local))
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return torch.polar(torch.full_like(angles, 1.0 if local else config.rope_magnitude), angles)


def _load_layer(weights: Weights, precision: Precision, index: int, *, rotated: bool) -> _Layer:
    config = weights.config
    dim = config.head_dim

    def load(name: str) -> torch.Tensor:
        return weights.load(f"model.layers.{index}.{name}")

    def norm(name: str) -> torch.Tensor:
        return load(f"{name}_layernorm.weight").float()

    def linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, outliers: bool = not rotated) -> Linear:
        return make_linear(precision, weight, bias, outliers=outliers)

    def pair_up(rows: torch.Tensor) -> torch.Tensor:
        """Rows of each head from the two halves of RoPE's pairs to neighbours."""
        return rows.reshape(-1, 2, dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def fused_qkv(kind: str) -> torch.Tensor:
        q, k, v = (load(f"self_attn.{name}_proj.{kind}") for name in "qkv")
        return torch.cat([pair_up(q), pair_up(k), v])

    qk_norm = None
    if config.qk_norm:
        norms = [
            (load(f"self_attn.{name}_norm.weight"), heads)
            for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads))
        ]
        qk_norm = torch.cat([pair_up(weight.float()).expand(heads, dim) for weight, heads in norms])
    return _Layer(
        input_norm=norm("input"),
        qkv=linear(fused_qkv("weight"), fused_qkv("bias") if config.qkv_bias else None),
        qk_norm=qk_norm,
        local_rope=config.is_local(index),
        o=linear(load("self_attn.o_proj.weight"), load("self_attn.o_proj.bias") if config.o_bias else None),
        o_norm=norm("post_attention") if config.post_norms else None,
        mlp_norm=norm("pre_feedforward" if config.post_norms else "post_attention"),
        gate_up=linear(torch.cat([load("mlp.gate_proj.weight"), load("mlp.up_proj.weight")])),
        # What gate and up multiply to has outliers in every row, and no norm before it that would let them be rotated away.
        down=linear(load("mlp.down_proj.weight"), outliers=True),
        down_norm=norm("post_feedforward") if config.post_norms else None,
    )
