"""Whether a grammar is one, before a request with it is accepted. Pure, but slow: see `check`.

llguidance finds some faults, such as references that only lead to each other, when it first looks for a next token and not
before. So the grammar is tried: compiled for a vocabulary of single bytes, which costs next to nothing, and followed for a few.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from workers.api_error import invalid_value
from workers.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

__all__ = ["check", "parser_limits"]

MAX_CHARS: Final = 65_000
"""The engine takes 65,536, with what is said of thoughts in it."""

_NUM_TRIED_BYTES: Final = 4
_MAX_CHARS_TOLD: Final = 200
_EOS: Final = 256


def check(constraint: Constraint) -> None:
    """Raises `ApiError` 400 where no answer could obey it, or none that can be computed in bounded time.

    A usual schema takes 1 ms, the worst known one 0.2 s with the interpreter lock released: not for an event loop. The last
    results are remembered.
    """
    grammar = constraint.text_grammar()
    if len(grammar) > MAX_CHARS:
        raise invalid_value(
            f"'{constraint.param}' takes more than {MAX_CHARS} characters as a grammar.", constraint.param
        )
    fault = _fault(grammar)
    if fault is not None:
        raise invalid_value(f"'{constraint.param}' cannot be used: {fault}", constraint.param)


def parser_limits() -> LLParserLimits:
    """For whoever compiles a grammar of a client: a tenth of llguidance's own, which let 1.4 kB of schema take a second."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


@lru_cache(maxsize=128)
def _fault(grammar: str) -> str | None:
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=parser_limits())
    for _ in range(_NUM_TRIED_BYTES):
        if matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if not allowed:
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return _one_line(matcher.get_error()) if matcher.is_error() else None


def _one_line(error: str) -> str:
    if error.startswith("NoExtension"):
        return "nothing obeys it"
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_CHARS_TOLD else f"{text[:_MAX_CHARS_TOLD]}…"


class _Bytes:
    """A vocabulary as llguidance asks for it: each byte is a token, and one more ends the text. Nothing has a name."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (_EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _bytes_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))
