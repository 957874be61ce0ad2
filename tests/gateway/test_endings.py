"""Ends of requests: told together, in order, once each, and never late for who asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.endings import Endings
from gateway.job import Record
from tests.gateway.stub import gateway, says, stub
from tests.gateway.test_access_log import lines
from tests.gateway.test_telemetry import record
from tests.serving import eventually


class _Told:
    def __init__(self) -> None:
        self.batches: list[Sequence[Record]] = []
        self.endings = Endings(self.batches.append)

    @property
    def all(self) -> list[Record]:
        return [each for batch in self.batches for each in batch]


async def test_many_are_told_together_in_their_order() -> None:
    told, ended = _Told(), [record(status=200 + number) for number in range(130)]

    for each in ended:
        told.endings.add(each)
    told.endings.tell()

    assert [len(batch) for batch in told.batches] == [64, 64, 2]
    assert all(one is other for one, other in zip(told.all, ended, strict=True))


async def test_few_wait_a_moment_only() -> None:
    told = _Told()

    for _ in range(3):
        told.endings.add(record(status=200))
    assert not told.batches
    await eventually(lambda: len(told.batches) == 1)
    told.endings.add(record(status=404))
    await eventually(lambda: len(told.batches) == 2)

    assert [each.status for each in told.all] == [200, 200, 200, 404]


async def test_who_asks_gets_what_waits_and_nothing_is_told_twice() -> None:
    told = _Told()
    told.endings.add(record(status=200))

    told.endings.tell()
    told.endings.tell()
    told.endings.close()

    assert len(told.all) == 1


async def test_the_end_leaves_nothing_behind_and_no_timer() -> None:
    told = _Told()
    told.endings.add(record(status=200))
    timer = told.endings._timer

    told.endings.close()

    assert len(told.batches) == 1
    assert timer is not None
    assert timer.cancelled()


async def test_a_request_that_has_just_ended_is_in_every_number(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        await running.chat()
        decisions = running.gateway.data.decision_bodies()
        await running.chat()
        metrics = (await running.admin.get("/metrics")).text

    assert len(decisions) == 1
    assert 'warmpath_requests_total{model="stub-model",status="200"} 2.0' in metrics


async def test_a_gateway_that_stops_has_written_the_line_of_its_last_request(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    async with stub(says("hi")) as replica, gateway(tmp_path / "state", replica, log={"access": str(file)}) as running:
        for _ in range(70):
            await running.chat()

    assert [line["status"] for line in lines(file)] == [200] * 70
