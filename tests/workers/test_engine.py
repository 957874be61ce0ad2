"""The whole engine over a runner that reads its context back through the block tables (`tests.workers.fake_runner`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.blocks import BlockName, block_names, root_name
from router.wire import pack_ids, unpack_ids
from tests.workers.fake_runner import EOS, VOCAB, FakeRunner, answer, logprob_of, make_info, make_submit, next_id
from workers.engine import Engine
from workers.protocol import EngineInfo, Output, Sampling, StepReport, Submit, TokenLogprob

STEPS_AT_MOST = 10_000


class Ticks:
    """A clock that advances by a tenth of a second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


class Answers:
    """Collects reports and holds each of them to the protocol."""

    def __init__(self) -> None:
        self.ids: defaultdict[int, list[int]] = defaultdict(list)
        self.last: dict[int, Output] = {}
        self.logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        self.prompt_logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        self.readable: set[int] = set()

    def take(self, report: StepReport) -> None:
        for output in report.outputs:
            assert self.last.get(output.rid) is None or self.last[output.rid].finish_reason is None
            assert not output.prompt_logprobs or output.rid not in self.last, "with the first output"
            self.ids[output.rid] += output.ids
            self.logprobs[output.rid] += output.logprobs
            self.prompt_logprobs[output.rid] += output.prompt_logprobs
            self.last[output.rid] = output
        assert self.readable.issuperset(report.removed)
        self.readable.difference_update(report.removed)
        for run in report.stored:
            self.readable.update(run.names)

    def ended(self, rid: int) -> bool:
        return rid in self.last and self.last[rid].finish_reason is not None


def make_engine(info: EngineInfo | None = None, *, token_budget: int = 512) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(info or make_info())
    return Engine(runner, token_budget=token_budget, clock=Ticks()), runner


def run_to_end(engine: Engine, answers: Answers | None = None) -> Answers:
    answers = answers or Answers()
    for _ in range(STEPS_AT_MOST):
        if not engine.has_work():
            return answers
        answers.take(engine.step())
    raise AssertionError("the engine does not come to an end")


def ids_without_end(count: int, start: int = 0) -> list[int]:
    return [(start + i) % EOS for i in range(count)]


def expected(submit: Submit, info: EngineInfo) -> list[int]:
    max_len = min(info.max_model_len, info.num_blocks * info.block_size)
    return answer(unpack_ids(submit.prompt), submit.sampling, max_len)


def test_one_request_alone_gets_the_answer_of_the_model_token_by_token() -> None:
    engine, runner = make_engine()
    submit = make_submit(1, ids_without_end(10), max_tokens=6, ignore_eos=True)
    engine.submit(submit)
    answers = run_to_end(engine)

    assert answers.ids[1] == expected(submit, engine.info)
    assert answers.last[1].finish_reason == "length"
    assert [[len(row.tokens) for row in batch] for batch in runner.batches] == [[10], [1], [1], [1], [1], [1]]


def test_a_long_prompt_runs_in_chunks_of_the_token_budget_and_only_the_last_one_samples() -> None:
    engine, runner = make_engine(token_budget=4)
    engine.submit(make_submit(1, ids_without_end(10), max_tokens=1))
    run_to_end(engine)

    assert [(batch[0].start, len(batch[0].tokens), batch[0].sample) for batch in runner.batches] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
    ]


def test_those_who_generate_go_on_while_a_long_prompt_is_prefilled() -> None:
    engine, runner = make_engine(token_budget=6)
    engine.submit(make_submit(1, ids_without_end(5), max_tokens=20, ignore_eos=True))
    engine.step()
    engine.submit(make_submit(2, ids_without_end(20, start=7), max_tokens=1))
    engine.step()
    engine.step()

    assert [[(row.rid, len(row.tokens)) for row in batch] for batch in runner.batches[1:]] == [[(1, 1), (2, 5)]] * 2


