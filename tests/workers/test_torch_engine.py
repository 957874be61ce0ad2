"""The engine as its process builds it, from a small model and its tokenizer on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from llguidance import LLMatcher
from msgspec import structs
from tokenizers import Tokenizer

from router.wire import pack_ids
from tests.router.tiny_tokenizer import CONFIG, byte_level
from tests.workers.tiny_models import make_hf
from workers.engine import Engine
from workers.engine_process import EngineArgs, build_torch_engine
from workers.protocol import Grammar, Output, Sampling, Submit
from workers.quant import int8_works

TOKENIZER = Tokenizer.from_str(byte_level())
NUM_TOKENS = TOKENIZER.get_vocab_size()
PADDING = 150
EOS: int = TOKENIZER.get_vocab()["<|im_end|>"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PROMPT = list(range(10, 60))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    model = make_hf(vocab_size=NUM_TOKENS + PADDING)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_level())
    (path / "tokenizer_config.json").write_text(CONFIG)
    args = EngineArgs(
        model_path=str(path), model="tiny", precision="auto", threads=1, kv_bytes=1 << 20, max_num_seqs=8, block_size=16
    )
    return build_torch_engine(args)


def run(engine: Engine, *submits: Submit) -> dict[int, list[Output]]:
    outputs: dict[int, list[Output]] = {submit.rid: [] for submit in submits}
    for submit in submits:
        engine.submit(submit)
    while engine.idle_s(1.0) < 1.0:
        for output in engine.step().outputs:
            outputs[output.rid].append(output)
    return outputs


def ids_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.ids]


def test_hot_answers_hold_to_their_grammar_and_never_name_padding(engine: Engine) -> None:
    schema = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), defaults={"whitespace_flexible": False})
    hot = Sampling(max_tokens=150, temperature=2.0, ignore_eos=True)
    answers = run(
        engine,
        *(
            Submit(
                rid=rid,
                request_id="r",
                prompt=pack_ids(PROMPT),
                sampling=structs.replace(
                    hot, seed=rid, ignore_eos=rid < 2, grammar=None if rid < 2 else Grammar(schema)
                ),
            )
            for rid in range(5)
        ),
    )

    assert all(token < NUM_TOKENS for rid in (0, 1) for token in ids_of(answers[rid]))
    for rid in (2, 3, 4):
        *said, end = ids_of(answers[rid])
        assert (end, answers[rid][-1].finish_reason) == (EOS, "stop")
        assert isinstance(json.loads(TOKENIZER.decode(said))["a"], int)
    assert engine.info.eos_ids == [EOS]
    assert engine.info.vocab_size == NUM_TOKENS + PADDING


@pytest.mark.skipif(not int8_works(), reason="other precisions' bits depend on the batch")
def test_a_resumed_answer_has_the_tokens_and_logprobs_of_the_whole_one(engine: Engine) -> None:
    sampling = Sampling(
        max_tokens=20,
        temperature=0.8,
        seed=9,
        logprobs=3,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=-0.4,
        logit_bias={40: 3.0},
        min_tokens=15,
        min_p=0.01,
    )
    submit = Submit(rid=10, request_id="r", prompt=pack_ids(PROMPT), sampling=sampling)
    whole = run(engine, submit)[10]
    ids, logprobs = ids_of(whole), [output.logprobs for output in whole]
    cuts = range(1, len(ids))
    resumed = run(engine, *(structs.replace(submit, rid=10 + cut, resume=pack_ids(ids[:cut])) for cut in cuts))

    assert len(ids) >= 15
    assert all(ids_of(resumed[10 + cut]) == ids[cut:] for cut in cuts)
    assert all([output.logprobs for output in resumed[10 + cut]] == logprobs[cut:] for cut in cuts)


def test_the_probe_runs_and_leaves_no_trace(engine: Engine) -> None:
    submit = Submit(rid=50, request_id="r", prompt=pack_ids(PROMPT), sampling=Sampling(max_tokens=5, temperature=0.0))
    before = run(engine, submit)[50]
    engine._probe()

    report = engine.report()
    assert (report.failing, report.outputs, report.stored) == (False, [], [])
    assert ids_of(run(engine, structs.replace(submit, rid=51))[51]) == ids_of(before)
