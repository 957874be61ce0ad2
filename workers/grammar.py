"""Which tokens a grammar allows next: llguidance, with bounds that hold for grammars from strangers.

Two things about a grammar can take long, and neither does. Building it runs in a thread (`GrammarCompiler`), with the
interpreter lock given up, while those without grammars go on. A mask has its fuel: the worst one seen took 12 ms of CPU (a lark
rule of 3,000 regular expressions), an ordinary one takes 20 to 200 us.

Building recurses as deep as rules refer to each other, and a chain of 1,200 JSON definitions overruns a usual stack of 8 MiB,
which kills the process. So the text is bounded, and the thread has a stack for the deepest chain that fits into it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from workers.grammar_queue import GrammarError
from workers.protocol import Grammar
from workers.sequence import GrammarState

__all__ = ["MAX_GRAMMAR_CHARS", "GrammarCompiler", "MatcherState"]

MAX_GRAMMAR_CHARS: Final = 64 << 10
"""An object of 2,000 properties. It takes half a second of CPU to build; one of 10,000 takes 20."""

_STACK_BYTES: Final = 256 << 20
"""Address space, not memory. A level takes 10 kB in a JSON schema and 3 kB in a lark grammar: 64 KiB of either need 30 MB."""

_MAX_MESSAGE_CHARS: Final = 300

_LIMITS: Final = LLParserLimits(
    max_items_in_row=20_000,  # 10 for each optional property of an object; the default of 2,000 is met by 500 of them
    max_lexer_states=20_000,  # of 1 to 2 kB each; the default is 250,000
    verbose_errors=False,  # else they tell what was generated, which is nobody's business
)


class MatcherState:
    """`workers.sequence.GrammarState`."""

    def __init__(self, matcher: LLMatcher, after: int | None) -> None:
        self._matcher = matcher
        self._after = after
        """The token that still has to come before the grammar begins to hold."""

    def allowed(self) -> bytes | None:
        if self._after is not None:
            return None
        mask = self._matcher.compute_bitmask()
        _check(self._matcher)
        return mask

    def advance(self, tokens: Sequence[int]) -> None:
        if self._after is not None:
            if self._after not in tokens:
                return
            tokens = tokens[tokens.index(self._after) + 1 :]
            self._after = None
        self._matcher.consume_tokens(list(tokens))
        _check(self._matcher)


class GrammarCompiler:
    """`workers.grammar_queue.Compiler`: builds one at a time, in a daemon thread that lives as long as the process."""

    def __init__(self, tokenizer_json: str, num_tokens: int, eos_ids: Sequence[int]) -> None:
        """Masks have a bit for each of `num_tokens`. Takes a quarter of a second of CPU for 49,000 of them, with the
        interpreter lock held, so it is done before the first request. Raises ValueError for a tokenizer that it cannot read.
        """
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=num_tokens, eos_token=list(eos_ids) or None)
        self._jobs: queue.SimpleQueue[tuple[Future[GrammarState], Grammar, Sequence[int]]] = queue.SimpleQueue()
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(usual)

    def compile(self, grammar: Grammar, said: Sequence[int]) -> Future[GrammarState]:
        future: Future[GrammarState] = Future()
        self._jobs.put((future, grammar, said))
        return future

    def _work(self) -> NoReturn:
        while True:
            future, grammar, said = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._build(grammar, said))
            except BaseException as error:
                future.set_exception(error)

    def _build(self, grammar: Grammar, said: Sequence[int]) -> GrammarState:
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"a grammar of {len(grammar.text)} characters is longer than {MAX_GRAMMAR_CHARS}")
        matcher = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # finds out whether any token can begin it, and is the slowest of all
        _check(matcher)
        state = MatcherState(matcher, grammar.after)
        state.advance(said)
        return state


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        text = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
        raise GrammarError(text[:_MAX_MESSAGE_CHARS])
