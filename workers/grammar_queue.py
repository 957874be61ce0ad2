"""Sequences that wait for their grammar to be built, and what the engine needs of grammars. No llguidance here, so that a
simulated replica needs none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from workers.protocol import Grammar
from workers.sequence import GrammarState, Seq

__all__ = ["BUILD_LOOK_S", "Built", "Compiler", "GrammarError", "GrammarQueue"]

_logger = logging.getLogger(__name__)

BUILD_LOOK_S = 0.005
"""While one is being built an engine with nothing else to do looks so often whether it is ready."""


class GrammarError(Exception):
    """A grammar that cannot be used, or one that cannot go on. The message is for people."""


class Compiler(Protocol):
    def compile(self, grammar: Grammar, said: Sequence[int]) -> Future[GrammarState]:
        """Build it elsewhere, and go behind the ids that were generated before. The future raises GrammarError, or has been
        cancelled in time."""
        ...


class Built(NamedTuple):
    seq: Seq
    error: str | None
    """Why there is no grammar for it; else it has it."""


class GrammarQueue:
    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._building: dict[Seq, Future[GrammarState]] = {}

    @property
    def available(self) -> bool:
        return self._compiler is not None

    @property
    def num_tokens(self) -> int:
        """Of those that wait here; what the cache may give of them nobody has looked up yet."""
        return sum(len(seq.ids) for seq in self._building)

    def __len__(self) -> int:
        return len(self._building)

    def __contains__(self, seq: Seq) -> bool:
        return seq in self._building

    def add(self, seq: Seq, grammar: Grammar) -> None:
        assert self._compiler is not None, "who has no compiler takes no grammars"
        self._building[seq] = self._compiler.compile(grammar, seq.ids[seq.prompt_len :])

    def remove(self, seq: Seq) -> None:
        self._building.pop(seq).cancel()

    def take(self) -> list[Built]:
        """Those that are done, in the order in which they came."""
        done = [(seq, future) for seq, future in self._building.items() if future.done()]
        for seq, _ in done:
            del self._building[seq]
        return [Built(seq, _settle(seq, future)) for seq, future in done]


def _settle(seq: Seq, future: Future[GrammarState]) -> str | None:
    try:
        seq.grammar = future.result(timeout=0)
    except GrammarError as error:
        return str(error)
    except BaseException as error:  # a panic of llguidance's is no Exception; it must not end everybody's engine
        _logger.exception("a grammar could not be built")
        return f"the grammar could not be built: {type(error).__name__}"
    return None