def test_a_second_request_reuses_the_blocks_of_the_first_and_runs_only_the_rest() -> None:
    engine, runner = make_engine()
    engine.submit(make_submit(1, ids_without_end(10), max_tokens=1))
    run_to_end(engine)
    longer = make_submit(2, [*ids_without_end(10), 3, 4, 5], max_tokens=3)
    engine.submit(longer)
    answers = run_to_end(engine)

    assert answers.last[2].cached_tokens == 8
    assert answers.ids[2] == expected(longer, engine.info)
    assert (runner.batches[1][0].start, len(runner.batches[1][0].tokens)) == (8, 5)


def test_generated_tokens_are_reused_by_the_next_turn_but_never_the_last_prompt_token() -> None:
    engine, _ = make_engine()
    engine.submit(make_submit(1, ids_without_end(6), max_tokens=7, ignore_eos=True))
    talk = [*ids_without_end(6), *run_to_end(engine).ids[1]]
    # 13 ids, of which 12 were computed: three blocks of 4. The same 12 as a prompt may reuse two of them.
    engine.submit(make_submit(2, talk, max_tokens=1))
    engine.submit(make_submit(3, talk[:12], max_tokens=1))
    answers = run_to_end(engine)

    assert answers.last[2].cached_tokens == 12
    assert answers.last[3].cached_tokens == 8


def test_salts_do_not_share() -> None:
    engine, _ = make_engine()
    for rid, salt in enumerate(["", "a", "b", "a"]):
        engine.submit(make_submit(rid, ids_without_end(9), max_tokens=1, salt=salt))
        answers = run_to_end(engine)
        assert answers.last[rid].cached_tokens == (8 if rid == 3 else 0)


def test_names_of_prompt_and_answer_are_reported_once_they_are_filled() -> None:
    info = make_info()
    engine, _ = make_engine(info)
    submit = make_submit(1, ids_without_end(6), max_tokens=7, salt="s", ignore_eos=True)
    engine.submit(submit)
    answers = Answers()

    answers.take(engine.step())
    assert len(answers.readable) == 1
    run_to_end(engine, answers)

    context = [*ids_without_end(6), *expected(submit, info)][:-1]
    root = root_name(model=info.model, revision=info.revision, salt="s")
    assert answers.readable == set(block_names(pack_ids(context), root, info.block_size))


def test_an_end_token_stops_unless_it_is_ignored() -> None:
    prompt = next(
        ids for start in range(1000) if next_id(ids := [*ids_without_end(5, start), start % EOS], GREEDY) == EOS
    )
    engine, _ = make_engine()
    engine.submit(make_submit(1, prompt, max_tokens=5))
    engine.submit(make_submit(2, prompt, max_tokens=5, ignore_eos=True))
    answers = run_to_end(engine)

    assert (answers.ids[1], answers.last[1].finish_reason) == ([EOS], "stop")
    assert (len(answers.ids[2]), answers.last[2].finish_reason) == (5, "length")


GREEDY = Sampling(max_tokens=5)


def test_a_stop_token_stops_and_is_part_of_the_output() -> None:
    engine, _ = make_engine()
    ids = answer(ids_without_end(5), Sampling(max_tokens=5, ignore_eos=True), 100)
    engine.submit(make_submit(1, ids_without_end(5), stop_token_ids=[ids[2]], ignore_eos=True))
    answers = run_to_end(engine)

    assert answers.ids[1] == ids[: ids.index(ids[2]) + 1]
    assert answers.last[1].finish_reason == "stop"


def test_the_end_of_the_context_ends_the_answer() -> None:
    engine, _ = make_engine(make_info(max_model_len=12))
    engine.submit(make_submit(1, ids_without_end(9), max_tokens=100, ignore_eos=True))
    engine.submit(make_submit(2, ids_without_end(11), max_tokens=100, ignore_eos=True))
    answers = run_to_end(engine)

    assert (len(answers.ids[1]), answers.last[1].finish_reason) == (3, "length")
    assert (len(answers.ids[2]), answers.last[2].finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("prompt", "numbers"),
    [
        ([], "no tokens"),
        (ids_without_end(40), "40 tokens leaves no room to answer in a context of 40"),
        (ids_without_end(32), "32 tokens and its answer do not fit into 32 tokens"),
        ([1, VOCAB], f"{VOCAB} is outside the vocabulary of {VOCAB}"),
    ],
)
def test_what_can_never_run_is_rejected_with_the_reason_and_nobody_else_suffers(
    prompt: list[int], numbers: str
) -> None:
    engine, _ = make_engine(make_info(num_blocks=8, max_model_len=40))
    other = make_submit(2, ids_without_end(31), max_tokens=9)
    engine.submit(make_submit(1, prompt))
    engine.submit(other)
    answers = run_to_end(engine)

    assert answers.last[1].finish_reason == "rejected"
    assert numbers in answers.last[1].message
    assert answers.ids[2] == expected(other, engine.info)


