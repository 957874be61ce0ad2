"""The default model, real weights: in fp32 what `transformers` says, in int8 the same bits whatever happens around it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch

from router.prompt import Prompter, load_prompter
from tests.default_model import default_model
from tests.workers.exactness import CASES, Answer, Conditions, Replica, Request, tell_cases
from tests.workers.real_models import hf_twin, load_fp32
from tests.workers.tiny_models import BLOCK_SIZE, Steps, hf_logits, relative_error, scheduled
from workers.protocol import Sampling
from workers.quant import int8_works
from workers.runner import TorchRunner
from workers.tokenizer_files import load_tokenizer_files
from workers.weights import Weights

__all__ = ["tell_cases"]

pytestmark = pytest.mark.model

needs_int8 = pytest.mark.skipif(not int8_works(), reason="this CPU has no exact 8-bit product")

GREEDY: Final[dict[str, list[int]]] = json.loads((Path(__file__).parent / "default_greedy.json").read_text())
"""Question → the 128 ids that fp32 finds likeliest one after the other, ends of a turn included. Questions are those whose
second likeliest id is nowhere so near that another CPU's rounding could prefer it."""

QUESTIONS: Final = int(os.environ.get("WARMPATH_TESTS_QUESTIONS", "2"))
"""How many of the six are asked."""

DATE: Final = datetime(2026, 1, 1, tzinfo=UTC)


@cache
def prompter() -> Prompter:
    return load_prompter(load_tokenizer_files(default_model()))


def chat(text: str) -> list[int]:
    return list(prompter().encode_chat({"messages": [{"role": "user", "content": text}]}, DATE))


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_fp32(default_model())


def test_logits_and_128_greedy_tokens_in_fp32_are_those_of_transformers(weights: Weights) -> None:
    # One pass over prompt and answer: where the likeliest id is at each place the one that comes, the answer is the greedy
    # one, by induction over the places. That decoding gives the logits of a pass is the next test's.
    model = hf_twin(weights, "llama")
    step = Steps(weights)

    for question, answer in list(GREEDY.items())[:QUESTIONS]:
        prompt = chat(question)
        ids = [*prompt, *answer[:-1]]
        found = step(scheduled(ids, 0, list(range(16))))
        wanted = hf_logits(model, ids)

        assert len(answer) == 128
        assert relative_error(found, wanted) < 1e-4
        assert wanted[len(prompt) - 1 :].argmax(-1).tolist() == answer
        assert found[len(prompt) - 1 :].argmax(-1).tolist() == answer


def test_decoding_in_fp32_says_the_same_cold_and_warm(weights: Weights) -> None:
    step = Steps(weights)
    questions = list(GREEDY)[:3]
    tables = [list(range(6 * i, 6 * i + 6)) for i in range(6)]
    for warm, cold in zip(tables[:3], tables[3:], strict=True):
        warm[:2] = cold[:2]  # what the cold one has computed
    contexts = [chat(question) for question in questions * 2]
    step(*(scheduled(ids[: 2 * BLOCK_SIZE], 0, table) for ids, table in zip(contexts[3:], tables[3:], strict=True)))
    done = [2 * BLOCK_SIZE] * 6

    for _ in range(10):
        rows = [scheduled(ids[start:], start, table) for ids, start, table in zip(contexts, done, tables, strict=True)]
        done = [len(ids) for ids in contexts]
        ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0) - 1
        for ids, token in zip(contexts, step(*rows, sampled=ends.tolist()).argmax(-1).tolist(), strict=True):
            ids.append(token)

    assert [ids[-10:] for ids in contexts] == [GREEDY[question][:10] for question in questions * 2]


# --- int8, through the whole engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replica() -> Replica:
    runner = TorchRunner.load(
        default_model(), precision="int8", kv_bytes=100 << 20, max_num_seqs=64, block_size=BLOCK_SIZE
    )
    return Replica("SmolLM2-135M, real", runner)


ANSWER: Final = 10


def requests() -> list[Request]:
    """Short and greedy; across tiles and with noise; with everything that changes logits."""
    long = [token for question in GREEDY for token in [*chat(question), *GREEDY[question]]]
    noisy = Sampling(max_tokens=ANSWER, temperature=1.0, top_p=0.95, seed=3, logprobs=5, ignore_eos=True)
    adjusted = msgspec.structs.replace(
        noisy,
        temperature=1.3,
        top_k=50,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={100: 5.0, 260: -100.0},
        choice=1,
    )
    return [
        Request(chat("What is the capital of France?"), msgspec.structs.replace(noisy, temperature=0.0)),
        Request(long[:530], noisy),
        Request(long[:300], adjusted),
    ]


def check(what: str, found: Answer, wanted: Answer) -> None:
    assert found == wanted
    CASES[what, "SmolLM2-135M, real"] += 1


@pytest.fixture(scope="module")
def alone(replica: Replica) -> list[Answer]:
    return [replica.alone(request) for request in requests()]


@needs_int8
def test_int8_knows_the_capital_of_france(alone: list[Answer]) -> None:
    assert prompter().decode(alone[0].ids, skip_special_tokens=True).startswith("The capital of France is Paris")


@needs_int8
@pytest.mark.parametrize(
    ("what", "conditions"),
    [
        ("in a batch", Conditions()),
        ("any chunk size", Conditions(token_budget=100)),
        ("on two threads", Conditions(token_budget=290, threads=2)),
        # 34 blocks for the long one, 2 and 1 that the others do not share with it, and none to grow into.
        ("preempted, or because of it alone", Conditions(num_blocks=37, token_budget=1000)),
    ],
)
def test_int8_answers_together_are_those_alone(
    what: str, conditions: Conditions, replica: Replica, alone: list[Answer]
) -> None:
    together = [replace(request, arrives=number) for number, request in enumerate(requests())]
    before = replica.num_preemptions

    found = replica.run(together, conditions)

    for answer, wanted in zip(found, alone, strict=True):
        check(what, answer, wanted)
    assert (replica.num_preemptions > before) == what.startswith("preempted")


@needs_int8
def test_int8_answers_from_the_cache_are_those_without(replica: Replica, alone: list[Answer]) -> None:
    _, long, short = requests()
    later = [replace(long, arrives=ANSWER + 1), replace(short, arrives=ANSWER + 2)]

    _, hit, partial = replica.run([replace(long, prompt=long.prompt[:529]), *later])

    assert (hit.cached_tokens, partial.cached_tokens) == (528, 288)
    check("cache hit", hit, alone[1])
    check("partial cache hit", partial, alone[2])


@needs_int8
def test_int8_answers_are_taken_up_after_any_number_of_ids(replica: Replica, alone: list[Answer]) -> None:
    request = requests()[1]

    found = replica.run([replace(request, resume=alone[1].ids[:n]) for n in range(1, ANSWER)])

    for n, answer in enumerate(found, 1):
        check("resumed after its first n ids", answer, alone[1].after(n))


@needs_int8
def test_int8_choices_together_are_those_alone(replica: Replica) -> None:
    choices = [replace(requests()[2], prompt=chat("Tell me a joke.")).choice(number) for number in range(3)]
    wanted = [replica.alone(choice) for choice in choices]

    found = replica.run(choices)

    assert len({tuple(answer.ids) for answer in wanted}) == 3
    for one, other in zip(found, wanted, strict=True):
        check("each of n choices", one, other)
