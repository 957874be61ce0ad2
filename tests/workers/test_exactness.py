"""The same request gets the same ids and the same logprobs, bit for bit, whatever happens around it.

Small random models of each family through the whole engine in precision int8. Prompts cross the tiles of 256 keys and the
edges of windows. ``WARMPATH_TESTS_CASES`` is how many examples each property gets on each path (of which hypothesis makes
the first a plain one), on all paths when it is set; docs/engine.md has the counts of a long run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.workers.exactness import CASES, Answer, Conditions, Replica, Request, tell_cases
from tests.workers.tiny_models import BLOCK_SIZE, VOCAB, make_hf, random_ids, weights_of
from workers import runner as runner_module
from workers.protocol import Grammar, Sampling
from workers.quant import int8_works
from workers.runner import TorchRunner

__all__ = ["tell_cases"]  # a fixture

LONG: Final = "WARMPATH_TESTS_CASES" in os.environ
EXAMPLES: Final = int(os.environ.get("WARMPATH_TESTS_CASES", "2"))

pytestmark = [
    pytest.mark.skipif(not int8_works(), reason="this CPU has no exact 8-bit product"),
    pytest.mark.timeout(300 + 30 * EXAMPLES),
]

PATHS: Final = {
    "llama": ("llama", True),
    "llama, fp32 KV": ("llama", False),
    "llama 3 RoPE": ("llama3 rope", True),
    "mistral, window 100": ("mistral with a window", True),
    "qwen2, tied head": ("qwen2", True),
    "qwen2, window 300": ("qwen2 with a window", True),
    "qwen3": ("qwen3", True),
    "gemma3, window 200": ("gemma3", True),
    "gemma3, fp32 KV": ("gemma3", False),
}
"""What is tried → the small model's name and whether its KV is bf16."""

ONLY_IN_LONG_RUNS: Final = {"llama 3 RoPE", "qwen2, tied head", "gemma3, fp32 KV"}
"""Their kinds of KV and window others have too; what is their own, a rotation or a head, is computed row by row."""

MAX_ANSWER: Final = 18

EDGES: Final = (1, 2, 15, 16, 17, 31, 32, 33, 99, 101, 255, 256, 257, 300, 511, 512, 513)


@cache
def load(path: str) -> Replica:
    name, bf16 = PATHS[path]
    with pytest.MonkeyPatch.context() as patch:
        if not bf16:
            patch.setattr(runner_module, "supports_bf16", lambda: False)
        runner = TorchRunner(
            weights_of(make_hf(name)),
            name="tiny",
            eos_ids=frozenset({0}),
            precision="int8",
            kv_bytes=8 << 20,
            max_num_seqs=64,
            block_size=BLOCK_SIZE,
        )
    return Replica(path, runner)


@pytest.fixture(scope="module", params=sorted(PATHS if LONG else PATHS.keys() - ONLY_IN_LONG_RUNS))
def replica(request: pytest.FixtureRequest) -> Replica:
    return load(request.param)


GRAMMARS: Final = (
    Grammar(LLMatcher.grammar_from_regex("[a-f]{3,9}")),
    Grammar(LLMatcher.grammar_from_regex("[0-9]+( [A-Z]+)*"), after=40),
    Grammar(LLMatcher.grammar_from_json_schema('{"type": "array", "items": {"enum": [1, "a", null]}, "maxItems": 4}')),
)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Half of them plain, the others with anything that a client may ask for."""
    max_tokens = draw(st.integers(1, MAX_ANSWER))
    plain = Sampling(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        ignore_eos=draw(st.booleans()),
        logprobs=2,
    )
    if draw(st.booleans()):
        return plain
    return msgspec.structs.replace(
        plain,
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5])),
        top_k=draw(st.sampled_from([0, 1, 5, 40])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.3])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3)),
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)),
        logprobs=draw(st.integers(0, 8)),
        prompt_logprobs=draw(st.none() | st.integers(0, 3)),
        grammar=draw(st.none() | st.sampled_from(GRAMMARS)),
        choice=draw(st.integers(0, 3)),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A beginning that several have in common, and an end."""
    common = draw(st.sampled_from(EDGES) | st.integers(0, 520))
    own = draw(st.sampled_from(EDGES[:8]) | st.integers(1, 60))
    return random_ids(common, seed=draw(st.integers(0, 1))) + random_ids(own, seed=draw(st.integers(2, 9)))


