from __future__ import annotations

import math
from array import array
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.trivial import EOS_ID, TrivialTokenizer
from router.wire import pack_ids
from workers.engine import Engine
from workers.presets import PRESETS
from workers.protocol import Sampling, Submit
from workers.simulated import SIMULATED_TOKEN_BUDGET, SimulatedRunner, TimeModel, engine_over, simulated_info
from workers.step import ScheduledSeq


def prefill(tokens: int, *, cached: int = 0, sample: bool = True) -> ScheduledSeq:
    return ScheduledSeq(
        rid=0,
        tokens=[1] * tokens,
        start=cached,
        block_table=[],
        sample=sample,
        sampling=Sampling(max_tokens=1),
        prompt_len=cached + tokens + (not sample),
        ids=array("I"),
    )


def decode(position: int = 1000) -> ScheduledSeq:
    return ScheduledSeq(
        rid=0,
        tokens=[1],
        start=position,
        block_table=[],
        sample=True,
        sampling=Sampling(max_tokens=1),
        prompt_len=position,
        ids=array("I"),
    )


def make_engine() -> tuple[Engine, SimulatedRunner]:
    runner = SimulatedRunner(simulated_info(kv_tokens=1 << 16))
    return Engine(runner, token_budget=2048, clock=runner.clock), runner


def generate(
    prompt: list[int], *, seed: int = 1, choice: int = 0, max_tokens: int = 1000, ignore_eos: bool = False
) -> tuple[list[int], str | None]:
    engine, _ = make_engine()
    sampling = Sampling(max_tokens=max_tokens, seed=seed, choice=choice, ignore_eos=ignore_eos)
    engine.submit(Submit(rid=1, request_id="", prompt=pack_ids(prompt), sampling=sampling))
    ids: list[int] = []
    reason = None
    while engine.has_work():
        for output in engine.step().outputs:
            ids += output.ids
            reason = output.finish_reason
    return ids, reason


@pytest.mark.parametrize(
    ("batch", "seconds"),
    [
        ([prefill(1000)], 0.020 + 0.035),
        ([prefill(1000, cached=7000)], 0.020 + 0.035),
        ([prefill(2000, sample=False)], 0.070),  # the fixed cost comes with the last chunk, once a prompt
        ([prefill(1000), prefill(1000)], 2 * (0.020 + 0.035)),
        ([decode()], 0.045),
        ([decode()] * 8, 0.045),
        ([decode()] * 18, 0.045 * 1.05),
        ([decode(), prefill(100)], 0.045),
        ([decode(), prefill(2000)], 0.090),
    ],
)
def test_a_step_takes_the_time_of_its_longer_part(batch: list[ScheduledSeq], seconds: float) -> None:
    assert TimeModel().step_s(batch) == pytest.approx(seconds)
    assert TimeModel(speedup=5).step_s(batch) == pytest.approx(seconds / 5)


def first_tokens_at(prompts: list[int]) -> list[float]:
    """When prompts of so many tokens, sent together, each give their first token."""
    runner = SimulatedRunner(simulated_info(kv_tokens=1 << 18))
    engine = engine_over(runner)
    for number, length in enumerate(prompts):
        ids = pack_ids(range(1000 * number, 1000 * number + length))
        engine.submit(Submit(rid=number, request_id="", prompt=ids, sampling=Sampling(max_tokens=1)))
    ended: dict[int, float] = {}
    while engine.has_work():
        ended |= dict.fromkeys((output.rid for output in engine.step().outputs), runner.clock())
    return [ended[number] for number in range(len(prompts))]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_prompts_are_computed_one_after_the_other(prompts: list[int]) -> None:
    """Against a queue that takes them singly: none is sooner, the last is at the same time, and none later than a step."""
    model = TimeModel()
    queue = list(accumulate(model.prefill_s + model.prefill_token_s * length for length in prompts))
    longest_step_s = model.prefill_token_s * SIMULATED_TOKEN_BUDGET + 2 * model.prefill_s

    ended = first_tokens_at(prompts)

    assert max(ended) == pytest.approx(queue[-1])
    for mine, singly in zip(ended, queue, strict=True):
        assert singly - 1e-9 <= mine <= singly + longest_step_s


def test_a_burst_of_short_prompts_holds_nobody_up_for_more_than_a_decoding_step() -> None:
    ended = first_tokens_at([10] * 10)

    steps = sorted(set(ended))
    assert len(steps) == 5, "two at a time"
    assert max(later - sooner for sooner, later in zip([0.0, *steps], steps, strict=False)) < 0.045


@pytest.mark.parametrize(
    ("model", "prompts"),
    [
        (TimeModel(), 2),
        (TimeModel(prefill_s=0.030, decode_s=0.012), 1),
        (TimeModel(prefill_s=0.0), None),
    ],
)
def test_a_step_takes_the_prompts_that_hide_behind_its_decoding(model: TimeModel, prompts: int | None) -> None:
    assert model.prefills_per_step == prompts


def step_times(jitter: float, seed: int, count: int = 500) -> list[float]:
    runner = SimulatedRunner(simulated_info(), TimeModel(jitter=jitter), seed=seed)
    times: list[float] = []
    for _ in range(count):
        began = runner.clock()
        runner.step([decode()])
        times.append(runner.clock() - began)
    return times


def test_jitter_is_bounded_even_and_drawn_from_the_seed() -> None:
    times = step_times(0.2, seed=1)

    assert times == step_times(0.2, seed=1)
    assert times != step_times(0.2, seed=2)
    assert 0.045 * 0.8 <= min(times) < 0.045 * 0.82
    assert 0.045 * 1.18 < max(times) <= 0.045 * 1.2
    assert sum(times) / len(times) == pytest.approx(0.045, rel=0.02)
    assert step_times(0.0, seed=1) == pytest.approx([0.045] * 500)


