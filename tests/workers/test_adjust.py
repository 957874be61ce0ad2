"""The whole sampler against a naive one: plain Python over float64, a token at a time, straight from the definitions."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workers.adjust import Draw, adjust
from workers.protocol import Sampling
from workers.sampler import sample

VOCAB = 24
EOS_IDS = (3, 5)
INF = math.inf
MARGIN = 1e-3
"""Nearer than this to a border or to another token, fp32 may decide otherwise than float64."""


def make_draw(prompt: Sequence[int], said: Sequence[int], *, allowed: set[int] | None = None, **sampling: Any) -> Draw:
    ids = array("I", [*prompt, *said])
    bits = None
    if allowed is not None:
        bits = sum(1 << token for token in allowed).to_bytes(8, "little")
    return Draw(Sampling(max_tokens=99, **sampling), len(ids), ids, len(prompt), bits)


def naive_adjust(logits: Sequence[float], draw: Draw) -> list[float]:
    s, said, seen = draw.sampling, draw.ids[draw.prompt_len :], set(draw.ids)
    row = list(logits)
    if draw.allowed is not None:
        mask = int.from_bytes(draw.allowed, "little")
        row = [x if mask >> token & 1 else -INF for token, x in enumerate(row)]
    if len(said) < s.min_tokens:
        ends = {*s.stop_token_ids, *(() if s.ignore_eos else EOS_IDS)}
        without = [-INF if token in ends else x for token, x in enumerate(row)]
        row = without if max(without) > -INF else row
    for token in range(VOCAB):
        row[token] += s.logit_bias.get(token, 0.0)
        if token in seen:
            row[token] = row[token] / s.repetition_penalty if row[token] > 0 else row[token] * s.repetition_penalty
        row[token] -= s.frequency_penalty * said.count(token) + (s.presence_penalty if token in said else 0.0)
    return row


def naive_cut(row: Sequence[float], s: Sampling) -> tuple[list[float], float]:
    """What min-p, top-k and top-p leave of scaled logits, and how near the nearest decision was."""
    near, top = INF, max(row)
    kept = [token for token in range(VOCAB) if row[token] > -INF]
    if s.min_p:
        near = min(abs(row[token] - top - math.log(s.min_p)) for token in kept)
        kept = [token for token in kept if row[token] - top >= math.log(s.min_p)]
    if 0 < s.top_k < len(kept):
        floor = sorted((row[token] for token in kept), reverse=True)[s.top_k - 1]
        near = min([near, *(abs(row[token] - floor) for token in kept if row[token] != floor)])
        kept = [token for token in kept if row[token] >= floor]
    if s.top_p < 1:
        weights = sorted((math.exp(row[token] - top) for token in kept), reverse=True)
        total, least = 0.0, 1.0
        for weight in weights:
            total += weight / sum(weights)
            near = min(near, abs(total - s.top_p))
            if total - weight / sum(weights) < s.top_p:
                least = weight
        kept = [token for token in kept if math.exp(row[token] - top) >= least]
    return [row[token] if token in kept else -INF for token in range(VOCAB)], near


def naive_noise(draw: Draw, token: int) -> float:
    """Gumbel noise of the documented hash, in float64."""
    key = 0
    for part in (draw.sampling.seed, draw.sampling.choice, draw.position):
        key = ((key ^ part) + 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    x = (token * 0x9E3779B9 + key) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ key >> 32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    x ^= x >> 16
    return -math.log(-math.log1p(-(x // 2 + 0.5) * 2.0**-31))


draws = st.builds(
    make_draw,
    prompt=st.lists(st.integers(0, VOCAB + 3), min_size=1, max_size=8),  # some ids the model never says
    said=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    allowed=st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 4, 30]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.6, 1.1]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.5, 2.5]), max_size=3),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, VOCAB + 3), max_size=2),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2),
)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=300, deadline=None)
@given(draw=draws, seed=st.integers(0, 1000))
def test_a_token_is_that_of_the_naive_sampler(draw: Draw, seed: int) -> None:
    logits = random_logits(1, seed)
    row = naive_adjust(logits[0].tolist(), draw)
    near = INF
    if not draw.greedy:
        row, near = naive_cut([x / draw.sampling.temperature for x in row], draw.sampling)
        row = [x + naive_noise(draw, token) for token, x in enumerate(row)]
    best, second, *_ = sorted(row, reverse=True)
    assume(min(near, best - second) > MARGIN)

    assert sample(logits, [draw], EOS_IDS) == [row.index(best)]


@settings(max_examples=150, deadline=None)
@given(draws=st.lists(draws, min_size=1, max_size=7), seed=st.integers(0, 1000))
def test_a_row_is_the_same_alone_and_in_any_company(draws: list[Draw], seed: int) -> None:
    logits = random_logits(len(draws), seed)
    before = logits.clone()

    together = adjust(logits, draws, EOS_IDS)

    alone = [adjust(logits[row : row + 1], [draw], EOS_IDS) for row, draw in enumerate(draws)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(logits, before), "logprobs are taken of them"
    tokens = sample(logits, draws, EOS_IDS)
    assert tokens == [sample(logits[row : row + 1], [draw], EOS_IDS)[0] for row, draw in enumerate(draws)]
    assert tokens == sample(logits.flip(0), draws[::-1], EOS_IDS)[::-1]


@settings(max_examples=100, deadline=None)
@given(draw=draws, seed=st.integers(0, 1000))
def test_logits_are_those_of_the_definitions(draw: Draw, seed: int) -> None:
    logits = random_logits(1, seed)

    found = adjust(logits, [draw], EOS_IDS)[0]

    wanted = torch.tensor(naive_adjust(logits[0].tolist(), draw))
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert found.amax() > -INF, "a token is left"


def test_rows_that_ask_for_nothing_are_not_even_copied() -> None:
    logits = random_logits(2, 0)

    assert adjust(logits, [make_draw([1], [2]), make_draw([1], [2], top_k=3, temperature=0.0)], EOS_IDS) is logits


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_end_comes_before_min_tokens_and_one_may_come_then(ignore_eos: bool) -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, EOS_IDS[0]] = 9.0
    options: dict[str, Any] = {"min_tokens": 2, "ignore_eos": ignore_eos, "temperature": 0.0}
    early, due = make_draw([1], [7], **options), make_draw([1], [7, 7], **options)

    assert (sample(logits, [early], EOS_IDS) == [EOS_IDS[0]]) == ignore_eos
    assert sample(logits, [due], EOS_IDS) == [EOS_IDS[0]]


def test_a_complete_sentence_may_end_before_min_tokens() -> None:
    draw = make_draw([1], [], allowed={EOS_IDS[0]}, min_tokens=5)

    assert sample(random_logits(1, 0), [draw], EOS_IDS) == [EOS_IDS[0]]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 2.0])
def test_the_smallest_penalty_keeps_to_the_grammar(temperature: float) -> None:
    logits = torch.linspace(-9, 9, VOCAB).unsqueeze(0)
    draw = make_draw(
        range(VOCAB), [], allowed={4, 20}, repetition_penalty=1e-300, temperature=temperature, seed=1, top_p=0.9
    )

    assert sample(logits, [draw]) == [20], "it was there before, so a penalty below 1 makes it far likelier"
    assert not adjust(logits, [draw], EOS_IDS).isnan().any()
