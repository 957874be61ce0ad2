from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.repeating import repeat

LOG = logging.getLogger("warmpath.test")


async def test_a_step_that_fails_is_told_once_and_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    steps = 0
    done = asyncio.Event()

    async def step() -> None:
        nonlocal steps
        steps += 1
        if steps in (1, 2, 4):
            raise ValueError(f"step {steps}")
        if steps == 5:
            done.set()

    running = asyncio.create_task(repeat(step, 0.0, LOG, "stepping"))
    await asyncio.wait_for(done.wait(), 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert running.cancelled()
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["step 1", "step 4"]


async def test_it_ends_when_it_is_cancelled_within_a_step() -> None:
    began = asyncio.Event()

    async def step() -> None:
        began.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(repeat(step, 0.0, LOG, "waiting"))
    await asyncio.wait_for(began.wait(), 5)
    running.cancel()

    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)
