"""What a soak concludes from its samples, and what a reader of a numbered stream sees."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from loadtest.soak import Sample, judge
from loadtest.streams import Reader, percentile_bound

QUIET = Sample(
    requests=0,
    rss_mb=100.0,
    descriptors=20,
    tasks=9,
    clients=0,
    in_use=0,
    in_flight=0,
    reserved=0,
    promised_tokens=0,
)


class Server(asyncio.Transport):
    def write(self, data: object) -> None:
        """To nobody."""

    def close(self) -> None:
        """Nothing to close."""


def after(requests: int, **changed: float) -> Sample:
    return msgspec.structs.replace(QUIET, requests=requests, **changed)


def test_memory_that_grows_only_while_it_warms_up_is_flat() -> None:
    samples = [after(n * 1000, rss_mb=100 + min(n, 20), in_use=30) for n in range(101)]

    verdict = judge(QUIET, samples, after(100_000, rss_mb=120.0))

    assert verdict.flat
    assert verdict.rss_slope_mb == pytest.approx(0.0)


def test_memory_that_grows_to_the_end_is_not() -> None:
    samples = [after(n * 1000, rss_mb=100 + 0.2 * n) for n in range(101)]

    verdict = judge(QUIET, samples, after(100_000))

    assert not verdict.flat
    assert verdict.rss_slope_mb == pytest.approx(2.0)


def test_whatever_is_left_is_named_and_what_went_is_not() -> None:
    verdict = judge(QUIET, [after(1), after(2)], after(2, tasks=11, in_use=1, descriptors=12))

    assert verdict.left == {"tasks": 2, "in_use": 1}
    assert not verdict.flat


def test_the_bound_of_a_share_is_the_first_bucket_that_holds_it() -> None:
    buckets = {0.001: 50.0, 0.01: 98.0, 0.02: 99.0, math.inf: 100.0}

    assert percentile_bound(buckets, 0.5) == 0.001
    assert percentile_bound(buckets, 0.99) == 0.02
    assert percentile_bound(buckets, 1.0) is None


@pytest.mark.parametrize(
    ("numbers", "lost", "disordered"),
    [([0, 1, 2, 3], 0, 0), ([0, 1, 3], 1, 1), ([0, 1, 1, 2, 3], 0, 1), ([0, 1], 2, 0), ([], 4, 0)],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_reader_misses_no_number_however_its_bytes_are_split(
    numbers: list[int], lost: int, disordered: int, step: int
) -> None:
    reader = Reader(b"", 4)
    data = b"".join(b'9\r\ndata: {"choices":[{"delta":{"content":" %d"}}]}\n\n\r\n' % number for number in numbers)
    data += b"d\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    reader.connection_made(Server())

    for start in range(0, len(data), step):
        reader.data_received(data[start : start + step])

    assert await reader.ended
    assert (reader.lost, reader.disordered) == (lost, disordered)