def test_the_newest_is_preempted_when_memory_runs_out_and_says_the_same_in_the_end() -> None:
    info = make_info(num_blocks=8)
    engine, _ = make_engine(info)
    old = make_submit(1, ids_without_end(9), max_tokens=20, ignore_eos=True)
    new = make_submit(2, ids_without_end(9, start=20), max_tokens=20, ignore_eos=True)
    engine.submit(old)
    engine.submit(new)
    answers = Answers()
    ends: list[int] = []
    while engine.has_work():
        report = engine.step()
        answers.take(report)
        ends += [output.rid for output in report.outputs if output.finish_reason]

    assert report.preemptions_total >= 1
    assert ends == [1, 2]
    assert answers.ids == {1: expected(old, info), 2: expected(new, info)}
    assert answers.last[2].cached_tokens == 0, "as of its first admission, whatever it found when it came back"


def test_a_more_urgent_request_is_admitted_first_and_preempted_last() -> None:
    info = make_info(num_blocks=8, max_num_seqs=2)
    engine, _ = make_engine(info)
    for rid, priority in enumerate([5, 5, 1]):
        engine.submit(make_submit(rid, ids_without_end(9, 11 * rid), max_tokens=20, priority=priority, ignore_eos=True))
    ends: list[int] = []
    while engine.has_work():
        ends += [output.rid for output in engine.step().outputs if output.finish_reason]

    assert ends == [2, 0, 1]


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine, runner = make_engine()
    for rid in range(3):
        engine.submit(make_submit(rid, ids_without_end(14), max_tokens=1))
    answers = run_to_end(engine)

    assert [answers.last[rid].cached_tokens for rid in range(3)] == [0, 12, 12]
    assert [[len(row.tokens) for row in batch] for batch in runner.batches] == [[14], [2, 2]]


def test_a_request_that_waits_for_a_shared_prefix_does_not_hold_up_others() -> None:
    engine, runner = make_engine()
    engine.submit(make_submit(1, ids_without_end(14), max_tokens=1))
    engine.submit(make_submit(2, ids_without_end(14), max_tokens=1))
    engine.submit(make_submit(3, ids_without_end(6, start=30), max_tokens=1))
    run_to_end(engine)

    assert [[row.rid for row in batch] for batch in runner.batches] == [[1, 3], [2]]


