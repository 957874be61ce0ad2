"""A prompt as the first part of its own completion (``echo``). Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from router.wire import unpack_ids
from workers.choice import Delta
from workers.message import Content
from workers.output import Decode, OutputText
from workers.protocol import TokenLogprob

__all__ = ["Echo", "echo_of"]


@dataclass(frozen=True, slots=True)
class Echo:
    text: str
    ids: array[int]
    offsets: Sequence[int]
    """Characters in front of each token's text; () where no logprobs are asked for."""

    def as_delta(self, logprobs: Sequence[TokenLogprob]) -> Delta:
        """`logprobs`: one for each id but the first, or none."""
        told = (None, *logprobs) if self.offsets else ()
        pieces = (Content(self.text),) if self.text else ()
        return Delta(pieces, 0, self.ids if self.offsets else (), told, self.offsets, None)


def echo_of(packed: bytes, text: str | None, decode: Decode, *, offsets: bool) -> Echo:
    """`text`: the prompt as the client wrote it, if it was no ids. A vocabulary may spell it in another way, and special tokens
    may stand around it; the offsets are those of the ids' own text.
    """
    ids = unpack_ids(packed)
    places: list[int] = []
    if offsets:
        decoded = OutputText(decode)
        for id_ in ids:
            places.append(decoded.num_chars)
            decoded.push((id_,))
    return Echo(decode(ids) if text is None else text, ids, places)
