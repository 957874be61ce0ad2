"""Models that know nothing but a grammar: any token that its mask allows, until it allows the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from tests.default_model import default_model
from tests.router import tiny_tokenizer
from workers.grammar_check import parser_limits
from workers.protocol import Grammar
from workers.tags import ModelTags
from workers.tokenizer_files import load_tokenizer_files

__all__ = ["Walker", "default_walker", "tagged_walker"]

_LONG: Final = 200
"""Tokens after which a walk looks for the end."""

_LEADING_ON: Final = frozenset('"}],:')

_GUESSES: Final = 20


@dataclass(frozen=True)
class Walker:
    tokenizer: Tokenizer
    for_grammars: LLTokenizer
    eos: int
    tags: ModelTags

    def answer(self, grammar: Grammar, seed: int, start: Sequence[int] = ()) -> str:
        """The text of one walk, `start` included, without its end token."""
        chance = random.Random(seed)
        matcher = LLMatcher(self.for_grammars, grammar.text, log_level=0, limits=parser_limits())
        ids = list(start)
        assert matcher.consume_tokens(ids), matcher.get_error()
        while True:
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            id_ = self._draw(mask, chance, hurry=len(ids) > _LONG)
            if id_ == self.eos:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            ids.append(id_)
            assert matcher.consume_token(id_), matcher.get_error()

    def _draw(self, mask: bytes, chance: random.Random, *, hurry: bool) -> int:
        """Any allowed token, but often one that leads on, and seldom a space, so that there is an end."""
        leading_on = [id_ for id_ in self._leading_on if _allows(mask, id_)]
        if leading_on and (hurry or chance.random() < 0.5):
            return chance.choice(leading_on)
        for _ in range(_GUESSES):
            id_ = chance.randrange(self.for_grammars.vocab_size)
            if _allows(mask, id_) and not self.tokenizer.decode([id_], skip_special_tokens=False).isspace():
                return id_
        return chance.choice([id_ for id_ in range(self.for_grammars.vocab_size) if _allows(mask, id_)])

    @cached_property
    def _leading_on(self) -> list[int]:
        texts = self.tokenizer.decode_batch([[id_] for id_ in range(self.for_grammars.vocab_size)])
        tags = self.tags.call or ()
        return [self.eos, *tags, *(id_ for id_, text in enumerate(texts) if text in _LEADING_ON)]


def _allows(mask: bytes, id_: int) -> bool:
    return bool(mask[id_ >> 3] >> (id_ & 7) & 1)


def _walker(tokenizer_json: str, eos: str) -> Walker:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    eos_id = tokenizer.token_to_id(eos)
    assert eos_id is not None
    special_ids = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    tags = ModelTags.of(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, special_ids)
    return Walker(tokenizer, LLTokenizer(tokenizer_json, eos_token=eos_id), eos_id, tags)


@cache
def tagged_walker() -> Walker:
    """A small vocabulary with all tags as tokens, as Qwen3's."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer.byte_level())
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    return _walker(tokenizer.to_str(), "<|im_end|>")


@cache
def default_walker() -> Walker:
    return _walker(load_tokenizer_files(default_model()).tokenizer_json, "<|im_end|>")
