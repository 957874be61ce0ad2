"""Linear layers in three precisions, all fp32 rows in → fp32 rows out.

- ``int8``: weights and activations in 8 bits (W8A8), one scale per output channel and one per row. Sums are exact integers, so
  a row gives the same bits alone and among any others, and a weight is one byte to read. The default. Only for activations
  without outliers (`workers.rotate` takes care of most), or in two bytes each.
- ``bf16``: half the memory of fp32; for CPUs that multiply bf16 but fail the int8 self-test.
- ``fp32``: the oracle, and what works everywhere.

The int8 product is oneDNN's, through the operator that torch's own compiler emits for quantized models. On one core of a Xeon
with AMX it takes, for 576 → 3072, 70 us for 1 row and 520 for 256; FBGEMM's per-token path takes 164 and 2,360, bf16 311 and
949, fp32 (MKL) 246 and 4,980. How activations are coded depends on the CPU, because oneDNN has a fast and exact kernel for one
form on each: with AMX signed bytes (unsigned ones lose bits of sums above 2^24, in some batch sizes only), elsewhere unsigned
bytes around 128 (signed ones fall back to a reference loop, 14 ms a row). CPUs without VNNI saturate in 16 bits.
`int8_works` finds out by trying.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch.nn.functional import linear

from workers.model_errors import ModelUnsupported
from workers.plan import Precision

__all__ = ["Linear", "choose_precision", "int8_works", "make_linear", "supports_bf16"]

_SIGNED: Final = bool(torch.cpu.get_capabilities().get("amx_int8"))
"""Whether activations are s8 with zero point 0, or u8 with zero point 128."""

_ZERO_POINT: Final = 128
_LEVELS: Final = 127
"""Steps on either side of zero; -128 stays unused, so that scales are symmetric."""

_FINE: Final = 2 * _LEVELS
"""Second bytes in half a step."""

_PACK_ROWS: Final = 4096
"""Output channels quantized at a time: bounds what packing a large head needs besides its result."""


class Linear(Protocol):
    """x [N, in] fp32 → [N, out] fp32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def make_linear(
    precision: Precision, weight: torch.Tensor, bias: torch.Tensor | None = None, *, outliers: bool = False
) -> Linear:
    """Pack weight [out, in]; the tensor given is not kept unless it has the precision asked for.

    `outliers`: a few values of a row may be far above the rest, so int8 takes two bytes for each.
    """
    if precision == "int8":
        return _Int8Linear(weight, bias, two_bytes=outliers)
    if precision == "bf16":
        return _Bf16Linear(weight, bias)
    return _Fp32Linear(weight, bias)


def choose_precision(choice: str) -> Precision:
    """`auto`: the fastest that this CPU does right. One asked for by name is taken, or refused where it is wrong."""
    if choice == "auto":
        if int8_works():
            return "int8"
        return "bf16" if supports_bf16() else "fp32"
    if choice == "int8":
        if not int8_works():
            raise ModelUnsupported("int8 gives wrong results on this CPU (no VNNI?); use precision auto, bf16 or fp32")
        return "int8"
    if choice == "bf16":
        return "bf16"
    if choice == "fp32":
        return "fp32"
    raise ValueError(f"precision {choice!r} is not one of auto, int8, bf16, fp32")


def supports_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself. Where it does not, torch emulates it, many times slower than fp32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@torch.inference_mode()
def int8_works() -> bool:
    """Try the operator on rows that reach the largest sums: right to the last bit, alone and among others?"""
    num_in, num_out = 2304, 80
    weight = torch.linspace(-1, 1, num_out * num_in).view(num_out, num_in)
    x = torch.cat([torch.ones(1, num_in), -torch.ones(1, num_in), weight[:31].flip(1)])
    try:
        layer = _Int8Linear(weight, None, two_bytes=False)
        together = layer(x)
        alone = torch.cat([layer(x[row : row + 1]) for row in range(len(x))])
    except RuntimeError:  # the operator is missing, or this build of it cannot run here
        return False
    exact = x.double() @ weight.double().T
    # Rounding both sides to 8 bits is within 1 % of the largest result; saturated sums are off by tens of per cent.
    near = (together - exact).abs().amax() < 0.01 * exact.abs().amax()
    return bool(near) and torch.equal(together, alone)


class _Fp32Linear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.float()
        self._bias = bias.float() if bias is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


class _Bf16Linear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.bfloat16()
        self._bias = bias.bfloat16() if bias is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.bfloat16(), self._weight, self._bias).float()


class _Int8Linear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, two_bytes: bool) -> None:
        num_out = len(weight)
        self._scale = torch.empty(num_out)
        quantized = torch.empty(weight.shape, dtype=torch.int8)
        for start in range(0, num_out, _PACK_ROWS):
            rows = weight[start : start + _PACK_ROWS].float()
            scale = _scale_of(rows)
            self._scale[start : start + _PACK_ROWS] = scale.squeeze(1)
            quantized[start : start + _PACK_ROWS] = (rows / scale).round_()
        self._packed = torch.ops.onednn.qlinear_prepack(quantized, None)
        self._zero_points = torch.zeros(num_out, dtype=torch.int64)
        self._bias = bias.float() if bias is not None else None
        self._two_bytes = two_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = _scale_of(x)
        steps = x / scale  # from here on in place: a fresh tensor of many rows costs as much as a small product
        y = self._two_byte_product(steps) if self._two_bytes else self._product(steps.round_().to(torch.int8))
        y *= scale
        return y if self._bias is None else y.add_(self._bias)

    def _two_byte_product(self, steps: torch.Tensor) -> torch.Tensor:
        """The second byte is what rounding to the first has left, in steps of 1 / 254. Both are rows of one product: where
        reading the weights is what takes time, the second costs nothing."""
        num_rows = len(steps)
        rows = torch.empty(2 * num_rows, steps.shape[1], dtype=torch.int8)
        high = steps.round()
        rows[:num_rows] = high
        rows[num_rows:] = steps.sub_(high).mul_(_FINE).round_()
        y, low = self._product(rows).split_with_sizes([num_rows, num_rows])
        # Not add_(…, alpha=…): fused or not, depending on an element's place in memory, that would round in two ways.
        return y.add_(low.mul_(1 / _FINE))

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        """int8 [N, in], -127 … 127 → fp32 [N, out]. Changes `rows`."""
        if not _SIGNED:  # flipping the top bit adds 128, and costs a fraction of a conversion to unsigned
            rows = rows.view(torch.uint8).bitwise_xor_(_ZERO_POINT)
        zero_point = 0 if _SIGNED else _ZERO_POINT
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows,
            1.0,
            zero_point,
            self._packed,
            self._scale,
            self._zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return y


def _scale_of(rows: torch.Tensor) -> torch.Tensor:
    """[N, K] → [N, 1]: the value of one step. A row of zeros gets a tiny one, so that nothing is divided by zero."""
    return rows.abs().amax(-1, keepdim=True).clamp_(min=1e-20).div_(_LEVELS)
