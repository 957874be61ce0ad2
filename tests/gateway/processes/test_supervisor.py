"""One process that says what nobody can read hides nothing of what the others say, and ends nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import cast

from gateway.processes.channel import Channel
from gateway.processes.control import Start, encode
from gateway.processes.merged_metrics import families_of
from gateway.processes.supervisor import Supervisor, _Child
from gateway.telemetry import Telemetry


class FakeProcess:
    pid = 1


def never_started(process: int, peers: object) -> Start:
    raise AssertionError


def supervisor() -> Supervisor:
    return Supervisor(
        count=2,
        grace_s=1.0,
        log=("info", "text"),
        start_of=never_started,
        state=dict,
        on_processes=lambda processes: None,
        asked=lambda process: {},
        on_gone=lambda process: None,
    )


def giving(answer: bytes) -> Callable[[bytes], bytes]:
    return lambda question: answer


@contextlib.asynccontextmanager
async def child(number: int, answers: dict[str, bytes]) -> AsyncIterator[_Child]:
    """A process that serves and gives these answers."""
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    other = await Channel.over(theirs, answers={topic: giving(answer) for topic, answer in answers.items()})
    hearing, answering = asyncio.create_task(channel.run()), asyncio.create_task(other.run())
    try:
        yield _Child(number, cast(asyncio.subprocess.Process, FakeProcess()), channel, hearing, True, True)
    finally:
        channel.close()
        await asyncio.gather(hearing, answering)


async def test_what_cannot_be_read_of_one_process_hides_nothing_of_the_others() -> None:
    telemetry = Telemetry()
    telemetry.limiter_failed("timeout")
    good = {"metrics": encode(families_of(telemetry.families(0))), "decisions": encode([])}
    for bad in (b"", b"\xc1", encode({"no": "list"}), encode([{"name": 1}])):
        async with child(1, {"metrics": bad, "decisions": bad}) as broken, child(2, good) as whole:
            asked = supervisor()
            asked._serving += [broken, whole]

            families = (await asked.take_metrics()).families()

            assert "warmpath_limiter_errors" in {family.name for family in families}
            assert await asked.decisions() == []


async def test_the_processes_are_looked_after_whatever_one_answers() -> None:
    async with child(1, {"metrics": b"\xc1"}) as broken:
        asked = supervisor()
        asked._serving.append(broken)
        broken.answered_at = float("inf")

        await asked._poll()
