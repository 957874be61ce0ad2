"""When a load that is not sent to the end is over, and what it says of the answers that it leaves."""

from __future__ import annotations

import asyncio
import time

from loadtest.openloop import is_settled, send_all
from loadtest.workloads import Request

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = b"data: {}\n\n"
LAST = b'data: {"usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}}}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_it_is_settled_when_what_goes_on_has_lasted_longer_than_the_99th_percentile() -> None:
    lasted = [float(number) for number in range(995)]

    assert is_settled(lasted, [990.0] * 5)
    assert not is_settled(lasted, [990.0] * 4 + [989.9])
    assert is_settled(lasted, [])


def test_more_than_a_hundredth_is_never_left() -> None:
    assert is_settled([1.0] * 991, [5.0] * 9)
    assert not is_settled([1.0] * 990, [5.0] * 10)
    assert not is_settled([], [5.0])


def test_all_percentiles_are_those_of_the_whole_once_it_is_settled() -> None:
    lasted, going = [float(number) for number in range(993)], [1000.0] * 7
    whole = sorted([*lasted, *(each + 1e6 for each in going)])
    so_far = sorted([*lasted, *going])

    assert is_settled(lasted, going)
    assert [whole[int(1000 * part)] for part in (0.5, 0.9, 0.99)] == [
        so_far[int(1000 * part)] for part in (0.5, 0.9, 0.99)
    ]


async def test_answers_that_change_nothing_any_more_are_left_and_told_so() -> None:
    """One of 200 goes on for ever; the run ends when it has lasted longer than the others."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await reader.readuntil(b"}}")
        writer.write(HEAD + chunk(FIRST))
        if b"endless" not in body:
            writer.write(chunk(LAST) + b"0\r\n\r\n")
        await writer.drain()
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(
        lambda reader, writer: serving.add(asyncio.ensure_future(serve(reader, writer))), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    requests = [Request(0.0, "endless" if number == 0 else "short", 2) for number in range(200)]

    async with server:
        answers = await send_all([port], "m", requests, 1.0, 60.0, time.monotonic(), to_the_end=False)
        await asyncio.gather(*serving)

    assert [number for number, answer in enumerate(answers) if answer.unfinished] == [0]
    assert not [answer.error for answer in answers if answer.error]
    assert answers[0].last_s >= sorted(answer.last_s for answer in answers[1:])[197]
    assert {(answer.cached_tokens, answer.completion_tokens) for answer in answers[1:]} == {(7, 2)}
