from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from tests.workers.tiny_models import (
    CONFIGS,
    VOCAB,
    Steps,
    hf_logits,
    make_hf,
    random_ids,
    relative_error,
    scheduled,
    weights_of,
)
from workers.model import Decoder
from workers.plan import Precision
from workers.quant import int8_works

needs_int8 = pytest.mark.skipif(not int8_works(), reason="this CPU has no exact 8-bit product")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    model = make_hf(name)
    step = Steps(weights_of(model))
    ids = random_ids(600)
    table = torch.randperm(128).tolist()

    found = step(scheduled(ids, 0, table))

    assert relative_error(found, hf_logits(model, ids)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2 with a window", "mistral with a window", "gemma3"])
def test_a_step_mixes_decodes_and_chunks_of_several_sequences(name: str) -> None:
    model = make_hf(name)
    step = Steps(weights_of(model))
    a, b, c = random_ids(300, seed=1), random_ids(40, seed=2), random_ids(520, seed=3)
    blocks = torch.randperm(128).tolist()
    tables = blocks[:40], blocks[40:60], blocks[60:]
    step(scheduled(a[:299], 0, tables[0]), scheduled(c[:257], 0, tables[2]))

    found = step(scheduled(a[299:], 299, tables[0]), scheduled(b, 0, tables[1]), scheduled(c[257:], 257, tables[2]))

    wanted = torch.cat([hf_logits(model, a)[299:], hf_logits(model, b), hf_logits(model, c)[257:]])
    assert relative_error(found, wanted) < 1e-4


@pytest.mark.parametrize("name", ["mistral with a window", "mistral with a wide window", "gemma3 scaled"])
def test_chunks_and_decodes_over_a_cached_prefix_equal_the_whole(name: str) -> None:
    model = make_hf(name)
    step = Steps(weights_of(model))
    ids = random_ids(900)
    blocks = torch.randperm(128).tolist()
    cached, own = blocks[:60], blocks[60:120]
    step(scheduled(ids[:400], 0, cached))
    table = [*cached[:25], *own]  # another sequence that shares 25 blocks of its prompt

    edges = [400, 401, 640, 641, 769, 899, 900]
    found = [step(scheduled(ids[start:end], start, table)) for start, end in pairwise(edges)]

    assert relative_error(torch.cat(found), hf_logits(model, ids)[400:]) < 1e-4


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_int8
def test_int8_bits_do_not_depend_on_threads_and_chunks(use_threads: Callable[[int], None]) -> None:
    weights = weights_of(make_hf("gemma3"))
    ids = random_ids(813)
    table = list(range(64))

    def logits(threads: int, *edges: int) -> torch.Tensor:
        use_threads(threads)
        step = Steps(weights, "int8")
        return torch.cat([step(scheduled(ids[low:high], low, table)) for low, high in pairwise([0, *edges, 813])])

    whole = logits(1)
    for threads in (1, 2, 3):
        assert torch.equal(logits(threads), whole)
        assert torch.equal(logits(threads, 311, 812), whole)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bits_of_the_gate_do_not_depend_on_threads_and_rows(name: str, use_threads: Callable[[int], None]) -> None:
    # Int8 rounds nearly all of such differences away, so they are looked for where they arise.
    activate_ = Decoder(weights_of(make_hf(name)), "fp32", 8, VOCAB)._activate_

    for rows, width in ((301, 2048), (513, 112), (40, 1111), (5, 2048), (601, 112), (146, 112), (147, 112), (4, 18944)):
        gate_up = torch.randn(rows, 2 * width)
        use_threads(1)
        wanted = torch.cat([activate_(row[:, :width].clone()) for row in gate_up.unsqueeze(1)])
        for threads in (1, 2, 3):
            use_threads(threads)
            assert torch.equal(activate_(gate_up.clone()[:, :width]), wanted)


@needs_int8
def test_ids_that_the_tokenizer_does_not_know_get_no_logits_and_the_others_the_same() -> None:
    weights = weights_of(make_hf("llama tied"))
    whole, cut = (Decoder(weights, "int8", 64, num_tokens) for num_tokens in (VOCAB, VOCAB - 5))
    hidden = torch.randn(5, 64)

    assert torch.equal(cut.logits(hidden), whole.logits(hidden)[:, : VOCAB - 5])


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), pytest.param("int8", 0.06, marks=needs_int8)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_other_precisions_stay_near_fp32(precision: Precision, tolerance: float, name: str) -> None:
    model = make_hf(name)
    ids = random_ids(100)
    step = Steps(weights_of(model), precision)

    found = step(scheduled(ids, 0, list(range(8))))

    assert relative_error(found, hf_logits(model, ids)) < tolerance
