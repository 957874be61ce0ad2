"""A Hugging Face ``tokenizer.json``: text → ids → text.

Ids equal those of the `tokenizers` library on the whole text, whatever a segment cache remembers. There are three ways to
them, and load finds out which can be gone:

- fastokens (`router.native_tokenizer`);
- `tokenizers`, the text cut at its special tokens (`router.segments`);
- `tokenizers` on the whole text, where a cut would change an id: some tokenizers prefix only the first word of a text, and some
  special tokens swallow the spaces beside them.

Ids come packed, as u32 in the machine's byte order from end to end.

The segment caches apart, which are made for it, nothing changes after construction: any thread may call anything. The
libraries let go of the interpreter lock while they encode.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, product
from typing import Final

from tokenizers import AddedToken, Tokenizer

from router.escape import Escaper
from router.native_tokenizer import load_native
from router.prompt_errors import PromptError, TokenizerError
from router.segments import Segments
from router.token_bytes import bytes_speller
from router.tokenizer_files import TokenizerConfig

__all__ = ["HFTokenizer"]

_PROBES: Final = ("a", " a", "a ", "  a  b", "\n", "\n\na", "\t", "12345", "'s", ".", "é", "\u0301", "日本", "👩")
"""What a tokenizer might treat another way at the start or end of a text than beside a special token."""

_PROBED_TOKENS: Final = 8


class HFTokenizer:
    def __init__(self, tokenizer_json: str, config: TokenizerConfig, cache_bytes: int, *, native: bool = True) -> None:
        """Takes from 0.1 s (49,000 tokens) to 2 s (262,000), with `native` twice to three times that. `native`: use
        fastokens where it may be used. Raises TokenizerError.
        """
        self._tokenizer, special = _load(tokenizer_json, config)
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
        self.added_tokens = {token.content: token.special for token in added.values()}
        flagged = (token.content for token in added.values() if token.special)
        self.special_ids = ids_of(*named.values(), *config.unnamed_special_tokens, *flagged)

        self._frame = self._find_frame()
        self._segments = self._cut_by(added, cache_bytes)
        self.cuts = self._segments.cuts if self._segments is not None else ()
        """Tokens before which a text may be cut in two, each encoded alone."""
        self._as_text: dict[str, bytes] = {}
        self._native = None
        if native:
            self._native = load_native(
                tokenizer_json,
                special,
                vocabulary,
                self.added_tokens,
                self._encode_whole,
                self._tokenizer.decode,
                cache_bytes,
            )

    @property
    def is_native(self) -> bool:
        """Whether fastokens finds its ids."""
        return self._native is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """`add_special_tokens` adds what tokenizer.json says goes around a text. Raises PromptError."""
        if not add_special_tokens:
            return self._encode(text)
        if self._frame is None:
            return self._encode_whole([text], add_special_tokens=True)[0]
        before, after = self._frame
        return before + self._encode(text) + after

    def encode_escaped(self, rendered: str, escaper: Escaper) -> bytes:
        """The ids of what a template wrote over a chat that `escaper` had marked. Raises PromptError."""
        return escaper.encode(rendered, self._encode_piece, self._encode_as_text)

    def _encode_piece(self, text: str) -> bytes:
        """As it is inside a longer text."""
        return self._encode(text) if self._segments is not None else self._encode_after_line_end(text, self._encode)

    def _encode_as_text(self, token: str) -> bytes:
        """A token's name as if it named nothing."""
        known = self._as_text.get(token)
        if known is not None:
            return known
        packed = self._encode_after_line_end(token, self._encode_without_added)
        if self._tokenizer.token_to_id(token) in array("I", packed):
            raise PromptError("this model's tokenizer cannot write the name of a special token as text")
        self._as_text[token] = packed
        return packed

    def _encode_after_line_end(self, text: str, encode: Callable[[str], bytes]) -> bytes:
        """Some tokenizers put a space before the first word of a text: so transformers does here, and so do we."""
        line_end = self._encode("\n")
        packed = encode("\n" + text)
        return packed[len(line_end) :] if packed.startswith(line_end) else encode(text)

    def _encode_without_added(self, text: str) -> bytes:
        """The library's steps one by one, but the one that looks for added tokens."""
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        words = [normalized] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(normalized)]
        return array("I", [token.id for word in words for token in self._tokenizer.model.tokenize(word)]).tobytes()

    def _encode(self, text: str) -> bytes:
        if self._native is not None and (packed := self._native.encode(text)) is not None:
            return packed
        if self._segments is not None:
            return self._segments.encode(text)
        return self._encode_whole([text])[0]

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

    def _find_frame(self) -> tuple[bytes, bytes] | None:
        """What goes before and after a text; None when that cannot be told from one example."""
        try:
            (whole,), (framed,) = self._encode_whole(["a b"]), self._encode_whole(["a b"], add_special_tokens=True)
        except PromptError:  # a vocabulary too small to say
            return None
        before, found, after = framed.partition(whole)
        return (before, after) if found else None

    def _cut_by(self, added: Mapping[int, AddedToken], cache_bytes: int) -> Segments | None:
        """Segments, if this tokenizer works as they assume."""
        # Normalized tokens are looked for later, between the others, and so need no cut.
        cutting = [(id_, token) for id_, token in added.items() if not token.normalized and token.content]
        if not cutting or any(token.lstrip or token.rstrip or token.single_word for _, token in cutting):
            return None
        packed = {token.content: array("I", [id_]).tobytes() for id_, token in cutting}
        segments = Segments(packed, self._encode_whole, cache_bytes)
        probe = "".join(text + token for token, text in product(islice(packed, _PROBED_TOKENS), _PROBES))
        try:
            holds = segments.encode(probe) == self._encode_whole([probe])[0]
        except PromptError:  # a vocabulary too small for the probe, which says nothing about prompts
            return None
        return segments if holds else None


def _load(tokenizer_json: str, config: TokenizerConfig) -> tuple[Tokenizer, list[AddedToken]]:
    """The tokenizer, and the tokens that it got beside those of its file."""
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
    special = [AddedToken(text, normalized=False, special=True) for text in known]
    tokenizer.add_special_tokens(special)
    return tokenizer, special
