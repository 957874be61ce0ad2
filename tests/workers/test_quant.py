from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import quant
from workers.model_errors import ModelUnsupported
from workers.plan import Precision
from workers.quant import choose_precision, int8_works, make_linear

needs_int8 = pytest.mark.skipif(not int8_works(), reason="this CPU has no exact 8-bit product")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 5e-3), pytest.param("int8", 1.5e-2, marks=needs_int8)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_is_near_the_exact_one(precision: Precision, tolerance: float, with_bias: bool) -> None:
    weight, x = random(96, 160, seed=1), random(20, 160, seed=2)
    bias = random(96, seed=3) if with_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)

    found = make_linear(precision, weight, bias)(x)

    assert found.dtype == torch.float32
    assert (found - exact).norm() / exact.norm() < tolerance


@needs_int8
@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(2, 80), sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)), seed=st.integers(0, 9))
def test_an_int8_row_has_the_same_bits_alone_and_among_others(num_rows: int, sizes: tuple[int, int], seed: int) -> None:
    num_in, num_out = 16 * sizes[0], 16 * sizes[1]
    layer = make_linear("int8", random(num_out, num_in, seed=seed))
    x = random(num_rows, num_in, seed=seed + 1) * torch.logspace(-3, 3, num_rows).unsqueeze(1)

    together = layer(x)

    assert torch.equal(layer(x[:1]), together[:1])
    assert torch.equal(layer(x[num_rows // 2 :]), together[num_rows // 2 :])


@needs_int8
def test_two_bytes_hold_a_row_with_outliers() -> None:
    weight, x = random(64, 160, seed=1), random(20, 160, seed=2)
    x[:, 7] *= 300
    exact = x.double() @ weight.double().T
    rest = x.clone()
    rest[:, 7] = 0
    exact_rest = rest.double() @ weight.double().T

    def error(*, outliers: bool) -> float:
        layer = make_linear("int8", weight, outliers=outliers)
        return float((layer(x) - exact).norm() / exact_rest.norm())

    assert error(outliers=False) > 0.5  # what is not the outlier drowns
    assert error(outliers=True) < 0.2  # what is left is the rounding of the weight that the outlier meets


@needs_int8
@given(num_rows=st.integers(2, 80))
def test_a_row_of_two_bytes_has_the_same_bits_alone_and_among_others(num_rows: int) -> None:
    layer = make_linear("int8", random(48, 80), outliers=True)
    x = random(num_rows, 80) * torch.logspace(-3, 3, num_rows).unsqueeze(1)

    together = layer(x)

    assert torch.equal(layer(x[-1:]), together[-1:])
    assert torch.equal(layer(x[: num_rows // 2]), together[: num_rows // 2])


@needs_int8
def test_a_row_of_zeros_stays_zero() -> None:
    found = make_linear("int8", random(32, 64))(torch.zeros(3, 64))

    assert torch.equal(found, torch.zeros(3, 32))


@needs_int8
def test_a_large_layer_is_packed_in_parts() -> None:
    weight, x = random(5000, 32), random(4, 32)
    exact = x @ weight.T

    found = make_linear("int8", weight)(x)

    assert (found - exact).norm() / exact.norm() < 1.5e-2


def test_packing_does_not_keep_or_change_the_weight() -> None:
    weight = random(32, 64)
    before = weight.clone()

    make_linear("int8", weight)

    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("int8", "bf16", "chosen"),
    [(True, True, "int8"), (True, False, "int8"), (False, True, "bf16"), (False, False, "fp32")],
)
def test_auto_takes_the_fastest_that_works(
    monkeypatch: pytest.MonkeyPatch, int8: bool, bf16: bool, chosen: Precision
) -> None:
    monkeypatch.setattr(quant, "int8_works", lambda: int8)
    monkeypatch.setattr(quant, "supports_bf16", lambda: bf16)

    assert choose_precision("auto") == chosen


def test_int8_is_refused_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant, "int8_works", lambda: False)

    with pytest.raises(ModelUnsupported, match="int8"):
        choose_precision("int8")


def test_the_self_test_fails_where_products_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant._Int8Linear, "__call__", lambda self, x: torch.full((len(x), 80), 1000.0))

    assert not int8_works()


def test_the_self_test_fails_where_the_operator_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: object, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(quant._Int8Linear, "__call__", missing)

    assert not int8_works()


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="fp8"):
        choose_precision("fp8")
