"""Grammars through the whole engine: llguidance over a small tokenizer, and a runner that chooses among what is allowed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from llguidance import LLMatcher
from msgspec import structs
from tokenizers import Tokenizer

from tests.router.tiny_tokenizer import byte_level
from tests.workers.fake_runner import FakeRunner, make_info, make_submit
from workers.engine import Engine
from workers.grammar import MAX_GRAMMAR_CHARS, GrammarCompiler
from workers.protocol import EngineInfo, Grammar, Output

DEADLINE_S = 30.0
TOKENIZER = Tokenizer.from_str(byte_level())
NUM_TOKENS = TOKENIZER.get_vocab_size()
EOS: int = TOKENIZER.get_vocab()["<|im_end|>"]
THINK_END: int = TOKENIZER.get_vocab()["</think>"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of_schema(schema: object, after: int | None = None) -> Grammar:
    defaults: Any = {"whitespace_flexible": False}
    return Grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults), after)


def of_lark(text: str) -> Grammar:
    return Grammar(LLMatcher.grammar_from_lark(text))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level(), NUM_TOKENS, [EOS])


def make_engine(**sizes: int) -> Engine:
    info: EngineInfo = structs.replace(make_info(**sizes), vocab_size=NUM_TOKENS, eos_ids=[EOS])
    return Engine(FakeRunner(info), grammars=compiler(), token_budget=16)


def run(engine: Engine, rids: Sequence[int]) -> dict[int, tuple[list[int], Output]]:
    """Until all of these have ended: their ids and last outputs."""
    ids: dict[int, list[int]] = {rid: [] for rid in rids}
    last: dict[int, Output] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(last) < len(rids):
        assert time.monotonic() < deadline
        for output in engine.step().outputs:
            ids[output.rid] += output.ids
            if output.finish_reason is not None:
                last[output.rid] = output
        time.sleep(engine.idle_s(0.02))
    return {rid: (ids[rid], last[rid]) for rid in rids}


def text_of(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=True)
    return text


def test_an_answer_is_a_sentence_of_its_grammar_and_ends_by_itself() -> None:
    engine = make_engine()
    for rid in range(6):
        engine.submit(make_submit(rid, [1, 2, 3], max_tokens=200, seed=rid, grammar=of_schema(SCHEMA)))

    answers = run(engine, range(6))

    said = [json.loads(text_of(ids)) for ids, _ in answers.values()]
    assert all(0 <= each["age"] <= 999 and len(each["name"]) <= 6 for each in said)
    assert len({each["age"] for each in said}) > 1
    assert {last.finish_reason for _, last in answers.values()} == {"stop"}


def test_an_answer_is_the_same_alone_preempted_and_resumed_at_every_token() -> None:
    submits = [
        make_submit(rid, [9] * 10, max_tokens=200, seed=rid, salt=str(rid), grammar=of_schema(SCHEMA))
        for rid in range(4)
    ]
    whole = []
    for submit in submits:
        engine = make_engine()
        engine.submit(submit)
        whole.append(run(engine, [submit.rid])[submit.rid][0])

    small = make_engine(num_blocks=12, block_size=4)
    for submit in submits:
        small.submit(submit)
    assert [ids for ids, _ in run(small, range(4)).values()] == whole
    assert small.report().preemptions_total > 0

    engine = make_engine()
    cuts = range(len(whole[0]))
    for cut in cuts:
        resume = whole[0][:cut]
        engine.submit(make_submit(cut, [9] * 10, max_tokens=200, grammar=of_schema(SCHEMA), resume=resume))
    assert [ids for ids, _ in run(engine, cuts).values()] == [whole[0][cut:] for cut in cuts]


def test_a_grammar_may_begin_to_hold_after_the_thoughts() -> None:
    engine = make_engine()
    grammar = of_schema({"enum": [17]}, after=THINK_END)
    thinking = make_submit(1, [1], max_tokens=30, ignore_eos=True, grammar=grammar)
    engine.submit(thinking)
    engine.submit(make_submit(2, [1], max_tokens=30, grammar=grammar, resume=[5, THINK_END]))
    engine.submit(make_submit(3, [1], max_tokens=30, grammar=grammar, resume=[THINK_END, *b17()]))

    answers = run(engine, [1, 2, 3])

    assert len(answers[1][0]) == 30, "it never stops thinking, and may say what it likes meanwhile"
    assert answers[2][0] == [*b17(), EOS]
    assert answers[3][0] == [EOS]


def b17() -> list[int]:
    ids: list[int] = TOKENIZER.encode("17").ids
    return ids


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (of_lark("start: ("), "Expected"),
        (of_lark('start: "a" missing\n'), "missing"),
        (of_schema({"type": "nothing"}), "nothing"),
        (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "NoExtension"),
        (Grammar("start: " + "x" * MAX_GRAMMAR_CHARS), f"longer than {MAX_GRAMMAR_CHARS}"),
        (of_lark("start: " + "(" * 10_000 + '"a"' + ")" * 10_000), "deep"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_rejected_and_nobody_else_suffers(grammar: Grammar, says: str) -> None:
    engine = make_engine()
    engine.submit(make_submit(1, [1, 2], grammar=grammar))
    engine.submit(make_submit(2, [1, 2], max_tokens=5, ignore_eos=True))

    answers = run(engine, [1, 2])

    assert answers[1][1].finish_reason == "rejected"
    assert says in answers[1][1].message
    assert "\n" not in answers[1][1].message
    assert len(answers[2][0]) == 5
    assert engine.report().waiting == 0


def test_ids_that_the_grammar_does_not_allow_cannot_be_resumed() -> None:
    engine = make_engine()
    engine.submit(make_submit(1, [1], grammar=of_schema({"enum": [17]}), resume=[5]))

    assert run(engine, [1])[1][1].finish_reason == "rejected"


@pytest.mark.parametrize("lexer", [False, True])
def test_the_longest_chain_of_rules_does_not_overrun_the_stack(lexer: bool) -> None:
    """In its own process it would be seen as a death by SIGSEGV; here it would end the tests."""
    names = [f"{'R' if lexer else 'r'}{i:x}" for i in range(4600)]
    rules = "\n".join(f'{a}:"x"|{b}' for a, b in pairwise(names))
    text = f'start: {names[0]}\n{rules}\n{names[-1]}:"z"\n'
    assert MAX_GRAMMAR_CHARS * 0.9 < len(text) <= MAX_GRAMMAR_CHARS
    engine = make_engine()
    engine.submit(make_submit(1, [1], max_tokens=4, grammar=Grammar(text)))

    ids, last = run(engine, [1])[1]

    if lexer:
        assert last.finish_reason == "rejected", "it takes too much to build"
    else:
        assert (text_of(ids), last.finish_reason) in (("x", "stop"), ("z", "stop"))
