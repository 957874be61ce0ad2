"""Turns: small, a third of the loop at most, and never held by one who left. Time is passed in, or the thread's own."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from gateway.turns import BURST_S, TURN_S, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def spend_burst(turns: Turns, clock: Clock) -> None:
    async with turns.take():
        clock.now += BURST_S


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were taken, none of them in earnest."""
    taken: list[float] = []

    async def note(seconds: float) -> None:
        taken.append(seconds)
        await asyncio.sleep(0)

    # Of this module alone: servers of other tests may sleep in threads of their own.
    monkeypatch.setattr("gateway.turns.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": note}))
    return taken


async def test_a_turn_is_over_after_its_time() -> None:
    clock = Clock()
    async with Turns(clock).take() as turn:
        assert not turn.is_over
        clock.now += 1.01 * TURN_S
        assert turn.is_over


async def test_little_work_waits_for_nothing(pauses: list[float]) -> None:
    clock = Clock()
    turns = Turns(clock)
    for _ in range(1000):
        async with turns.take():
            clock.now += 0.0001
        clock.now += 0.0005

    assert pauses == []


async def test_work_without_end_gets_a_third_of_the_time(pauses: list[float]) -> None:
    clock = Clock()
    turns = Turns(clock)
    await spend_burst(turns, clock)
    began, worked_s = clock.now, 0.0
    for _ in range(1000):
        async with turns.take():
            clock.now += 0.0007
            worked_s += 0.0007
        clock.now += sum(pauses)
        pauses.clear()

    assert worked_s / (clock.now - began) == pytest.approx(1 / 3, rel=0.02)


async def test_what_a_fleet_says_at_once_is_taken_in_whole_turns_without_pauses(pauses: list[float]) -> None:
    """As after a start. Others come after each whole turn: a sleep of no time is their turn."""
    clock = Clock()
    turns = Turns(clock)
    for _ in range(int(BURST_S / TURN_S)):
        async with turns.take():
            clock.now += TURN_S + 1e-9

    assert pauses == [0.0] * int(BURST_S / TURN_S)


async def test_after_a_rest_there_is_a_burst_again_and_not_more(pauses: list[float]) -> None:
    clock = Clock()
    turns = Turns(clock)
    await spend_burst(turns, clock)
    clock.now += 100 * BURST_S
    pauses.clear()
    worked_s = 0.0
    while not any(pauses):
        async with turns.take():
            clock.now += 0.0007
            worked_s += 0.0007

    # While it works a third of that time is earned anew.
    assert worked_s == pytest.approx(BURST_S * 3 / 2, rel=0.02)


async def test_a_turn_that_failed_is_given_back(pauses: list[float]) -> None:
    turns = Turns(Clock())
    order: list[int] = []

    async def work(number: int) -> None:
        for _ in range(3):
            async with turns.take():
                order.append(number)
                if number == 1:
                    raise ValueError

    results = await asyncio.gather(*(work(number) for number in range(3)), return_exceptions=True)

    assert [type(result) for result in results] == [type(None), ValueError, type(None)]
    assert sorted(order) == [0, 0, 0, 1, 2, 2, 2]


async def test_one_who_is_cancelled_in_a_pause_holds_up_nobody() -> None:
    turns = Turns(time.monotonic)

    async def overdraw() -> None:
        async with turns.take() as turn:
            while turn.spent_s < 0.02:
                pass

    task = asyncio.create_task(overdraw())
    await asyncio.sleep(0.01)
    task.cancel()

    async with asyncio.timeout(10), turns.take():
        pass