def test_an_aborted_request_says_no_more_and_gives_its_blocks_back() -> None:
    engine, _ = make_engine()
    engine.submit(make_submit(1, ids_without_end(9), max_tokens=50, ignore_eos=True))
    engine.submit(make_submit(2, ids_without_end(9), max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort(1)
    engine.abort(2)
    engine.abort(3)
    report = engine.report()

    assert report.outputs == []
    assert (report.running, report.waiting, report.kv_used_blocks) == (0, 0, 0)
    assert not engine.has_work()


def test_a_failed_step_ends_its_own_requests_and_the_engine_goes_on() -> None:
    info = make_info(max_num_seqs=1)
    engine, runner = make_engine(info)
    runner.num_failures_to_come = 1
    second = make_submit(2, ids_without_end(9), max_tokens=5)
    engine.submit(make_submit(1, ids_without_end(9)))
    engine.submit(second)
    answers = run_to_end(engine)

    assert answers.last[1].finish_reason == "error"
    assert answers.last[1].message == "MemoryError: no room for activations"
    assert answers.ids[2] == expected(second, info), "nothing of what the failed step wrote may be found"
    assert engine.failed is None


def test_two_failed_steps_in_a_row_end_the_engine() -> None:
    engine, runner = make_engine(make_info(max_num_seqs=1))
    runner.num_failures_to_come = 2
    for rid in range(2):
        engine.submit(make_submit(rid, ids_without_end(9)))
    engine.step()
    assert engine.failed is None
    engine.step()

    assert engine.failed == "2 steps in a row failed, the last one with MemoryError: no room for activations"


def test_a_success_between_two_failures_counts() -> None:
    engine, runner = make_engine()
    for rid in range(3):
        runner.num_failures_to_come = 1 - rid % 2
        engine.submit(make_submit(rid, ids_without_end(9), max_tokens=1))
        run_to_end(engine)

    assert engine.failed is None


def test_after_half_a_minute_without_a_step_the_engine_tries_one_that_nobody_sees() -> None:
    engine, runner = make_engine()  # its clock goes on by 0.1 s a look
    for _ in range(290):
        engine.step()
    assert runner.batches == []
    for _ in range(30):
        report = engine.step()

    ((row,),) = runner.batches
    assert (len(row.tokens), list(row.block_table)) == (1, [engine.info.num_blocks])
    assert (report.outputs, report.stored, report.kv_used_blocks, report.kv_cached_blocks) == ([], [], 0, 0)
    assert (report.prompt_tokens_total, report.generated_tokens_total, report.step_ms) == (0, 0, 0.0)
    assert not report.failing


def test_a_probe_that_fails_twice_ends_the_engine() -> None:
    engine, runner = make_engine()
    runner.num_failures_to_come = 2
    while not engine.step().failing:
        assert engine.failed is None
    assert engine.has_work(), "the second try comes at once"
    engine.step()

    assert engine.failed == "2 steps in a row failed, the last one with MemoryError: no room for activations"


def test_a_failed_step_with_nobody_else_there_is_tried_again_at_once() -> None:
    engine, runner = make_engine()
    runner.num_failures_to_come = 1
    engine.submit(make_submit(1, ids_without_end(9)))

    assert engine.step().failing
    assert engine.has_work()
    assert not engine.step().failing
    assert not engine.has_work()


def test_a_report_counts_what_is_promised() -> None:
    engine, _ = make_engine(make_info(max_num_seqs=2), token_budget=6)
    engine.submit(make_submit(0, ids_without_end(9), max_tokens=1))
    run_to_end(engine)  # leaves two blocks of 4 in the cache
    for rid, start in enumerate([0, 10, 20], 1):
        engine.submit(make_submit(rid, ids_without_end(10, start), max_tokens=9, ignore_eos=True))
    before = engine.report()
    after = engine.step()

    assert before.admitted == ["request-1", "request-2", "request-3"]
    assert (before.waiting, before.running, before.waiting_uncached_tokens) == (3, 0, 2 + 10 + 10)
    # The first took 2 tokens and generates; the second 4 of its 10; the third finds all places taken.
    assert after.admitted == []
    assert (after.waiting, after.running, after.waiting_uncached_tokens) == (1, 2, 6 + 10)
    assert (after.prompt_tokens_total, after.cached_tokens_total) == (9 + 10 + 10, 8)
    assert after.generated_tokens_total == 2
    assert after.kv_used_blocks == 3 + 3


def test_rates_are_measured_and_short_prefills_say_nothing() -> None:
    engine, _ = make_engine(token_budget=40)  # a step takes 0.1 s by the clock of this test
    assert (engine.report().prefill_tok_s, engine.report().step_ms) == (0.0, 0.0)

    rates = []
    for rid, length in enumerate([5, 20, 3]):
        engine.submit(make_submit(rid, ids_without_end(length, 5 * rid), max_tokens=2, ignore_eos=True))
        run_to_end(engine)
        rates.append(engine.report().prefill_tok_s)

    assert rates == [0.0, pytest.approx(200), pytest.approx(200)]
    assert engine.report().step_ms == pytest.approx(100)


def test_an_engine_that_was_warmed_up_knows_its_rates_and_holds_nothing() -> None:
    engine, _ = make_engine(token_budget=40)

    engine.warm_up()

    report = engine.report()
    assert report.prefill_tok_s == pytest.approx(400)
    assert report.step_ms == pytest.approx(100)
    assert (report.running, report.kv_used_blocks, report.kv_cached_blocks, report.stored) == (0, 0, 0, [])
    cold, _ = make_engine(token_budget=40)
    for each in (engine, cold):
        each.submit(make_submit(1, ids_without_end(10, 1), max_tokens=3, ignore_eos=True))
    assert run_to_end(engine).ids == run_to_end(cold).ids


def test_the_name_under_which_a_model_is_served_is_in_the_names_of_its_blocks() -> None:
    runner = FakeRunner(make_info())
    served_as = EngineInfo(**{**{f: getattr(runner.info, f) for f in runner.info.__struct_fields__}, "model": "public"})
    engine = Engine(runner, info=served_as)
    engine.submit(make_submit(1, ids_without_end(4), max_tokens=1))

    assert engine.step().stored[0].parent == root_name(model="public")


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 1),  # family
            st.integers(1, 30),
            st.integers(1, 16),
            st.none() | st.integers(0, 2),  # logprobs
            st.none() | st.integers(0, 2),  # prompt_logprobs
            st.integers(0, 6),  # of the answer that were generated elsewhere
        ),
        min_size=1,
        max_size=5,
    ),
    num_blocks=st.integers(13, 24),
    token_budget=st.integers(1, 30),
)
def test_logprobs_are_complete_whatever_the_schedule(
    requests: Sequence[tuple[int, int, int, int | None, int | None, int]], num_blocks: int, token_budget: int
) -> None:
    """Chunked at any size, from a warm cache, preempted in the middle, resumed."""
    info = make_info(num_blocks=num_blocks)
    engine, _ = make_engine(info, token_budget=token_budget)
    whole = []
    for rid, (family, length, max_tokens, logprobs, prompt_logprobs, cut) in enumerate(requests):
        prompt = ids_without_end(length, 13 * family)
        said = answer(prompt, Sampling(max_tokens=max_tokens), num_blocks * 4)
        cut = min(cut, len(said) - 1)
        whole.append([*prompt, *said])
        engine.submit(
            make_submit(
                rid,
                prompt,
                max_tokens=max_tokens,
                resume=said[:cut],
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        )
    answers = run_to_end(engine)

    for rid, (_, length, _, logprobs, prompt_logprobs, _) in enumerate(requests):
        ids = whole[rid]
        told = len(answers.ids[rid])
        assert answers.ids[rid] == ids[len(ids) - told :]
        first = len(ids) - told if logprobs is not None else len(ids)
        assert answers.logprobs[rid] == [logprob_of(ids[: i + 1], logprobs) for i in range(first, len(ids))]
        last = length if prompt_logprobs is not None else 0
        assert answers.prompt_logprobs[rid] == [logprob_of(ids[: i + 1], prompt_logprobs) for i in range(1, last)]


def test_a_request_for_prompt_logprobs_reads_nothing_from_the_cache_and_is_read_by_others() -> None:
    engine, _ = make_engine()
    for rid, prompt_logprobs in enumerate([None, 0, None]):
        engine.submit(make_submit(rid, ids_without_end(14), max_tokens=1, prompt_logprobs=prompt_logprobs))
    answers = run_to_end(engine)

    assert [answers.last[rid].cached_tokens for rid in range(3)] == [0, 0, 12]


def test_a_resumed_answer_goes_on_where_it_was_cut_for_every_cut() -> None:
    info = make_info(max_model_len=40)
    whole_submit = make_submit(0, ids_without_end(10), max_tokens=12, ignore_eos=True)
    whole = expected(whole_submit, info)
    for cut in range(len(whole)):
        for warm in (False, True):
            engine, _ = make_engine(info)
            if warm:
                engine.submit(whole_submit)
                run_to_end(engine)
            resumed = make_submit(1, ids_without_end(10), max_tokens=12, ignore_eos=True, resume=whole[:cut])
            engine.submit(resumed)
            answers = run_to_end(engine)

            assert answers.ids[1] == whole[cut:]
            assert answers.last[1].finish_reason == "length"
            assert answers.last[1].cached_tokens == (8 if warm else 0), "of the prompt, as in the whole answer"
            report = engine.report()
            assert (report.prompt_tokens_total, report.cached_tokens_total) == ((20, 8) if warm else (10, 0))


@pytest.mark.parametrize(
    ("resume", "options", "reason"),
    [
        ([1, EOS], {}, "has ended already (stop)"),
        ([1, 2], {"max_tokens": 2}, "has ended already (length)"),
        ([3, 4], {"stop_token_ids": [4]}, "has ended already (stop)"),
        ([1] * 30, {"max_tokens": 99}, "has ended already (length)"),
        ([VOCAB], {}, f"{VOCAB} is outside the vocabulary"),
    ],
)
def test_an_answer_that_cannot_go_on_is_rejected(resume: list[int], options: dict[str, Any], reason: str) -> None:
    engine, _ = make_engine(make_info(max_model_len=40))
    engine.submit(make_submit(1, ids_without_end(10), resume=resume, **options))
    answers = run_to_end(engine)

    assert answers.last[1].finish_reason == "rejected"
    assert reason in answers.last[1].message


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # which family of prompts: those of one share their beginning
        st.integers(1, 40),
        st.integers(1, 24),
        st.integers(0, 1),  # priority
        st.integers(0, 2),  # seed
        st.integers(0, 12),  # steps to pass before it arrives
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=120, deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(17, 40),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(1, 6),
    token_budget=st.integers(1, 40),
)
def test_every_request_gets_the_same_answer_whatever_the_schedule(
    requests: Sequence[tuple[int, int, int, int, int, int]],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    token_budget: int,
) -> None:
    """Alone or batched, chunked at any size, cold or from the cache, preempted or not."""
    info = make_info(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs)
    engine, _ = make_engine(info, token_budget=token_budget)
    answers = Answers()
    submits = []
    for rid, (family, length, max_tokens, priority, seed, pause) in enumerate(requests):
        prompt = ids_without_end(length, 13 * family)
        submit = make_submit(rid, prompt, max_tokens=max_tokens, priority=priority, seed=seed)
        submits.append(submit)
        engine.submit(submit)
        for _ in range(pause):
            answers.take(engine.step())
    run_to_end(engine, answers)

    for submit in submits:
        last = answers.last[submit.rid]
        if last.finish_reason == "rejected":
            assert len(unpack_ids(submit.prompt)) >= num_blocks * block_size
        else:
            assert answers.ids[submit.rid] == expected(submit, info)
            assert last.cached_tokens < len(unpack_ids(submit.prompt))
    idle = engine.report()
    assert (idle.kv_used_blocks, idle.running, idle.waiting, idle.waiting_uncached_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize("count", [10, 100])
def test_many_requests_at_once_with_memory_for_eight_all_get_their_answer(count: int) -> None:
    info = make_info(num_blocks=64, max_num_seqs=100)
    engine, _ = make_engine(info, token_budget=120)
    submits = [
        make_submit(rid, ids_without_end(10, 3 * rid), max_tokens=20, seed=rid, ignore_eos=True) for rid in range(count)
    ]
    for submit in submits:
        engine.submit(submit)
    answers = Answers()
    steps = 0
    while engine.has_work():
        report = engine.step()
        answers.take(report)
        assert report.kv_used_blocks <= info.num_blocks
        assert report.running * 3 <= info.num_blocks
        steps += 1

    assert all(answers.ids[submit.rid] == expected(submit, info) for submit in submits)
    assert report.preemptions_total > 0
    assert steps <= 20 * count, "memory is never so short that one runs alone"
    assert (report.running, report.waiting, report.kv_used_blocks, report.waiting_uncached_tokens) == (0, 0, 0, 0)
    assert report.kv_cached_blocks <= info.num_blocks
    assert not engine._seqs
    assert not engine._scheduler._wanted._times


def let_all_names_collide(engine: Engine) -> None:
    engine._pool._block_names = lambda packed, *_: [BlockName(7)] * (len(packed) // (4 * engine.info.block_size))
    engine._pool._root_name = lambda _: BlockName(7)


def test_equal_blocks_under_other_prefixes_are_never_confused_even_if_all_names_are_equal() -> None:
    info = make_info(num_blocks=8)
    engine, _ = make_engine(info)
    let_all_names_collide(engine)
    a, b, x, y = (ids_without_end(4, start) for start in (0, 10, 20, 30))
    prompts = [a + x, b + x, x, a + x + y, b + x + y, x + y, y + a, b + a, a + y + x + b, x + a, a + x]
    answers = Answers()
    cached: list[int] = []
    for rid, (salt, prompt) in enumerate((salt, [*prompt, 5]) for salt in ("", "s", "") for prompt in prompts):
        submit = make_submit(rid, prompt, max_tokens=5, salt=salt)
        engine.submit(submit)
        run_to_end(engine, answers)
        assert answers.ids[rid] == expected(submit, info)
        cached.append(answers.last[rid].cached_tokens)

    # Eight blocks hold about three prompts, so parents go and come back in other places under children that they had before.
    assert set(cached) == {0, 4, 8}
    assert cached[len(prompts)] == 0, "another salt"


class EngineMachine(RuleBasedStateMachine):
    """Any order of submits, aborts, steps and failures."""

    @initialize(num_blocks=st.integers(4, 24), token_budget=st.integers(1, 24), max_num_seqs=st.integers(1, 5))
    def build(self, num_blocks: int, token_budget: int, max_num_seqs: int) -> None:
        self.info = make_info(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        self.engine, self.runner = make_engine(self.info, token_budget=token_budget)
        self.answers = Answers()
        self.submits: dict[int, Submit] = {}
        self.aborted: set[int] = set()

    @rule(
        family=st.integers(0, 2), length=st.integers(1, 30), max_tokens=st.integers(1, 20), salt=st.sampled_from("ab")
    )
    def submit(self, family: int, length: int, max_tokens: int, salt: str) -> None:
        rid = len(self.submits)
        self.submits[rid] = make_submit(rid, ids_without_end(length, 7 * family), max_tokens=max_tokens, salt=salt)
        self.engine.submit(self.submits[rid])

    @precondition(lambda self: self.submits)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.submits)))
        self.engine.abort(rid)
        if not self.answers.ended(rid):
            self.aborted.add(rid)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.answers.take(self.engine.step())

    @rule()
    def fail_one_step(self) -> None:
        self.runner.num_failures_to_come = 1
        self.answers.take(self.engine.step())
        self.runner.num_failures_to_come = 0
        self.answers.take(self.engine.step())

    @invariant()
    def what_was_said_is_right(self) -> None:
        for rid, ids in self.answers.ids.items():
            assert ids == expected(self.submits[rid], self.info)[: len(ids)]

    @invariant()
    def what_was_told_is_what_is_readable(self) -> None:
        pool = self.engine._pool
        assert self.answers.readable == {name for run in pool.snapshot() for name in run.names}
        assert pool.num_free + pool.num_cached + pool.num_used == self.info.num_blocks

    def teardown(self) -> None:
        run_to_end(self.engine, self.answers)
        assert self.engine.report().kv_used_blocks == 0
        for rid in self.submits:
            assert self.answers.ended(rid) or rid in self.aborted


class CollidingEngineMachine(EngineMachine):
    """All names are equal, so the cache is found by ids and parents alone."""

    @initialize(num_blocks=st.integers(4, 24), token_budget=st.integers(1, 24), max_num_seqs=st.integers(1, 5))
    def build(self, num_blocks: int, token_budget: int, max_num_seqs: int) -> None:
        super().build(num_blocks, token_budget, max_num_seqs)
        let_all_names_collide(self.engine)


CollidingEngineMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestEngineMachineWithCollidingNames = CollidingEngineMachine.TestCase
EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
