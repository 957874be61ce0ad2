"""A token of a vocabulary → the bytes of text that it stands for. Pure.

Vocabularies spell bytes in alphabets of their own; what a token is called there must never reach a client (a Chinese character
would come out as ``æĺ¯``). Three alphabets cover what models use:

- byte-level BPE (GPT-2, Llama 3, Qwen): each of the 256 bytes has a printable character;
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma): ``▁`` is a space, ``<0xE6>`` is a byte;
- none: the token is its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["bytes_speller"]

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that GPT-2's alphabet writes as the Latin-1 character of that number; the rest, in order, is 256, 257, …"""

_OTHERS: Final = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF: Final[Mapping[str, int]] = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + place): byte for place, byte in enumerate(_OTHERS)},
}

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_speller(tokenizer_json: str) -> Callable[[str], bytes]:
    """For the vocabulary's own tokens. Added ones, such as special tokens, are always their text."""
    kinds = {str(part.get("type")) for part in _decoders(json.loads(tokenizer_json).get("decoder"))}
    if "ByteLevel" in kinds:
        return _from_byte_alphabet
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _from_sentencepiece
    return str.encode


def _decoders(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping):
        return
    yield decoder
    for part in decoder.get("decoders") or ():
        yield from _decoders(part)


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # a token that is none of the alphabet's is its text
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
