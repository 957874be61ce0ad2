"""The runner driven by hand-made block tables; the same through scheduler and block pool is in the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.workers.tiny_models import (
    BLOCK_SIZE,
    GREEDY,
    VOCAB,
    hf_logits,
    make_hf,
    random_ids,
    scheduled,
    weights_of,
)
from workers import runner as runner_module
from workers.protocol import Sampling, TokenLogprob
from workers.quant import int8_works
from workers.runner import TorchRunner
from workers.step import RowResult, Runner
from workers.weights import Weights

needs_int8 = pytest.mark.skipif(not int8_works(), reason="this CPU has no exact 8-bit product")


def make_runner(weights: Weights, precision: str, **options: Any) -> TorchRunner:
    return TorchRunner(
        weights,
        name="tiny",
        eos_ids=frozenset({0}),
        precision=precision,
        kv_bytes=options.pop("kv_bytes", 1 << 20),
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        **options,
    )


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    count: int,
    *,
    cached: int = 0,
    sampling: Sampling = GREEDY,
) -> list[list[int]]:
    """Prefill all prompts but their first `cached` tokens in one step, then decode them together."""
    contexts = [list(prompt) for prompt in prompts]
    done = [cached] * len(prompts)
    for _ in range(count):
        batch = [
            scheduled(context[start:], start, table, rid=rid, sampling=sampling)
            for rid, (context, start, table) in enumerate(zip(contexts, done, tables, strict=True))
        ]
        done = [len(context) for context in contexts]
        for context, (token, *_) in zip(contexts, runner.step(batch), strict=True):
            assert token is not None
            context.append(token)
    return [context[len(prompt) :] for context, prompt in zip(contexts, prompts, strict=True)]


def is_greedy(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether `transformers` would have said `answer`: at each place its largest logit is for the token that came. By
    induction over the places that is its greedy output, in one pass instead of one a token."""
    logits = hf_logits(model, [*prompt, *answer[:-1]])
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == list(answer)


