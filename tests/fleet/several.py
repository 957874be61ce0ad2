"""Several routers in virtual time, taken in turn by the requests: of the processes of one gateway, or of gateways.

python -m tests.fleet.several --gateways 2
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click

from gateway.processes.bus import FLUSH_S
from gateway.processes.messages import Message
from gateway.processes.shared_router import SharedRouter
from loadtest.workloads import WORKLOADS, Workload, make_workload
from router import Decision, Query, Reservation, Router, RoutingSettings, Sync, Unroutable
from router.wire import Frame, ReplicaSpec
from tests.fleet.virtual_time import VirtualFleet


class InTurn(Router):
    """Looks like one. What replicas say all of them hear."""

    def __init__(self, routers: Sequence[Router]) -> None:
        super().__init__()
        self._routers = routers
        self._next = 0
        self._owners: dict[Reservation, Router] = {}

    def route(self, query: Query, now: float, draw: float) -> Decision | Unroutable:
        return self._routers[self._next].route(query, now, draw)

    def begin(self, decision: Decision, query: Query, request_id: str, now: float) -> Reservation:
        router = self._routers[self._next]
        self._next = (self._next + 1) % len(self._routers)
        reservation = router.begin(decision, query, request_id, now)
        self._owners[reservation] = router
        return reservation

    def answered(self, reservation: Reservation, now: float) -> None:
        self._owners[reservation].answered(reservation, now)

    def finish(self, reservation: Reservation, *args: Any) -> None:
        self._owners.pop(reservation).finish(reservation, *args)

    def add(self, replica_id: str, spec: ReplicaSpec, now: float) -> None:
        for router in self._routers:
            router.add(replica_id, spec, now)

    def set_health(self, replica_id: str, healthy: bool, now: float) -> None:
        for router in self._routers:
            router.set_health(replica_id, healthy, now)

    def apply(self, replica_id: str, frame: Frame, now: float) -> Sync:
        for router in self._routers:
            sync = router.apply(replica_id, frame, now)
        return sync


class Processes(InTurn):
    """They hear at once what another one begins, and the rest as late as a bus may be."""

    def __init__(self, count: int, settings: RoutingSettings) -> None:
        self._told: list[list[Message]] = [[] for _ in range(count)]
        self._shared = [
            SharedRouter(settings, told.append, partial(self._tell_now, number), lambda: None)
            for number, told in enumerate(self._told)
        ]
        self._flushed_at = 0.0
        super().__init__(self._shared)

    def apply(self, replica_id: str, frame: Frame, now: float) -> Sync:
        if now >= self._flushed_at + FLUSH_S:
            self._flushed_at = now
            for number in range(len(self._told)):
                self._flush(number, now)
        return super().apply(replica_id, frame, now)

    def _tell_now(self, number: int, message: Message) -> None:
        self._told[number].append(message)
        self._flush(number, self._flushed_at)

    def _flush(self, number: int, now: float) -> None:
        messages, self._told[number][:] = list(self._told[number]), []
        for other, router in enumerate(self._shared):
            if other != number:
                for message in messages:
                    router.hear(number, message, now)


def several_gateways(count: int, away_s: float) -> InTurn:
    every = [RoutingSettings(gateways=count, gateway=number, away_s=away_s) for number in range(1, count + 1)]
    return InTurn([Router(settings) for settings in every])


def _spread(workload: Workload, spread_s: float, seed: int) -> Workload:
    draw = random.Random(seed)
    later = [replace(each, at_s=each.at_s + draw.random() * spread_s) for each in workload.requests]
    return replace(workload, requests=tuple(sorted(later, key=lambda each: each.at_s)))


@click.command()
@click.option("--load", default=1.0, show_default=True)
@click.option("--limit", default=300, show_default=True, help="Only so many requests of the recorded trace.")
@click.option("--processes", type=int, help="Of one gateway.")
@click.option("--gateways", type=int, help="That know nothing of each other.")
@click.option("--workload", type=click.Choice(WORKLOADS), default="trace", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--away-s", default=RoutingSettings().away_s, show_default=True, help="0: gateways share nothing out.")
@click.option("--decide-ms", default=1.0, show_default=True, help="What a request takes its gateway before it is sent.")
@click.option("--frame-ms", default=2.0, show_default=True, help="What a replica's frame takes to its gateways.")
@click.option("--spread-s", default=0.0, show_default=True, help="Requests come up to so much later, drawn evenly.")
def main(
    load: float,
    limit: int,
    processes: int | None,
    gateways: int | None,
    workload: str,
    seed: int,
    away_s: float,
    decide_ms: float,
    frame_ms: float,
    spread_s: float,
) -> None:
    """Of one gateway in one process, unless told otherwise."""
    settings = RoutingSettings()
    router: Router | None = None
    if processes is not None:
        router = Processes(processes, settings)
    elif gateways is not None:
        router = several_gateways(gateways, away_s)
    made = make_workload(workload, load=load, seed=seed, limit=limit if workload == "trace" else None)
    if spread_s:
        made = _spread(made, spread_s, seed)
    found = VirtualFleet(
        made,
        settings,
        seed=seed,
        router=router,
        gateways=gateways or 1,
        decide_s=decide_ms / 1000,
        frame_s=frame_ms / 1000,
    ).run()
    click.echo(f"hit {found.hit_of_ideal:.3f}  TTFT p50 {found.ttft_p50:,.0f} p90 {found.ttft_p90:,.0f} ms")


if __name__ == "__main__":
    main()
