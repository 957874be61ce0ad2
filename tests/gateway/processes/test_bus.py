"""Datagrams between processes, over real sockets: order, delay, peers that take nothing, are late or gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gateway.processes.bus import _MAX_PENDING, FLUSH_S, MAX_DATAGRAM_BYTES, Bus, Outbox, _datagrams
from gateway.processes.messages import Answered, Batch, Begun, Busy, Message, encode_batch
from router import BlockName


class Ear:
    """A process that hears, and has nothing open."""

    def __init__(self, folder: Path, process: int, opened: list[Message] | None = None) -> None:
        self.heard: list[tuple[int, Message]] = []
        self.opened = opened or []
        self.bus = Bus(folder, process, hear=self._hear, what_is_open=lambda: list(self.opened), open_numbers=list)

    def _hear(self, batch: Batch) -> None:
        self.heard += [(batch.process, message) for message in batch.messages]

    def catch_up(self) -> list[Message]:
        self.bus.catch_up()
        return self.messages

    @property
    def messages(self) -> list[Message]:
        return [message for _, message in self.heard]


@contextlib.asynccontextmanager
async def joined(*ears: Ear) -> AsyncIterator[None]:
    for ear in ears:
        ear.bus.start()
    for ear in ears:
        ear.bus.set_peers(range(1, len(ears) + 1))
    try:
        yield
    finally:
        for ear in ears:
            ear.bus.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def begun(number: int, names: int = 0) -> Begun:
    return Begun(
        number, f"req-{number}", "r0", 1.0, 100, 0, 0, True, False, [BlockName(2**63 + n) for n in range(names)]
    )


async def test_all_others_hear_what_one_says_in_order(tmp_path: Path) -> None:
    one, two, three = ears = [Ear(tmp_path, number) for number in (1, 2, 3)]
    said: list[Message] = [Answered(number, 1.0) for number in range(1000)]

    async with joined(*ears):
        for message in said:
            one.bus.post(message)
            if message.number % 100 == 0:  # type: ignore[union-attr]
                await asyncio.sleep(0)
        await until(lambda: len(two.heard) == len(three.heard) == len(said))

    assert two.heard == three.heard == [(1, message) for message in said]
    assert one.heard == []


async def test_what_is_said_in_a_while_goes_in_one_datagram(tmp_path: Path) -> None:
    one, two = Ear(tmp_path, 1), Ear(tmp_path, 2)

    async with joined(one, two):
        one.bus.post(Answered(0, 1.0))
        await until(lambda: len(two.heard) == 1)
        before = one.bus.sent
        for number in range(1, 50):
            one.bus.post(Answered(number, 1.0))
        at_once = one.bus.sent - before
        await until(lambda: len(two.heard) == 50)

        assert at_once == 0
        assert one.bus.sent - before == 1


async def test_what_cannot_wait_is_there_before_anything_said_afterwards(tmp_path: Path) -> None:
    one, two = Ear(tmp_path, 1), Ear(tmp_path, 2)

    async with joined(one, two):
        one.bus.post(Answered(0, 1.0))
        one.bus.post_now(Busy("r0", 2.0))
        two.bus.catch_up()

        assert two.messages == [Answered(0, 1.0), Busy("r0", 2.0)]


async def test_a_peer_that_reads_nothing_for_a_while_gets_all_of_it_in_order(tmp_path: Path) -> None:
    one, two = Ear(tmp_path, 1), Ear(tmp_path, 2)
    deaf = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    deaf.bind(str(tmp_path / "3.sock"))
    with deaf:
        async with joined(one, two):
            one.bus.set_peers([1, 2, 3])
            for number in range(
                600
            ):  # ten datagrams are what a queue of the kernel holds by default, 512 what others do
                one.bus.post_now(Answered(number, 1.0))
            kept = one.bus._peers[3].messages
            await until(lambda: len(two.heard) == 600)

            assert two.messages == [Answered(number, 1.0) for number in range(600)], "one that hears is not held up"
            assert kept, "and what it has no room for is kept for the other"
            assert one.bus.dropped == 0

            deaf.setblocking(False)
            took: list[Message] = []
            hearing = Ear(tmp_path, 4)
            hearing.bus._socket.close()
            hearing.bus._socket = deaf.dup()
            await until(lambda: len(hearing.catch_up()) == 600)
            took = hearing.messages
            hearing.bus.close()

    assert took == [Answered(number, 1.0) for number in range(600)]


async def test_of_what_a_peer_that_is_not_there_should_get_every_message_is_counted(tmp_path: Path) -> None:
    one = Ear(tmp_path, 1)
    said = [begun(number, names=5_000) for number in range(4)]
    async with joined(one):
        one.bus.set_peers([1, 2])
        one.bus._peers[2].is_behind = False  # it was there a moment ago

        for message in said:
            one.bus._messages.append(message)
        one.bus._flush()

        assert len(list(_datagrams(said))) > 1
        assert one.bus.dropped == len(said)


async def test_one_that_stays_behind_costs_bounded_memory_and_is_told_anew(tmp_path: Path) -> None:
    one = Ear(tmp_path, 1, opened=[begun(12345)])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "2.sock"))
        async with joined(one):
            one.bus.set_peers([1, 2])
            for number in range(_MAX_PENDING + 5_000):
                one.bus.post(Answered(number, 1.0))
                if number % 20 == 0:
                    one.bus._flush()
            outbox = one.bus._peers[2]

            assert outbox.dropped > 0
            assert len(outbox.messages) <= _MAX_PENDING
            assert one.bus.dropped == outbox.dropped

            hearing = Ear(tmp_path, 3)
            hearing.bus._socket.close()
            hearing.bus._socket = deaf.dup()
            hearing.bus._socket.setblocking(False)
            hearing.bus.catch_up()
            one.bus._tell()
            await until(lambda: begun(12345) in hearing.catch_up())
            hearing.bus.close()


async def test_one_that_comes_later_is_told_what_is_open(tmp_path: Path) -> None:
    one, late = Ear(tmp_path, 1, opened=[begun(7)]), Ear(tmp_path, 2)

    async with joined(one):
        one.bus.set_peers([1, 2])  # it is not there yet
        one.bus.post_now(Answered(1, 1.0))
        async with joined(late):
            one.bus.set_peers([1])
            one.bus.set_peers([1, 2])
            await until(lambda: begun(7) in late.messages)

    assert Answered(1, 1.0) not in late.messages


async def test_what_cannot_be_read_disturbs_nobody(tmp_path: Path) -> None:
    one, two = Ear(tmp_path, 1), Ear(tmp_path, 2)

    async with joined(one, two):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"\xc1nonsense", str(tmp_path / "2.sock"))
        one.bus.post(Answered(1, 1.0))
        await until(lambda: bool(two.heard))

    assert two.heard == [(1, Answered(1, 1.0))]


async def test_a_prompt_of_any_length_fits(tmp_path: Path) -> None:
    one, two = Ear(tmp_path, 1), Ear(tmp_path, 2)
    long = begun(1, names=50_000)

    async with joined(one, two):
        one.bus.post(long)
        await until(lambda: bool(two.heard))

    (message,) = two.messages
    assert isinstance(message, Begun)
    assert message.names == long.names[: len(message.names)], "its beginning, so that what is named is named in full"
    assert len(message.names) >= 5_000


def test_datagrams_are_bounded_and_in_order() -> None:
    messages: list[Message] = [begun(number, names=number % 700) for number in range(300)]

    parts = list(_datagrams(messages))

    assert [message for part in parts for message in part] == messages
    assert all(len(encode_batch(Batch(1, part))) <= MAX_DATAGRAM_BYTES for part in parts)
    assert len(parts) < 20


def test_names_are_the_first_that_wait_no_longer() -> None:
    outbox = Outbox()
    outbox.is_behind = False

    outbox.keep([begun(number, names=1000) for number in range(100)])

    assert outbox.dropped == 0
    assert [message.number for message in outbox.messages if isinstance(message, Begun)] == list(range(100))
    assert outbox.dropped_names == 100_000
    assert not outbox.is_behind


def test_messages_are_twenty_milliseconds_old_at_most() -> None:
    assert FLUSH_S <= 0.02