salts = st.sampled_from(["", "a"])
requests = st.builds(Request, prompts(), samplings(), salts)
"""Those that are compared. They tell logprobs, which show a wrong bit long before the ids do."""
company = st.lists(
    st.builds(
        Request, prompts(), samplings(), salts, arrives=st.integers(0, 9), leaves=st.none() | st.integers(10, 30)
    ),
    max_size=4,
)
threads = st.sampled_from([1, 1, 2])


def check(what: str, replica: Replica, found: Answer, wanted: Answer) -> None:
    assert found == wanted
    CASES[what, replica.path] += 1


def chunk(size: int, request: Request) -> int:
    """A token budget of `size`, or more where that would mean too many steps."""
    return max(size, len(request.prompt) // 25)


def changed(request: Request, **changes: Any) -> Request:
    return replace(request, sampling=msgspec.structs.replace(request.sampling, **changes))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=EXAMPLES)
@given(request=requests, others=company, arrives=st.integers(0, 9), threads=threads)
def test_company_changes_nothing(
    replica: Replica, request: Request, others: list[Request], arrives: int, threads: int
) -> None:
    wanted = replica.alone(request)

    found, *_ = replica.run([replace(request, arrives=arrives), *others], Conditions(threads=threads))

    check("in a batch", replica, found, wanted)


@settings(max_examples=EXAMPLES)
@given(request=requests, size=st.sampled_from(EDGES) | st.integers(1, 600), threads=threads)
def test_chunks_change_nothing(replica: Replica, request: Request, size: int, threads: int) -> None:
    wanted = replica.alone(request)

    (found,) = replica.run([request], Conditions(token_budget=chunk(size, request), threads=threads))

    check("any chunk size", replica, found, wanted)


