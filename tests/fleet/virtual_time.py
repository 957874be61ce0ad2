"""A fleet in virtual time: the real router over real engines and their real event frames, without sockets or waiting.

What `warmpath bench fleet` measures with processes, this computes: nothing can be late, so two policies differ by their
decisions alone, and a run gives the same figures every time. It leaves out what a network and a gateway's own work add.

    python -m tests.fleet.virtual_time --load 1.5 --policies cost,sticky_until_saturated
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import click

from gateway.processes.bus import FLUSH_S
from gateway.processes.messages import Message
from gateway.processes.shared_router import SharedRouter
from loadtest.workloads import WORKLOADS, Workload, ideal_cached_tokens, make_workload
from router import BlockName, Outcome, Query, Reservation, Router, RoutingSettings, block_names, root_name
from router.route import Decision
from router.wire import Frame, FrameDecoder, Hello, ReplicaSpec
from workers.engine import Engine
from workers.events import EventLog, LoadThrottle
from workers.protocol import EngineInfo, Sampling, StepReport, Submit
from workers.simulated import SimulatedRunner, engine_over, simulated_info

REPLICAS: Final = 8
BUS_S: Final = FLUSH_S
"""A message waits half of it, and at most all of it."""


@dataclass(frozen=True)
class Figures:
    """Of the requests that count; times in milliseconds."""

    hit_of_ideal: float
    ttft_p50: float
    ttft_p90: float
    ttft_mean: float
    prefill_imbalance: float
    """Prompt tokens computed by the replica that computed most, over the mean."""


@dataclass
class _Asked:
    """One request on its way."""

    number: int
    due_at: float
    replica: int
    router: Router
    reservation: Reservation
    first_at: float | None = None
    cached_tokens: int = 0


@dataclass
class _Replica:
    engine: Engine
    log: EventLog
    loads: LoadThrottle
    running: StepReport | None = None
    """What the step that is under way will report at its end."""
    arrived: list[Submit] = field(default_factory=list)
    """Came during that step."""
    load_planned: bool = False


class VirtualFleet:
    """Runs one workload through one router, or through several that get the requests in turn. Used once."""

    def __init__(
        self, workload: Workload, settings: RoutingSettings, *, seed: int = 1, processes: int = 1, gateways: int = 1
    ) -> None:
        """`processes` tell each other what they begin at once, and the rest at most `BUS_S` later; `gateways` tell nothing."""
        self._workload = workload
        self._draw = random.Random(seed)
        self._told: list[list[Message]] = [[] for _ in range(processes)]
        self._routers: list[Router] = [Router(settings) for _ in range(gateways)]
        if processes > 1:
            self._routers = [
                SharedRouter(settings, told.append, partial(self._tell_now, number), lambda: None)
                for number, told in enumerate(self._told)
            ]
        self._info = simulated_info(kv_tokens=workload.kv_tokens)
        self._root = root_name(model=self._info.model)
        self._decoder = FrameDecoder()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, str, int]] = []
        self._asked: dict[int, _Asked] = {}
        self._open = len(workload.requests)
        self._now = 0.0
        self._replicas = [self._start(number) for number in range(REPLICAS)]

    def run(self) -> Figures:
        for number, request in enumerate(self._workload.requests):
            self._plan(request.at_s, "request", number)
        if len(self._told) > 1:
            for number in range(len(self._told)):
                self._plan(BUS_S * (number + 1) / len(self._told), "bus", number)
        happen = {"request": self._on_request, "step": self._on_step, "load": self._on_load, "bus": self._on_bus}
        while self._open:
            self._now, _, kind, number = heapq.heappop(self._due)
            happen[kind](number, self._now)
        return self._figures()

    def _start(self, number: int) -> _Replica:
        engine = engine_over(SimulatedRunner(self._info))
        engine.warm_up()
        replica = _Replica(engine, EventLog(), LoadThrottle(engine.report()))
        name = _name(number)
        load = replica.loads.take(seq=0, now=0.0, ts=0.0)
        for router in self._routers:
            router.add(name, ReplicaSpec(url="http://replica", model=self._info.model, epoch="e"), 0.0)
            router.apply(name, _hello(self._info), 0.0)
            router.set_health(name, True, 0.0)
            router.apply(name, load, 0.0)
        return replica

    def _plan(self, at_s: float, kind: str, number: int) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), kind, number))

    def _on_request(self, number: int, now: float) -> None:
        request = self._workload.requests[number]
        ids = request.prompt.encode()  # four bytes of ASCII are the u32 of one simulated token
        names: list[BlockName] = block_names(ids, self._root, self._info.block_size)
        query = Query(model=self._info.model, names=names, num_tokens=request.prompt_tokens)
        router = self._routers[number % len(self._routers)]
        decision = router.route(query, now, self._draw.random())
        assert isinstance(decision, Decision)
        chosen = int(decision.replica_id)
        reservation = router.begin(decision, query, str(number), now)
        self._asked[number] = _Asked(number, request.at_s, chosen, router, reservation)
        sampling = Sampling(max_tokens=request.max_tokens, seed=number, ignore_eos=True)
        submit = Submit(rid=number, request_id=str(number), prompt=ids, sampling=sampling)
        replica = self._replicas[chosen]
        if replica.running is None:
            replica.engine.submit(submit)
            self._begin_step(chosen, now)
        else:
            replica.arrived.append(submit)

    def _begin_step(self, number: int, now: float) -> None:
        replica = self._replicas[number]
        if not replica.engine.has_work():
            self._publish(number, replica.engine.report(), now)
            return
        began = replica.engine.clock()
        replica.running = replica.engine.step()
        self._plan(now + replica.engine.clock() - began, "step", number)

    def _on_step(self, number: int, now: float) -> None:
        replica = self._replicas[number]
        report, replica.running = replica.running, None
        assert report is not None
        for submit in replica.arrived:
            replica.engine.submit(submit)
        replica.arrived.clear()
        self._publish(number, report, now)
        for output in report.outputs:
            asked = self._asked[output.rid]
            if asked.first_at is None:
                asked.first_at, asked.cached_tokens = now, output.cached_tokens
                asked.router.answered(asked.reservation, now)
            if output.finish_reason is not None:
                asked.router.finish(asked.reservation, now, Outcome.OK, output.cached_tokens)
                self._open -= 1
        self._begin_step(number, now)

    def _publish(self, number: int, report: StepReport, now: float) -> None:
        replica = self._replicas[number]
        for frame in self._decoder.feed(b"".join(replica.log.append(report, now))):
            self._apply(number, frame, now)
        replica.loads.note(report)
        self._on_load(number, now, planned=False)

    def _on_load(self, number: int, now: float, *, planned: bool = True) -> None:
        replica = self._replicas[number]
        if planned:
            replica.load_planned = False
        if now >= replica.loads.due_at():
            self._apply(number, replica.loads.take(seq=replica.log.seq, now=now, ts=now), now)
        if not replica.load_planned:
            replica.load_planned = True
            self._plan(max(replica.loads.due_at(), now + 0.01), "load", number)

    def _apply(self, number: int, frame: Frame, now: float) -> None:
        for router in self._routers:
            router.apply(_name(number), frame, now)

    def _tell_now(self, number: int, message: Message) -> None:
        self._told[number].append(message)
        self._flush(number, self._now)

    def _on_bus(self, number: int, now: float) -> None:
        self._flush(number, now)
        self._plan(now + BUS_S, "bus", number)

    def _flush(self, number: int, now: float) -> None:
        """What a process has said since the last time reaches all others."""
        messages, self._told[number][:] = list(self._told[number]), []
        for other, router in enumerate(self._routers):
            if other != number and isinstance(router, SharedRouter):
                for message in messages:
                    router.hear(number, message, now)

    def _figures(self) -> Figures:
        requests = self._workload.requests
        counted = [asked for asked in self._asked.values() if not requests[asked.number].warm]
        ideal = ideal_cached_tokens(requests)
        ttft_ms = sorted(1000 * (asked.first_at - asked.due_at) for asked in counted if asked.first_at is not None)
        computed = [0] * REPLICAS
        for asked in counted:
            computed[asked.replica] += requests[asked.number].prompt_tokens - asked.cached_tokens
        return Figures(
            hit_of_ideal=sum(asked.cached_tokens for asked in counted) / sum(ideal[asked.number] for asked in counted),
            ttft_p50=ttft_ms[len(ttft_ms) // 2],
            ttft_p90=ttft_ms[len(ttft_ms) * 9 // 10],
            ttft_mean=sum(ttft_ms) / len(ttft_ms),
            prefill_imbalance=max(computed) * REPLICAS / sum(computed),
        )


def _name(number: int) -> str:
    return str(number)


def _hello(info: EngineInfo) -> Hello:
    return Hello(
        epoch="e",
        seq=0,
        model=info.model,
        block_size=info.block_size,
        tokenizer_digest="trivial",
        numerics=info.numerics,
        capacity_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        started_at=0.0,
    )


@click.command()
@click.option("--workload", type=click.Choice(WORKLOADS), default="trace", show_default=True)
@click.option("--load", default=1.0, show_default=True)
@click.option("--policies", default="cost,sticky_until_saturated", show_default=True)
@click.option("--seeds", default=1, show_default=True, help="How many seeds to run each with.")
@click.option("--processes", default=1, show_default=True, help="Of the gateway.")
@click.option("--gateways", default=1, show_default=True, help="That know nothing of each other.")
@click.option("--limit", type=int, help="Only so many requests.")
@click.option("--w-per-wait-s", type=float, help="Of the policy `cost`; by default the router's own.")
def main(
    workload: str,
    load: float,
    policies: str,
    seeds: int,
    processes: int,
    gateways: int,
    limit: int | None,
    w_per_wait_s: float | None,
) -> None:
    """Compare policies in virtual time. About 10 s a run."""
    for seed in range(1, seeds + 1):
        for policy in policies.split(","):
            options: dict[str, Any] = {"policy": policy}
            if w_per_wait_s is not None:
                options["w_per_wait_s"] = w_per_wait_s
            made = make_workload(workload, load=load, seed=seed, limit=limit)
            found = VirtualFleet(
                made, RoutingSettings(**options), seed=seed, processes=processes, gateways=gateways
            ).run()
            click.echo(
                f"{workload} {load}x seed {seed} {policy:24} hit {found.hit_of_ideal:.3f}  TTFT p50 {found.ttft_p50:,.0f} "
                f"p90 {found.ttft_p90:,.0f} mean {found.ttft_mean:,.0f} ms  imbalance {found.prefill_imbalance:.2f}"
            )


if __name__ == "__main__":
    main()