def test_a_slow_replica_takes_so_many_times_as_long() -> None:
    runner = SimulatedRunner(simulated_info())
    runner.slowdown = 3.0

    runner.step([decode()])

    assert runner.clock() == pytest.approx(3 * 0.045)


@pytest.mark.parametrize(
    ("preset", "tokens", "batch", "prefill_s", "decode_s"),
    [
        ("default", 2000, 18, 0.090, 0.045 * 1.05),
        ("h100-8b", 500, 8, 0.130, 0.012),
        ("smg", 500, 10, 0.0625, 0.006 + 10 * 0.000_35),
        ("laptop", 512, 16, 0.444, 0.082),
    ],
)
def test_a_preset_takes_the_time_of_what_it_stands_for(
    preset: str, tokens: int, batch: int, prefill_s: float, decode_s: float
) -> None:
    model = PRESETS[preset].time_model

    assert model.step_s([prefill(tokens)]) == pytest.approx(prefill_s, rel=0.01)
    assert model.step_s([decode()] * batch) == pytest.approx(decode_s, rel=0.01)


def test_the_clock_shows_what_was_simulated_and_the_engine_measures_it() -> None:
    engine, runner = make_engine()
    engine.submit(
        Submit(rid=1, request_id="", prompt=pack_ids(range(1000)), sampling=Sampling(max_tokens=2, ignore_eos=True))
    )
    engine.step()
    report = engine.step()

    assert runner.clock() == pytest.approx(0.055 + 0.045)
    assert report.prefill_tok_s == pytest.approx(1000 / 0.055)
    assert report.step_ms == pytest.approx(45)


def test_the_same_request_gives_the_same_text_and_another_seed_or_choice_another_one() -> None:
    prompt = list(range(20))

    assert generate(prompt) == generate(prompt)
    assert generate(prompt) != generate(prompt, seed=2)
    assert generate(prompt) != generate(prompt, choice=1)


def test_the_text_is_english_of_a_plausible_length_that_ends_with_a_sentence() -> None:
    for seed in range(20):
        ids, reason = generate([1, 2, 3], seed=seed)
        text = TrivialTokenizer().decode(ids, skip_special_tokens=True)

        assert reason == "stop"
        assert ids[-1] == EOS_ID
        assert 32 <= len(ids) <= 256 + 8
        assert text.isascii()
        assert text.endswith(". ")


def test_an_ignored_end_never_comes() -> None:
    ids, reason = generate([1, 2, 3], ignore_eos=True, max_tokens=600)

    assert reason == "length"
    assert EOS_ID not in ids


def test_a_text_continues_elsewhere_where_it_was_cut() -> None:
    """Prompt and what was said, as one prompt: what follows is the same, until the end, which depends on the length."""
    ids, _ = generate([1, 2, 3], ignore_eos=True, max_tokens=50)
    rest, _ = generate([1, 2, 3, *ids[:20]], ignore_eos=True, max_tokens=30)

    assert rest == ids[20:]


def test_logprobs_are_those_of_a_draw_that_is_uniform_over_a_few_words() -> None:
    engine, _ = make_engine()
    prompt = [7, 8, 9, 10, 11]
    sampling = Sampling(max_tokens=600, logprobs=3, prompt_logprobs=40, seed=1)
    engine.submit(Submit(rid=1, request_id="", prompt=pack_ids(prompt), sampling=sampling))
    outputs = [output for _ in range(600) if engine.has_work() for output in engine.step().outputs]

    assert len(outputs[0].prompt_logprobs) == len(prompt) - 1
    told = [*zip(prompt[1:], outputs[0].prompt_logprobs, strict=True)]
    told += [(output.ids[0], output.logprobs[0]) for output in outputs]
    for token, logprob in told:
        top = logprob.top
        assert top == sorted(top, key=lambda pair: (-pair[1], pair[0]))
        assert {value for _, value in top} == {logprob.logprob}
        assert 0 < math.exp(logprob.logprob) <= 1
        assert len(top) <= round(math.exp(-logprob.logprob))
        assert token in dict(top) or len(top) == 3
    assert told[-1][1].logprob == 0, "the end was certain"


def test_the_end_waits_for_min_tokens() -> None:
    engine, _ = make_engine()
    sampling = Sampling(max_tokens=1000, min_tokens=400, seed=1)
    engine.submit(Submit(rid=1, request_id="", prompt=pack_ids([1, 2, 3]), sampling=sampling))
    ids = [token for _ in range(1000) if engine.has_work() for output in engine.step().outputs for token in output.ids]

    assert 400 < len(ids) <= 408
    assert ids[-1] == EOS_ID


@pytest.mark.parametrize(("patience", "first"), [(0.0, "long"), (1.0, "short")])
def test_a_short_prompt_has_its_first_token_before_a_long_one_that_has_begun(patience: float, first: str) -> None:
    engine = engine_over(SimulatedRunner(simulated_info()))
    engine.warm_up()
    rids = {1: "long", 2: "short"}
    long, short = (
        Submit(
            rid=rid, request_id="", prompt=pack_ids([rid] * count), patience=patience, sampling=Sampling(max_tokens=1)
        )
        for rid, count in ((1, 20_000), (2, 200))
    )
    engine.submit(long)
    engine.step()

    engine.submit(short)

    told = []
    while engine.has_work():
        told += [rids[output.rid] for output in engine.step().outputs]
    assert told[0] == first
    assert sorted(told) == ["long", "short"]
