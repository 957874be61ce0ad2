"""fastokens: the ids of the `tokenizers` library, ten times as fast, and used only where it finds the same ones.

Young, so never believed: at load it must give the same ids as `tokenizers` for `_rehearsal_texts`, twice, because the second
time its own segment cache answers. Texts are made of the vocabulary itself, so they go through its merges, and of every kind
of character. What it then still refuses is for `tokenizers` to say.

Its segment cache works as `router.segments` does, bounded in bytes, and costs nothing in Python. It lets go of the
interpreter lock, and any thread may call it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Final

from tokenizers import AddedToken

try:
    import fastokens
except ImportError:  # an optional extra: `tokenizers` can do it all
    _INSTALLED = False
else:
    _INSTALLED = True

__all__ = ["NativeTokenizer", "load_native"]

_VOCABULARY_WALK: Final = 6000
"""Tokens of the vocabulary that are put into texts."""
_WORDS_PER_TEXT: Final = 40
_CHARACTERS: Final = 2500
"""Of all assigned ones, evenly spread."""
_SPECIAL_TOKENS: Final = 64


class NativeTokenizer:
    def __init__(self, tokenizer_json: str, special: Sequence[AddedToken], cache_bytes: int) -> None:
        """Raises whatever the library raises."""
        tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_tokens(list(special))
        tokenizer.enable_segment_cache(cache_bytes)
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes

    def encode(self, text: str) -> bytes | None:
        """Packed ids, with nothing added around them; None where `tokenizers` must say."""
        try:
            packed: bytes = self._tokenizer.encode_batch_flat([text])[0]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # half a surrogate pair; a pattern that reaches its limit; Rust's panics are no Exception
            return None
        return packed

    def forget(self) -> None:
        """Empty the segment cache."""
        self._tokenizer.enable_segment_cache(self._cache_bytes)


def load_native(
    tokenizer_json: str,
    special: Sequence[AddedToken],
    vocabulary: Mapping[str, int],
    added: Iterable[str],
    reference: Callable[[Sequence[str]], list[bytes]],
    decode: Callable[[Sequence[int]], str],
    cache_bytes: int,
) -> NativeTokenizer | None:
    """None where fastokens is not installed, cannot read the file, or finds other ids than `reference`.

    `special`: tokens to be added to those of the file. `added`: texts of all tokens that are looked for before others.
    """
    if not _INSTALLED:
        return None
    texts = list(_rehearsal_texts(vocabulary, added, decode))
    try:
        native = NativeTokenizer(tokenizer_json, special, cache_bytes)
        expected = reference(texts)
        for _ in range(2):
            if any(native.encode(text) != ids for text, ids in zip(texts, expected, strict=True)):
                return None
    except Exception:  # a kind of tokenizer that it does not know, or texts that `reference` refuses
        return None
    native.forget()
    return native


def _rehearsal_texts(
    vocabulary: Mapping[str, int], added: Iterable[str], decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    words = _walk(vocabulary, decode)
    characters = _characters()
    tokens = list(islice(added, _SPECIAL_TOKENS))
    yield from ("", " ", "a", "\n", " a", "a ", " \n \n\na", "'s 'LL I'm", "\0", "1234567 1,234.5", "\r\n\r\n\t \tx")
    yield from words
    for start in range(0, len(characters), _WORDS_PER_TEXT):
        run = characters[start : start + _WORDS_PER_TEXT]
        yield "".join(f"a{one} {one}{one}1{one}\n{one}" for one in run)
        yield "".join(run)
    for token, word, character in zip(tokens, words * len(tokens), characters, strict=False):
        yield f"{token}{word}{token}{token} {character}{token[:-1]}\n{token}{character} {word}{token[1:]}{token}"


def _walk(vocabulary: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Texts made of tokens from all over the vocabulary, in an order that puts strangers side by side."""
    ids = sorted(vocabulary.values())
    # The golden section of a list is far from where one was, and comes by every place before it comes back.
    stride = max(int(len(ids) * 0.618), 1)
    chosen = [ids[step * stride % len(ids)] for step in range(min(_VOCABULARY_WALK, len(ids)))]
    return [decode(chosen[at : at + _WORDS_PER_TEXT]) for at in range(0, len(chosen), _WORDS_PER_TEXT)]


@cache
def _characters() -> list[str]:
    """Assigned characters of all of Unicode."""
    assigned = [character for code in range(0x20, 0x323B0, 7) if unicodedata.category(character := chr(code))[0] != "C"]
    return assigned[:: max(len(assigned) // _CHARACTERS, 1)]
