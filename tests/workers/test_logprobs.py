from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.adjust import Draw
from workers.logprobs import token_logprobs
from workers.protocol import Sampling
from workers.sampler import sample
from workers.softmax import log_softmax, row_sums


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    asked=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 45)), min_size=1, max_size=5),
    step=st.sampled_from([0.0, 0.5]),  # coarse logits have many ties
)
def test_logprobs_are_those_of_float64_sorted_with_ties_by_id(
    seed: int, asked: list[tuple[int, int]], step: float
) -> None:
    logits = torch.randn(len(asked), 40, generator=torch.Generator().manual_seed(seed)) * 2
    if step:
        logits = (logits / step).round() * step
    tokens, counts = zip(*asked, strict=True)

    found = token_logprobs(logits, tokens, counts)

    for row, token, count, told in zip(logits, tokens, counts, found, strict=True):
        exact = row.double().log_softmax(0)
        assert told.logprob == pytest.approx(exact[token].item(), abs=1e-5)
        order = sorted(range(40), key=lambda i: (-row[i].item(), i))[:count]
        assert [i for i, _ in told.top] == order
        assert [value for _, value in told.top] == pytest.approx(exact[order].tolist(), abs=1e-5)
        assert all(value == told.logprob for i, value in told.top if i == token)
    assert found == [token_logprobs(row[None], [token], [n])[0] for row, (token, n) in zip(logits, asked, strict=True)]


def test_a_token_without_a_logit_is_impossible() -> None:
    assert token_logprobs(torch.zeros(1, 4), [4], [0])[0].logprob == -torch.inf


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", [49_152, 65_541])
def test_long_rows_have_the_same_bits_alone_and_among_others_on_any_number_of_threads(threads: int, vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)) * 4
    draws = [Draw(Sampling(max_tokens=1, top_p=0.9, seed=row), 1, array("I"), 0) for row in range(5)]
    torch.set_num_threads(1)
    sums, logprobs = row_sums(logits.exp()), log_softmax(logits)
    tokens = sample(logits, draws)
    torch.set_num_threads(threads)

    for start, end in ((0, 5), (0, 1), (4, 5), (1, 4)):
        assert torch.equal(row_sums(logits[start:end].exp()), sums[start:end])
        assert torch.equal(log_softmax(logits[start:end]), logprobs[start:end])
        assert sample(logits[start:end], draws[start:end]) == tokens[start:end]