def disjoint_tables(count: int, num_blocks: int) -> list[list[int]]:
    """For each of `count` sequences `num_blocks` blocks, in no order."""
    blocks: list[int] = torch.randperm(count * num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
    return [blocks[i * num_blocks : (i + 1) * num_blocks] for i in range(count)]


def test_greedy_output_is_that_of_transformers_cold_and_warm() -> None:
    model = make_hf()
    runner = make_runner(weights_of(model), "fp32")
    prompts = [random_ids(length, seed=length) for length in (33, 50, 270)]
    tables = disjoint_tables(6, 20)
    cold, warm = tables[:3], tables[3:]

    first = generate(runner, prompts, cold, 12)
    shared = [[*old[:2], *new[2:]] for old, new in zip(cold, warm, strict=True)]
    second = generate(runner, prompts, shared, 12, cached=2 * BLOCK_SIZE)

    assert first == second
    assert all(is_greedy(model, prompt, answer) for prompt, answer in zip(prompts, first, strict=True))


def test_rows_that_do_not_sample_give_none() -> None:
    runner = make_runner(weights_of(make_hf()), "fp32")
    ids = random_ids(40)

    assert runner.step([scheduled(ids[:20], 0, [3, 4], sample=False)]) == [RowResult()]
    mixed = [scheduled(ids[20:], 20, [3, 4, 7]), scheduled(ids, 0, [1, 2, 0], sample=False)]
    (token, *_), nothing = runner.step(mixed)

    assert nothing == RowResult()
    assert token in range(VOCAB)


SAMPLED = Sampling(max_tokens=1, temperature=1.0, top_p=0.95, seed=3)


@needs_int8
@pytest.mark.parametrize(
    ("name", "bf16", "sampling"),
    [
        *[("llama", bf16, sampling) for bf16 in (True, False) for sampling in (GREEDY, SAMPLED)],
        ("mistral with a window", True, SAMPLED),
        ("gemma3", True, SAMPLED),
        ("gemma3", False, SAMPLED),
    ],
)
def test_int8_text_does_not_depend_on_schedule_or_company(
    name: str, bf16: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "supports_bf16", lambda: bf16)
    prompts = [random_ids(length, seed=length) for length in (5, 100, 290)]
    tables = disjoint_tables(3, 21)
    weights = weights_of(make_hf(name))
    alone = [
        generate(make_runner(weights, "int8", kv_bytes=4 << 20), [prompt], [table], 30, sampling=sampling)[0]
        for prompt, table in zip(prompts, tables, strict=True)
    ]

    runner = make_runner(weights, "int8", kv_bytes=4 << 20)
    together = generate(runner, prompts, tables, 30, sampling=sampling)
    for start in range(0, 280, 70):  # the longest once more, in chunks
        runner.step([scheduled(prompts[2][start : start + 70], start, tables[2], sample=False)])
    chunked = generate(runner, prompts[2:], tables[2:], 30, cached=280, sampling=sampling)

    assert together == alone
    assert chunked == alone[2:]


@needs_int8
@pytest.mark.parametrize("name", ["mistral with a window", "qwen2 with a window", "gemma3"])
def test_int8_bits_of_layers_with_a_window_do_not_depend_on_chunks_and_company(name: str) -> None:
    weights = weights_of(make_hf(name))
    runner = make_runner(weights, "int8", kv_bytes=4 << 20)
    ids, company = random_ids(700, seed=1), random_ids(700, seed=2)
    whole, cut, others = disjoint_tables(3, 44)
    runner.step([scheduled(ids, 0, whole)])
    runner.step([scheduled(company[:690], 0, others)])

    def kept(table: Sequence[int]) -> list[torch.Tensor]:
        """Keys and values of every layer: all that was computed shows in them, but the last layer's output."""
        layers = (
            layer.view(-1, runner._cache.num_blocks, layer.shape[1] * BLOCK_SIZE) for layer in runner._cache.layers
        )
        return [layer.index_select(1, torch.tensor(table[: 700 // BLOCK_SIZE])) for layer in layers]

    @settings(max_examples=8)
    @given(cuts=st.sets(st.integers(1, 699), max_size=8), beside=st.integers(0, 690), decoded=st.integers(0, 9))
    def check(cuts: set[int], beside: int, decoded: int) -> None:
        edges = sorted({0, *cuts, *range(700 - decoded, 700), 700})
        for start, end in pairwise(edges):
            rows = [scheduled(ids[start:end], start, cut)]
            if beside % (1 + start % 3) == 0:
                rows.insert(0, scheduled(company[beside : beside + 9], beside, others))
            runner.step(rows)
        assert all(map(torch.equal, kept(cut), kept(whole)))

    check()


def test_what_the_runner_is_is_told() -> None:
    runner = make_runner(weights_of(make_hf()), "fp32", max_model_len=512)
    info = runner.info

    assert (info.model, info.precision, info.block_size, info.max_num_seqs) == ("tiny", "fp32", BLOCK_SIZE, 8)
    assert (info.max_model_len, info.vocab_size, info.kv_bytes_per_token) == (512, VOCAB, 2 * 2 * 2 * 16 * 4)
    assert info.num_blocks == (1 << 20) // (16 * info.kv_bytes_per_token)
    assert runner.info.eos_ids == [0]


def test_numerics_tell_apart_what_may_give_other_bits() -> None:
    weights = weights_of(make_hf())
    other = Weights(weights.config, "other", weights.load)

    runners = [
        make_runner(weights, "fp32"),
        make_runner(weights, "fp32", kv_bytes=1 << 19),
        make_runner(weights, "bf16"),
        make_runner(other, "fp32"),
    ]

    numerics = [runner.info.numerics for runner in runners]
    assert numerics[0] == numerics[1]
    assert len(set(numerics)) == 3


@needs_int8
def test_int8_numerics_do_not_depend_on_threads_and_neither_do_bits() -> None:
    weights = weights_of(make_hf())
    prompts = [random_ids(length, seed=length) for length in (5, 290)]
    before = torch.get_num_threads()
    try:
        fp32 = [make_runner(weights, "fp32", threads=threads) for threads in (1, 2)]
        int8, said = [], []
        for threads in (1, 2):
            int8.append(make_runner(weights, "int8", threads=threads, kv_bytes=4 << 20))
            said.append(generate(int8[-1], prompts, disjoint_tables(2, 21), 4, sampling=SAMPLED))
    finally:
        torch.set_num_threads(before)

    assert fp32[0].info.numerics != fp32[1].info.numerics
    assert int8[0].info.numerics == int8[1].info.numerics
    assert said[0] == said[1]
    assert all(map(torch.equal, int8[0]._cache.layers, int8[1]._cache.layers))


def test_padding_of_the_embedding_is_never_said_and_told_apart() -> None:
    weights = weights_of(make_hf())
    cut = make_runner(weights, "fp32", num_tokens=VOCAB - 40)
    sampling = Sampling(max_tokens=1, temperature=2.0, logit_bias={VOCAB - 1: 100.0}, repetition_penalty=1.1)

    row = scheduled(ids := random_ids(20), 0, [0, 1], sampling=sampling, prompt=ids)
    said = {cut.step([replace(row, sampling=structs.replace(sampling, seed=seed))])[0].token for seed in range(200)}

    assert None not in said
    assert max(token for token in said if token is not None) < VOCAB - 40
    assert len(said) > 10
    assert cut.info.vocab_size == VOCAB, "a prompt may have such ids"
    assert cut.info.numerics != make_runner(weights, "fp32").info.numerics


def test_logprobs_of_prompt_and_answer_are_those_of_transformers_in_any_chunks() -> None:
    model = make_hf()
    runner = make_runner(weights_of(model), "fp32")
    ids = random_ids(200)
    exact = hf_logits(model, ids).double().log_softmax(-1)
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=4, prompt_logprobs=2)

    told: list[TokenLogprob] = []
    for start, end in pairwise([0, 1, 70, 199, 200]):  # of 129 rows, three pieces
        row = scheduled(ids[start:end], start, range(20), sampling=sampling, sample=end == 200, prompt=ids)
        (result,) = runner.step([row])
        told += result.prompt_logprobs

    assert len(told) == 199
    assert [each.logprob for each in told] == pytest.approx(exact[range(199), ids[1:]].tolist(), abs=1e-3)
    best = exact.topk(4)
    assert [[value for _, value in each.top] for each in told] == pytest.approx(best.values[:199, :2].numpy(), abs=1e-3)
    assert result.logprob is not None
    assert [token for token, _ in result.logprob.top] == best.indices[-1].tolist()
    assert result.logprob.top[0] == (result.token, result.logprob.logprob)


def test_memory_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no block"):
        make_runner(weights_of(make_hf()), "fp32", kv_bytes=100)


def test_a_saved_model_is_loaded(tmp_path: Path) -> None:
    model = make_hf("qwen3")
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(tmp_path / "Tiny-Model")
    prompt = random_ids(30)

    runner = TorchRunner.load(
        tmp_path / "Tiny-Model", precision="fp32", kv_bytes=1 << 20, max_num_seqs=4, block_size=BLOCK_SIZE
    )
    answer = generate(runner, [prompt], [list(range(10))], 8)[0]

    assert runner.info.model == "Tiny-Model"
    assert runner.info.eos_ids == [1, 2]
    assert is_greedy(model, prompt, answer)
