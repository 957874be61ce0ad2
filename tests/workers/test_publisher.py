import asyncio
import time

import pytest

from router.wire import Batch, Frame, FrameDecoder, Hello, Load
from tests.workers.test_events import ROOT, step
from workers.events import LOAD_MIN_INTERVAL_S
from workers.protocol import StepReport, StoredRun
from workers.publisher import MAX_BACKLOG_BYTES, Listener, Publisher


def hello(seq: int) -> Hello:
    return Hello(
        epoch="e1",
        seq=seq,
        model="m",
        block_size=16,
        tokenizer_digest="t",
        numerics="n",
        capacity_blocks=100,
        max_num_seqs=8,
        started_at=0.0,
    )


def stored(*names: int) -> StepReport:
    return step(stored=[StoredRun(ROOT, list(names))])


def publisher(*, healthy: bool = True) -> Publisher:
    return Publisher(hello, step(), lambda: healthy)


async def read(listener: Listener) -> list[Frame]:
    async with asyncio.timeout(30):
        data = await listener.read()
    assert data is not None
    return list(FrameDecoder().feed(data))


def listening(publisher: Publisher, epoch: str = "", after: int = 0) -> Listener:
    listener = publisher.listen(epoch, after)
    assert listener is not None
    return listener


async def test_a_listener_is_greeted_and_learns_what_it_missed() -> None:
    source = publisher()
    source.report(stored(5))
    source.report(stored(6))

    greeting, first, second, load = await read(listening(source))

    assert greeting == hello(2)
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert (first.seq, second.seq) == (1, 2)
    assert isinstance(load, Load)
    assert load.seq == 2


async def test_a_resumed_listener_gets_only_what_is_new() -> None:
    source = publisher()
    for name in (5, 6, 7):
        source.report(stored(name))

    frames = await read(listening(source, "e1", 2))

    assert [frame.seq for frame in frames if isinstance(frame, Batch)] == [3]


async def test_a_change_reaches_every_listener_at_once() -> None:
    source = publisher()
    listeners = [listening(source), listening(source)]
    for listener in listeners:
        await read(listener)

    source.report(stored(5))

    for listener in listeners:
        frames = await read(listener)
        assert isinstance(frames[0], Batch)


async def test_changes_that_follow_each_other_closely_wake_a_listener_once() -> None:
    source = publisher()
    listener = listening(source)
    await read(listener)
    source.report(stored(5))
    await read(listener)

    read_again = asyncio.create_task(read(listener))
    for name in (6, 7, 8):
        source.report(stored(name))
        await asyncio.sleep(0)
        assert not read_again.done()

    assert [frame.seq for frame in await read_again if isinstance(frame, Batch)] == [2, 3, 4]
    source.close()


async def test_a_replica_that_is_not_well_tells_its_changes_no_later() -> None:
    source = publisher(healthy=False)
    listener = listening(source)
    await read(listener)
    source.report(stored(5))
    await read(listener)
    source.report(stored(6))

    async with asyncio.timeout(0.5):
        frames = await read(listener)

    assert [type(frame) for frame in frames] == [Batch]
    source.close()


async def test_changes_and_loads_that_take_turns_wake_a_listener_no_more_often() -> None:
    source = publisher()
    listener = listening(source)
    await read(listener)
    began, wakes = time.monotonic(), 0

    async def listen() -> None:
        nonlocal wakes
        while True:
            await read(listener)
            wakes += 1

    listening_on = asyncio.create_task(listen())
    for number in range(60):
        source.report(stored(number + 10) if number % 2 else step(running=number))
        await asyncio.sleep(0.005)
    listening_on.cancel()

    assert wakes <= (time.monotonic() - began) / LOAD_MIN_INTERVAL_S + 1
    source.close()


async def test_who_comes_between_two_sendings_gets_each_change_once() -> None:
    source = publisher()
    early = listening(source)
    for name in (5, 6, 7):
        source.report(stored(name))
    late = listening(source)
    source.report(stored(8))

    for listener in (early, late):
        seqs: list[int] = []
        while 4 not in seqs:
            seqs += [frame.seq for frame in await read(listener) if isinstance(frame, Batch)]
        assert seqs == [1, 2, 3, 4]
    source.close()


async def test_a_change_that_came_too_soon_is_sent_by_the_timer() -> None:
    source = publisher()
    listener = listening(source)
    source.report(step(running=1))
    source.report(step(running=2))
    seen: list[int] = []

    while 2 not in seen:
        seen += [frame.running for frame in await read(listener) if isinstance(frame, Load)]

    assert seen == [0, 1, 2]
    source.close()


async def test_a_silent_engine_sends_no_load() -> None:
    source = publisher(healthy=False)
    listener = listening(source)
    await read(listener)

    source.report(step(running=1))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await listener.read()
    source.close()


async def test_a_listener_that_does_not_read_is_cut() -> None:
    source = publisher()
    slow = listening(source)
    names = [name | 1 << 62 for name in range(40_000)]
    rounds = MAX_BACKLOG_BYTES // (9 * len(names)) + 2

    for _ in range(rounds):
        source.report(stored(*names))

    assert await slow.read() is None
    source.close()


async def test_a_slow_listener_costs_the_others_nothing() -> None:
    source = publisher()
    listening(source)
    quick = listening(source)
    names = [name | 1 << 62 for name in range(40_000)]
    got: list[int] = []

    for _ in range(MAX_BACKLOG_BYTES // (9 * len(names)) + 2):
        source.report(stored(*names))
        got += [frame.seq for frame in await read(quick) if isinstance(frame, Batch)]

    assert got == list(range(1, len(got) + 1))
    source.close()


async def test_after_close_streams_end_and_none_begins() -> None:
    source = publisher()
    listener = listening(source)

    source.close()
    source.report(stored(5))

    assert await listener.read() is None
    assert source.listen("", 0) is None


async def test_who_wants_to_know_is_told_of_a_listener_that_left_unless_it_is_ourselves_who_stop() -> None:
    source, left = publisher(), []
    source.on_leave = lambda: left.append(True)
    source.leave(listening(source))
    last = listening(source)
    source.close()
    source.leave(last)

    assert left == [True]


async def test_a_listener_that_left_is_not_kept() -> None:
    source = publisher()
    listener = listening(source)
    await read(listener)

    source.leave(listener)
    source.leave(listener)
    source.report(stored(5))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await listener.read()
    source.close()


async def test_a_snapshot_is_of_one_moment() -> None:
    source = publisher()
    source.report(stored(5, 6))
    frames: list[Frame] = []
    decoder = FrameDecoder()

    async for data in source.snapshot():
        frames += decoder.feed(data)
        source.report(stored(len(frames) + 100))

    greeting, batch, load = frames
    assert greeting == hello(1)
    assert isinstance(batch, Batch)
    assert [run.names for run in batch.stored] == [[5, 6]]
    assert isinstance(load, Load)
    assert batch.seq == load.seq == 1
    source.close()
