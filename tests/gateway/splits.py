"""Bytes cut into pieces, as a network may do it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def split(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`data` cut at these places; those beyond its end count as its end."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]
