"""The engine with a compiler whose grammars are ready when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from tests.workers.fake_runner import FakeRunner, answer, make_info, make_submit
from workers.engine import Engine
from workers.grammar_queue import GrammarError
from workers.protocol import Grammar, Sampling
from workers.sequence import GrammarState

PROMPT = [1, 2, 3]


class Compiler:
    def __init__(self) -> None:
        self.futures: list[Future[GrammarState]] = []

    def compile(self, grammar: Grammar, said: Sequence[int]) -> Future[GrammarState]:
        self.futures.append(Future())
        return self.futures[-1]


class Always:
    """Allows one token only, and fails when it is asked, or told, too often."""

    def __init__(self, token: int, *, masks: int = 99, steps: int = 99) -> None:
        self._mask = (1 << token).to_bytes(8, "little")
        self._masks, self._steps = masks, steps

    def allowed(self) -> bytes:
        self._masks -= 1
        if self._masks < 0:
            raise GrammarError("too complex")
        return self._mask

    def advance(self, tokens: Sequence[int]) -> None:
        self._steps -= len(tokens)
        if self._steps < 0:
            raise GrammarError("not allowed")


def make_engine() -> tuple[Engine, Compiler, FakeRunner]:
    compiler, runner = Compiler(), FakeRunner(make_info())
    return Engine(runner, grammars=compiler), compiler, runner


def submit(engine: Engine, rid: int, *, grammar: bool = True) -> None:
    options = {"grammar": Grammar("…")} if grammar else {}
    engine.submit(make_submit(rid, PROMPT, max_tokens=4, ignore_eos=True, **options))  # type: ignore[arg-type]


def test_who_waits_for_a_grammar_holds_nobody_up_and_is_counted() -> None:
    engine, compiler, runner = make_engine()
    submit(engine, 1)
    submit(engine, 2, grammar=False)
    report = engine.report()
    assert (report.waiting, report.waiting_uncached_tokens) == (2, 6)
    assert report.admitted == ["request-1", "request-2"]

    for _ in range(4):
        report = engine.step()
    assert [output.rid for output in report.outputs if output.finish_reason] == [2]
    assert (report.running, report.waiting, report.waiting_uncached_tokens) == (0, 1, 3)
    assert not engine.has_work(), "the loop need not spin meanwhile"
    assert engine.idle_s(0.4) < 0.05, "but looks soon"

    compiler.futures[0].set_result(Always(7))
    ids = [output.ids[0] for _ in range(4) for output in engine.step().outputs]
    assert ids == [7, 7, 7, 7]
    assert engine.idle_s(0.4) == 0.4
    assert len(runner.batches) == 8


def test_an_abort_while_it_is_built_forgets_it() -> None:
    engine, compiler, runner = make_engine()
    submit(engine, 1)
    engine.abort(1)

    assert compiler.futures[0].cancelled()
    assert engine.step().waiting == 0
    assert runner.batches == []


def test_a_grammar_that_fails_on_its_way_ends_only_its_own_request() -> None:
    engine, compiler, _ = make_engine()
    for rid in range(3):
        submit(engine, rid, grammar=rid > 0)
    compiler.futures[0].set_result(Always(7, masks=2))
    compiler.futures[1].set_result(Always(8, steps=1))
    outputs = [output for _ in range(5) for output in engine.step().outputs]

    def of(rid: int) -> tuple[list[int], str | None, str]:
        mine = [output for output in outputs if output.rid == rid]
        return [token for output in mine for token in output.ids], mine[-1].finish_reason, mine[-1].message

    assert of(0) == (answer(PROMPT, Sampling(max_tokens=4, ignore_eos=True), 99), "length", "")
    assert of(1) == ([7, 7], "rejected", "the grammar failed: too complex")
    assert of(2) == ([8], "rejected", "the grammar failed: not allowed")
    assert engine.report().kv_used_blocks == 0
    assert engine.failed is None


class Panic(BaseException):
    """What a library in another language raises when it gives up."""


def test_a_grammar_whose_building_breaks_ends_only_its_own_request() -> None:
    engine, compiler, _ = make_engine()
    submit(engine, 1)
    submit(engine, 2, grammar=False)
    compiler.futures[0].set_exception(Panic("index out of bounds"))
    outputs = [output for _ in range(4) for output in engine.step().outputs]

    ends = {output.rid: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {1: "rejected", 2: "length"}
    assert "Panic" in outputs[0].message


def test_without_a_compiler_a_grammar_is_rejected() -> None:
    engine = Engine(FakeRunner(make_info()))
    submit(engine, 1)
    (output,) = engine.step().outputs

    assert (output.finish_reason, output.message) == ("rejected", "this replica cannot hold an answer to a grammar")
