"""Calls and posts between two processes, over a real socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from gateway.processes.channel import (
    MAX_FRAME_BYTES,
    Answer,
    CallFailed,
    CallTimedOut,
    Channel,
    ChannelClosed,
    Hear,
)


@contextlib.asynccontextmanager
async def pair(
    answers: dict[str, Answer] | None = None, hears: dict[str, Hear] | None = None
) -> AsyncIterator[tuple[Channel, Channel]]:
    """One that asks, one that has these topics."""
    ours, theirs = socket.socketpair()
    asking, asked = await Channel.over(ours), await Channel.over(theirs, answers=answers, hears=hears)
    tasks = [asyncio.create_task(asking.run()), asyncio.create_task(asked.run())]
    try:
        yield asking, asked
    finally:
        asking.close()
        asked.close()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)


async def test_a_call_is_answered() -> None:
    async with pair({"double": lambda data: data * 2}) as (asking, _):
        assert await asking.call("double", b"ab", 5) == b"abab"


async def test_calls_are_answered_as_each_is_done() -> None:
    gate = asyncio.Event()

    async def slow(data: bytes) -> bytes:
        await gate.wait()
        return data

    async with pair({"slow": slow, "fast": lambda data: data}) as (asking, _):
        first = asyncio.create_task(asking.call("slow", b"1", 5))
        assert await asking.call("fast", b"2", 5) == b"2"
        assert not first.done()
        gate.set()
        assert await first == b"1"


async def test_posts_come_in_order_and_before_a_later_call() -> None:
    heard: list[bytes] = []

    async with pair({"heard": lambda _: b"".join(heard)}, {"note": heard.append}) as (asking, _):
        for number in range(10):
            asking.post("note", b"%d" % number)

        assert await asking.call("heard", b"", 5) == b"0123456789"


async def test_nobody_waits_longer_than_the_deadline() -> None:
    async def never(data: bytes) -> bytes:
        await asyncio.Event().wait()
        return data

    async with pair({"never": never, "fine": lambda data: data}) as (asking, _):
        with pytest.raises(CallTimedOut):
            await asking.call("never", b"", 0.01)

        assert await asking.call("fine", b"x", 5) == b"x"
        assert not asking._waiting


async def test_what_fails_over_there_fails_that_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: bytes) -> bytes:
        raise ValueError("a secret")

    async with pair({"fail": fail, "fine": lambda data: data}, {"fail": fail}) as (asking, _):
        with pytest.raises(CallFailed) as failure:
            await asking.call("fail", b"", 5)
        with pytest.raises(CallFailed):
            await asking.call("unknown", b"", 5)
        asking.post("fail", b"")

        assert await asking.call("fine", b"x", 5) == b"x"

    assert "secret" not in str(failure.value)
    assert len(caplog.records) == 3


async def test_the_end_of_one_side_ends_all_calls_of_the_other() -> None:
    async def never(data: bytes) -> bytes:
        await asyncio.Event().wait()
        return data

    async with pair({"never": never}) as (asking, asked):
        waiting = asyncio.create_task(asking.call("never", b"", 30))
        await asyncio.sleep(0.01)
        asked.close()

        with pytest.raises(ChannelClosed):
            await waiting
        with pytest.raises(ChannelClosed):
            await asking.call("never", b"", 30)
        asking.post("never", b"")


@pytest.mark.parametrize("data", [(MAX_FRAME_BYTES + 1).to_bytes(4), (5).to_bytes(4) + b"\xc1\xc1\xc1\xc1\xc1"])
async def test_nonsense_closes_the_channel(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(theirs)
    with ours:
        ours.sendall(data)
        async with asyncio.timeout(30):
            await channel.run()

    assert channel.is_closed


async def test_a_peer_that_takes_nothing_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(theirs)
    with ours:
        for _ in range(20):
            channel.post("much", bytes(4 << 20))

        assert channel.is_closed
        async with asyncio.timeout(30):
            await channel.run()


async def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    async def never(data: bytes) -> bytes:
        await asyncio.Event().wait()
        return data

    async with pair({"never": never}) as (asking, _):
        call = asyncio.create_task(asking.call("never", b"", 30))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        assert not asking._waiting
