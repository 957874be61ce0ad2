from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.adjust import Draw
from workers.protocol import Sampling
from workers.sampler import sample

VOCAB = 3000


def draw(position: int = 0, **sampling: Any) -> Draw:
    return Draw(Sampling(max_tokens=1, **sampling), position, array("I"), 0)


def random_logits(rows: int, *, vocab: int = VOCAB, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


samplings = st.builds(
    draw,
    position=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 5000]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(draws=st.lists(samplings, min_size=1, max_size=6), scale=st.sampled_from([0.1, 2.0, 20.0]))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(draws: list[Draw], scale: float) -> None:
    logits = random_logits(len(draws), scale=scale)

    together = sample(logits, draws)

    assert together == [sample(logits[row : row + 1], [one])[0] for row, one in enumerate(draws)]
    assert together == sample(logits.flip(0), draws[::-1])[::-1]


def test_temperature_zero_takes_the_largest() -> None:
    logits = random_logits(3)

    assert sample(logits, [draw(temperature=0.0), draw(temperature=1e-6), draw(top_k=1)]) == logits.argmax(-1).tolist()


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(2)
    before = logits.clone()

    sample(logits, [draw(temperature=0.5, top_k=3), draw()])

    assert torch.equal(logits, before)


@pytest.mark.parametrize("change", [{"seed": 8}, {"choice": 1}, {"position": 1}])
def test_another_seed_choice_or_position_is_another_draw(change: dict[str, int]) -> None:
    logits = random_logits(1, scale=0.0)
    base = {"seed": 7, "choice": 0, "position": 0}

    assert sample(logits, [draw(**base)]) == sample(logits, [draw(**base)])
    assert sample(logits, [draw(**base)]) != sample(logits, [draw(**base | change)])


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_softmax(by: str) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    count = 20_000
    temperature = 1.7
    logits = (probabilities.log() * temperature).expand(count, -1)

    ids = sample(logits, [draw(**{by: i}, temperature=temperature) for i in range(count)])

    expected = probabilities * count
    observed = torch.bincount(torch.tensor(ids), minlength=6)
    chi_square = ((observed - expected).square() / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand


def test_neighbouring_tokens_are_drawn_independently() -> None:
    # Two fair coins in one row, at even and odd ids: which of a pair is larger must not follow the pair before.
    count = 4000
    logits = torch.zeros(count, 4)
    first = sample(logits[:, :2], [draw(i, seed=1) for i in range(count)])
    pairs = sample(logits, [draw(i, seed=1) for i in range(count)])

    given_zero = [pair for pair, coin in zip(pairs, first, strict=True) if coin == 0]
    assert abs(sum(pair >= 2 for pair in given_zero) / len(given_zero) - 0.5) < 0.05


def kept(logits: torch.Tensor, *, top_k: int, top_p: float, temperature: float = 1.0) -> set[int]:
    """What may be drawn, by the definition."""
    scaled = (logits / temperature).double()
    order = scaled.argsort(descending=True).tolist()[: top_k or None]
    probabilities = scaled[order].softmax(0)
    result, total = set(), 0.0
    for token, probability in zip(order, probabilities.tolist(), strict=True):
        result.add(token)
        total += probability
        if total >= top_p:
            break
    return result


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.5), (0, 0.9), (20, 0.8), (0, 0.02)])
@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_only_tokens_within_top_k_and_top_p_are_drawn(top_k: int, top_p: float, scale: float) -> None:
    logits = random_logits(1, vocab=200, scale=scale)
    allowed = kept(logits[0], top_k=top_k, top_p=top_p, temperature=1.3)
    count = 2000

    ids = sample(
        logits.expand(count, -1), [draw(i, top_k=top_k, top_p=top_p, temperature=1.3, seed=3) for i in range(count)]
    )

    assert set(ids) <= allowed
    # All of the likely ones do come.
    assert {token for token in allowed if logits[0].softmax(0)[token] > 0.02} <= set(ids)


def test_a_nucleus_deeper_than_the_first_look_is_found() -> None:
    logits = random_logits(1, vocab=8000, scale=0.01)  # nearly flat: 90 % of it is thousands of tokens
    allowed = kept(logits[0], top_k=0, top_p=0.9)
    count = 300

    ids = sample(logits.expand(count, -1), [draw(i, top_p=0.9) for i in range(count)])

    assert len(allowed) > 7000
    assert set(ids) <= allowed
    assert len(set(ids)) > 250


def test_ties_at_the_cut_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    count = 200

    ids = sample(logits.expand(count, -1), [draw(i, top_k=2) for i in range(count)])

    assert set(ids) == {1, 2, 3}