@settings(max_examples=EXAMPLES)
@given(request=requests, before=st.builds(Request, prompts(), samplings(), salts), reach=st.data())
def test_what_is_cached_changes_nothing(
    replica: Replica, request: Request, before: Request, reach: st.DataObject
) -> None:
    if reach.draw(st.booleans()):
        request = changed(replace(request, salt=before.salt), prompt_logprobs=None)
    wanted = replica.alone(request)
    kept = reach.draw(st.just(len(request.prompt)) | st.integers(0, len(request.prompt)))
    before = changed(replace(before, prompt=[*request.prompt[:kept], *before.prompt[:60]]), grammar=None)

    _, found = replica.run([before, replace(request, arrives=MAX_ANSWER + 1)])

    most = (len(request.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    readable = before.salt == request.salt and request.sampling.prompt_logprobs is None
    shared = common_prefix(before.prompt, request.prompt) // BLOCK_SIZE * BLOCK_SIZE
    assert found.cached_tokens == (min(most, shared) if readable else 0)
    kind = (
        "cache miss" if not found.cached_tokens else "cache hit" if found.cached_tokens == most else "partial cache hit"
    )
    check(kind, replica, found, wanted)


@settings(max_examples=EXAMPLES)
@given(request=requests, more=st.integers(1, 40), turn=samplings())
def test_the_next_turn_reads_what_decoding_wrote(replica: Replica, request: Request, more: int, turn: Sampling) -> None:
    request = changed(request, grammar=None)
    first = replica.alone(request)
    talk = [*request.prompt, *first.ids]
    second = changed(Request([*talk, *random_ids(more, seed=11)], turn, request.salt), prompt_logprobs=None, logprobs=3)
    wanted = replica.alone(second)

    _, found = replica.run([request, replace(second, arrives=MAX_ANSWER + 1)])

    assert found.cached_tokens == min(len(talk) - 1, len(second.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    check("cache written by decoding", replica, found, wanted)


@settings(max_examples=EXAMPLES)
@given(
    lengths=st.lists(st.sampled_from(EDGES[:-3]) | st.integers(1, 300), min_size=2, max_size=3),
    sampling=samplings(),
    budget=st.integers(64, 600),
)
def test_preemption_changes_nothing(replica: Replica, lengths: list[int], sampling: Sampling, budget: int) -> None:
    # Each grows into at least one block more, and there is none: the newest has to give up its own.
    sampling = msgspec.structs.replace(
        sampling, max_tokens=MAX_ANSWER, ignore_eos=True, stop_token_ids=[], grammar=None
    )
    requests = [Request(random_ids(length, seed=20 + i), sampling) for i, length in enumerate(lengths)]
    wanted = [replica.alone(request) for request in requests]
    at_first = sum(length // BLOCK_SIZE + 1 for length in lengths)
    longest = (max(lengths) + MAX_ANSWER) // BLOCK_SIZE + 1
    before = replica.num_preemptions

    found = replica.run(requests, Conditions(num_blocks=max(at_first, longest), token_budget=max(budget, sum(lengths))))

    assert replica.num_preemptions > before
    for one, other in zip(found, wanted, strict=True):
        check("preempted, or because of it alone", replica, one, other)


@settings(max_examples=EXAMPLES)
@given(request=requests, budget=st.integers(32, 600), threads=threads)
def test_an_answer_is_taken_up_after_any_number_of_ids(
    replica: Replica, request: Request, budget: int, threads: int
) -> None:
    wanted = replica.alone(request)
    resumed = [replace(request, resume=wanted.ids[:count]) for count in range(1, len(wanted.ids))]
    if not resumed:
        return

    found = replica.run(resumed, Conditions(token_budget=chunk(budget, request), threads=threads))

    for count, answer in enumerate(found, 1):
        check("resumed after its first n ids", replica, answer, wanted.after(count))


@settings(max_examples=EXAMPLES)
@given(request=requests)
def test_a_second_thread_changes_nothing(replica: Replica, request: Request) -> None:
    wanted = replica.alone(request)

    (found,) = replica.run([request], Conditions(threads=2))

    check("on two threads", replica, found, wanted)


@settings(max_examples=EXAMPLES)
@given(request=requests, n=st.integers(2, 5))
def test_choices_that_run_together_are_those_that_run_alone(replica: Replica, request: Request, n: int) -> None:
    choices = [request.choice(number) for number in range(n)]
    wanted = [replica.alone(choice) for choice in choices]

    found = replica.run(choices)

    for one, other in zip(found, wanted, strict=True):
        check("each of n choices", replica, one, other)


@settings(max_examples=EXAMPLES)
@given(request=requests, others=company, arrives=st.integers(0, 9))
def test_names_that_all_collide_change_nothing(
    replica: Replica, request: Request, others: list[Request], arrives: int
) -> None:
    wanted = replica.alone(request)
    num_blocks = max(len(one.prompt) + MAX_ANSWER for one in (request, *others)) // BLOCK_SIZE + 2

    found, *_ = replica.run(
        [replace(request, arrives=arrives), *others], Conditions(num_blocks=num_blocks, colliding=True)
    )

    check("all names of blocks equal", replica, found, wanted)


@settings(max_examples=EXAMPLES)
@given(
    requests=st.lists(requests, min_size=1, max_size=4),
    others=company,
    budget=st.integers(32, 600),
    spare=st.integers(0, 40),
    threads=threads,
    drawn=st.data(),
)
def test_everything_at_once_changes_nothing(
    replica: Replica,
    requests: list[Request],
    others: list[Request],
    budget: int,
    spare: int,
    threads: int,
    drawn: st.DataObject,
) -> None:
    wanted = [replica.alone(request) for request in requests]
    told = [drawn.draw(st.integers(0, max(0, len(answer.ids) - 1))) for answer in wanted]
    resumed = [
        replace(request, resume=answer.ids[:count], arrives=drawn.draw(st.integers(0, 9)))
        for request, answer, count in zip(requests, wanted, told, strict=True)
    ]
    longest = max(len(one.prompt) for one in (*requests, *others)) + MAX_ANSWER

    found = replica.run(
        [*resumed, *others],
        Conditions(
            token_budget=max(budget, longest // 25), num_blocks=longest // BLOCK_SIZE + 2 + spare, threads=threads
        ),
    )

    for answer, whole, count in zip(found, wanted, told, strict=False):
        check("everything at once", replica, answer, whole.after(count))


def test_seeds_and_choices_tell_answers_apart() -> None:
    """What all the others compare could be equal for a bad reason."""
    one = load("llama")
    request = Request(random_ids(40), Sampling(max_tokens=20, ignore_eos=True))

    answers = [one.alone(changed(request, seed=seed, choice=choice)) for seed in (0, 1) for choice in (0, 1)]

    assert len({tuple(answer.ids) for answer in answers}) == 4
