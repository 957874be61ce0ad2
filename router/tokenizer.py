"""A Hugging Face ``tokenizer.json``: text → ids → text.

Ids equal those of the `tokenizers` library on the whole text, whatever the segment cache remembers. Where cutting at special
tokens would change an id (some tokenizers prefix only the first word of a text; some special tokens swallow the spaces beside
them), every text is tokenized whole: slower, never different. Load finds out which it is.

The segment cache apart, which is made for it, nothing changes after construction: any thread may call anything. The library
lets go of the interpreter lock while it encodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import Final

from tokenizers import AddedToken, Tokenizer

from router.prompt_errors import PromptError, TokenizerError
from router.segments import Segments
from router.token_bytes import bytes_speller
from router.tokenizer_files import TokenizerConfig

__all__ = ["HFTokenizer"]

_PROBES: Final = ("a", " a", "a ", "  a  b", "\n", "\n\na", "\t", "12345", "'s", ".", "é", "\u0301", "日本", "👩")
"""What a tokenizer might treat another way at the start or end of a text than beside a special token."""

_PROBED_TOKENS: Final = 8


class HFTokenizer:
    def __init__(self, tokenizer_json: str, config: TokenizerConfig, cache_bytes: int) -> None:
        """Takes from 0.1 s (49,000 tokens) to 2 s (262,000). Raises TokenizerError."""
        self._tokenizer = _load(tokenizer_json, config)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError("tokenizer.json has no tokens")
        self.vocab_size = len(vocabulary)
        self.max_id = max(vocabulary.values())
        """The highest id that means something; above `vocab_size` when ids have holes."""

        def ids_of(*texts: str | None) -> frozenset[int]:
            return frozenset(vocabulary[text] for text in texts if text in vocabulary)

        named = config.special_tokens
        self.bos_id = next(iter(ids_of(named.get("bos_token"))), None)
        self.eos_ids = ids_of(named.get("eos_token"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._spell = bytes_speller(tokenizer_json)
        flagged = (token.content for token in added.values() if token.special)
        self.special_ids = ids_of(*named.values(), *config.unnamed_special_tokens, *flagged)

        self._segments: Segments | None = None
        self._before = self._after = b""
        self._try_segments(added, cache_bytes)

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """`add_special_tokens` adds what tokenizer.json says goes around a text. Raises PromptError."""
        if self._segments is None:
            (packed,) = self._encode_whole([text], add_special_tokens)
        else:
            packed = self._segments.encode(text)
            if add_special_tokens:
                packed = self._before + packed + self._after
        ids = array("I")
        ids.frombytes(packed)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise PromptError("token ids must be integers from 0 to 2**32 - 1") from error

    def token_bytes(self, id_: int) -> bytes:
        token = self._tokenizer.id_to_token(id_)
        if token is None:
            return b""
        return token.encode() if id_ in self._added else self._spell(token)

    def _encode_whole(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[bytes]:
        try:
            # A batch even for one text: `encode` computes offsets that nobody asked for, and takes a fifth longer.
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise PromptError("the prompt has half of a surrogate pair, which is no character") from error
        except Exception as error:  # the library has no narrower one, for a word without an unknown token say
            raise PromptError(f"the tokenizer refuses the prompt: {error}") from error
        return [array("I", encoding.ids).tobytes() for encoding in encodings]

    def _try_segments(self, added: Mapping[int, AddedToken], cache_bytes: int) -> None:
        """Use segments from now on, if this tokenizer works as they assume."""
        # Normalized tokens are looked for later, between the others, and so need no cut.
        cutting = [(id_, token) for id_, token in added.items() if not token.normalized and token.content]
        if not cutting or any(token.lstrip or token.rstrip or token.single_word for _, token in cutting):
            return
        packed = {token.content: array("I", [id_]).tobytes() for id_, token in cutting}
        segments = Segments(packed, self._encode_whole, cache_bytes)

        probe = "".join(text + token for token, text in product(islice(packed, _PROBED_TOKENS), _PROBES))
        try:
            (whole,), (framed,) = self._encode_whole([probe]), self._encode_whole([probe], add_special_tokens=True)
            holds = segments.encode(probe) == whole
        except PromptError:  # a vocabulary too small for the probe, which says nothing about prompts
            return
        before, found, after = framed.partition(whole)
        if holds and found:
            self._segments, self._before, self._after = segments, before, after


def _load(tokenizer_json: str, config: TokenizerConfig) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
    # Settings for training batches, which some files carry.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # As transformers does: what the configuration calls special is special, also where tokenizer.json forgot it. Tokens
    # that the vocabulary does not have stay out: their new ids would lie beyond the model's embeddings.
    named = (*config.special_tokens.values(), *config.unnamed_special_tokens)
    known = [text for text in named if text and tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in known])
    return tokenizer
