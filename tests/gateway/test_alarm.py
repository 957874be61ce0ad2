"""An alarm on a loop whose clock the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.alarm import Alarm


class _Handle:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class _Loop:
    def __init__(self) -> None:
        self.now = 0.0
        self.handles: list[_Handle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, callback: Callable[[], None]) -> _Handle:
        self.handles.append(_Handle(at, callback))
        return self.handles[-1]

    def run_until(self, now: float) -> None:
        while due := [handle for handle in self.handles if not handle.cancelled and handle.at <= now]:
            first = min(due, key=lambda handle: handle.at)
            self.handles.remove(first)
            self.now = max(self.now, first.at)
            first.callback()
        self.now = now

    @property
    def pending(self) -> int:
        return sum(not handle.cancelled for handle in self.handles)


def make() -> tuple[Alarm, _Loop, list[float]]:
    loop = _Loop()
    return Alarm(cast(asyncio.AbstractEventLoop, loop)), loop, []


def test_a_hundred_waits_that_end_in_time_set_one_timer() -> None:
    alarm, loop, rung = make()

    for _ in range(100):
        alarm.set(loop.now + 10, lambda: rung.append(loop.now))
        loop.run_until(loop.now + 0.05)
        alarm.clear()

    assert len(loop.handles) == 1
    assert not rung


def test_closing_leaves_nothing_with_the_loop() -> None:
    alarm, loop, rung = make()
    alarm.set(5.0, lambda: rung.append(loop.now))

    alarm.close()

    assert loop.pending == 0


@given(st.lists(st.tuples(st.sampled_from(["set", "move", "clear", "wait"]), st.integers(1, 30)), max_size=20))
def test_it_rings_once_at_its_deadline_and_never_for_a_wait_that_is_over(steps: list[tuple[str, int]]) -> None:
    alarm, loop, rung = make()
    expected: list[float] = []
    due: Any = None
    for step, ticks in steps:
        if step == "set":
            due = loop.now + ticks
            alarm.set(due, lambda: rung.append(loop.now))
        elif step == "move" and due is not None:
            due += ticks
            alarm.deadline = due
        elif step == "clear":
            due = None
            alarm.clear()
        elif step == "wait":
            until = loop.now + ticks
            if due is not None and due <= until:
                expected.append(due)
                due = None
            loop.run_until(until)
        assert loop.pending <= 1

    assert rung == expected
