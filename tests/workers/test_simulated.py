from __future__ import annotations

import math
from array import array

import pytest

from router.trivial import EOS_ID, TrivialTokenizer
from router.wire import pack_ids
from workers.engine import Engine, ScheduledSeq
from workers.protocol import Sampling, Submit
from workers.simulated import SimulatedRunner, TimeModel, simulated_info


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
