"""Watches the replicas while load runs: what each has in hand, what it has computed, and how late its process is.

One replica at a time in turn, over connections that are kept: watching all of them must cost next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Sample", "scrape", "watch"]

_EVERY_S: Final = 0.05
_TIMEOUT_S: Final = 10.0
_ASK: Final = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
_VALUE: Final = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|prefix_cache_queries_total|prefix_cache_hits_total)\{.*\} (\S+)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one replica."""

    at_s: float
    """Real seconds after the load's start."""
    replica: int
    took_s: float
    """Real. It takes a millisecond when nobody else wants the process."""
    inflight: int
    computed_tokens: int
    """Prompt tokens that were not cached, since its start."""


async def watch(ports: Sequence[int], start: float, samples: list[Sample]) -> None:
    """Look at one after the other, until cancelled. Raises OSError when one does not answer."""
    connections = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
    try:
        for number in itertools.cycle(range(len(ports))):
            samples.append(await _look(number, *connections[number], start))
            await asyncio.sleep(_EVERY_S)
    finally:
        for _, writer in connections:
            writer.close()


async def scrape(ports: Sequence[int], start: float) -> list[Sample]:
    """One sample of each."""
    found = []
    for number, port in enumerate(ports):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            found.append(await _look(number, reader, writer, start))
    return found


async def _look(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, start: float) -> Sample:
    asked = time.monotonic()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            writer.write(_ASK)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head)
            if length is None:
                raise ConnectionError("a replica's metrics came without their length")
            text = await reader.readexactly(int(length[1]))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("a replica closed its connection") from error
    values = {name: int(float(value)) for name, value in _VALUE.findall(text)}
    return Sample(
        at_s=asked - start,
        replica=number,
        took_s=time.monotonic() - asked,
        inflight=values[b"num_requests_running"] + values[b"num_requests_waiting"],
        computed_tokens=values[b"prefix_cache_queries_total"] - values[b"prefix_cache_hits_total"],
    )
