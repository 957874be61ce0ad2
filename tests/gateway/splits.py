"""Bytes cut into pieces, as a network may do it, and what a relay makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from gateway.sse import EventRelay
from gateway.upstream.contract import UpstreamError


def split(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`data` cut at these places; those beyond its end count as its end."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def relay_all(relay: EventRelay, pieces: Iterable[bytes]) -> tuple[bytes, type[UpstreamError] | None]:
    """What comes out, and how it failed."""
    out = b""
    try:
        for piece in pieces:
            out += relay.feed(piece)
        out += relay.flush()
    except UpstreamError as error:
        return out, type(error)
    return out, None
