from __future__ import annotations

import pytest
import torch

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
from workers.model_config import check_tensors, tensor_shapes
from workers.rotate import _factors, _turn, can_rotate, rotate


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("gemma3")])
def test_a_rotated_model_is_the_same_function(name: str) -> None:
    model = make_hf(name)
    ids = random_ids(60)

    found = Steps(rotate(weights_of(model)))(scheduled(ids, 0, list(range(4))))

    assert relative_error(found, hf_logits(model, ids)) < 1e-4


@pytest.mark.parametrize("name", ["llama tied", "llama with biases", "qwen3"])
def test_every_tensor_keeps_its_shape(name: str) -> None:
    rotated = rotate(weights_of(make_hf(name)))

    check_tensors(rotated.config, {name: tuple(rotated.load(name).shape) for name in tensor_shapes(rotated.config)})


def test_norms_over_what_a_layer_adds_are_in_the_way() -> None:
    assert can_rotate(weights_of(make_hf("qwen3")).config)
    assert not can_rotate(weights_of(make_hf("gemma3")).config)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 576, 896, 4096])
def test_turning_keeps_every_length_and_spreads_an_outlier(size: int) -> None:
    rows = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    rows[:, 0] = 100.0

    turned = _turn(rows, _factors(size))

    torch.testing.assert_close(turned.norm(dim=1), rows.norm(dim=1))
    torch.testing.assert_close(turned @ turned.T, rows @ rows.T, rtol=1e-4, atol=1e-2)
    if size >= 64:
        assert turned.abs().amax() < 30


def test_a_long_table_is_turned_in_parts_and_left_as_it_was() -> None:
    table = torch.randn(5000, 64)
    before = table.clone()

    turned = _turn(table, _factors(64), torch.full((64,), 2.0))

    torch.testing.assert_close(turned[-3:], _turn(table[-3:] * 2, _factors(64)))
    assert torch.equal(table, before)
