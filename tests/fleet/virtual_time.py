"""A fleet in virtual time: the real router over real engines and their real event frames, without sockets or waiting.

What `warmpath bench fleet` measures with processes, this computes: nothing can be late, so two policies differ by their
decisions alone, and a run gives the same figures every time. It leaves out what a network and a gateway's own work add.

    python -m tests.fleet.virtual_time --load 1.5 --policies cost,sticky_until_saturated
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import click

from loadtest.workloads import WORKLOADS, Request, Workload, ideal_cached_tokens, make_workload
from router import (
    Asked,
    BlockName,
    Decision,
    Dropped,
    Gate,
    GateSettings,
    Outcome,
    Placed,
    Query,
    Reservation,
    Router,
    RoutingSettings,
    block_names,
    root_name,
)
from router.fair_queue import Entry, Priority
from router.wire import Frame, FrameDecoder, Hello, ReplicaSpec
from workers.engine import Engine
from workers.events import EventLog, LoadThrottle
from workers.protocol import EngineInfo, Sampling, StepReport, Submit
from workers.simulated import SimulatedRunner, engine_over, simulated_info

REPLICAS: Final = 8
_LEAST_PAUSE_S: Final = 0.005
"""Between two looks at the queue, as in `gateway.admission`."""


@dataclass(frozen=True)
class Figures:
    """Of the requests that count; times in milliseconds."""

    hit_of_ideal: float
    ttft_p50: float
    ttft_p90: float
    ttft_mean: float
    ttft_max: float
    prefill_imbalance: float
    """Prompt tokens computed by the replica that computed most, over the mean."""
    last_first_s: float = 0.0
    """When the last of them had its first token."""
    dropped: int = 0
    """How many were refused."""
    most_queued: int = 0


@dataclass
class _Asked:
    """One request on its way."""

    number: int
    due_at: float
    tenant: str
    replica: int = 0
    reservation: Reservation | None = None
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
    """Runs one workload through one router. Used once."""

    def __init__(
        self,
        workload: Workload,
        settings: RoutingSettings,
        *,
        seed: int = 1,
        queue: GateSettings | None = None,
        tenant_of: Callable[[Request], str] = lambda request: "",
        priorities: bool = True,
        router: Router | None = None,
        gateways: int = 1,
        decide_s: float = 0.0,
        frame_s: float = 0.0,
    ) -> None:
        """`priorities`: whether replicas are told them, as own ones are.
        `gateways` take the requests in turn, each one request after the other, `decide_s` for each; what a replica tells is
        heard `frame_s` later.
        """
        self._gateways = gateways
        self._decide_s = decide_s
        self._frame_s = frame_s
        self._frames: dict[int, tuple[str, Frame]] = {}
        self._workload = workload
        self._draw = random.Random(seed)
        self._router = Router(settings) if router is None else router
        self._info = simulated_info(kv_tokens=workload.kv_tokens)
        self._gate = None if queue is None else Gate(self._router, self._info.model, queue)
        self._tenant_of = tenant_of
        self._priorities = priorities
        self._waiting: dict[Entry[Asked], _Asked] = {}
        self._look_at: float | None = None
        self._looked_at = -math.inf
        self._most_queued = 0
        self._dropped: list[_Asked] = []
        self._root = root_name(model=self._info.model)
        self._decoder = FrameDecoder()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, str, int]] = []
        self._asked: dict[int, _Asked] = {}
        self._open = 0
        self._until: str | None = None
        self._replicas = [self._start(number) for number in range(REPLICAS)]

    def run(self, until: str | None = None) -> Figures:
        """To the end, or until all requests of one tenant have ended."""
        requests = self._workload.requests
        self._open = sum(until in (None, self._tenant_of(request)) for request in requests)
        self._until = until
        free_at = [0.0] * self._gateways
        for number, request in enumerate(requests):
            gateway = number % self._gateways
            free_at[gateway] = max(request.at_s, free_at[gateway]) + self._decide_s
            self._plan(free_at[gateway], "request", number)
        happen = {
            "request": self._on_request,
            "step": self._on_step,
            "load": self._on_load,
            "look": self._on_look,
            "frame": self._on_frame,
        }
        while self._open:
            now, _, kind, number = heapq.heappop(self._due)
            happen[kind](number, now)
        return self.figures()

    def _start(self, number: int) -> _Replica:
        engine = engine_over(SimulatedRunner(self._info))
        engine.warm_up()
        replica = _Replica(engine, EventLog(), LoadThrottle(engine.report()))
        name = _name(number)
        self._router.add(name, ReplicaSpec(url="http://replica", model=self._info.model, epoch="e"), 0.0)
        self._router.apply(name, _hello(self._info), 0.0)
        self._router.set_health(name, True, 0.0)
        self._router.apply(name, replica.loads.take(seq=0, now=0.0, ts=0.0), 0.0)
        return replica

    def _plan(self, at_s: float, kind: str, number: int) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), kind, number))

    def _on_request(self, number: int, now: float) -> None:
        request = self._workload.requests[number]
        ids = request.prompt.encode()  # four bytes of ASCII are the u32 of one simulated token
        names: list[BlockName] = block_names(ids, self._root, self._info.block_size)
        query = Query(model=self._info.model, names=names, num_tokens=request.prompt_tokens)
        tenant = self._tenant_of(request)
        asked = self._asked[number] = _Asked(number, request.at_s, tenant)
        what = Asked(query, str(number), tenant)
        if self._gate is None:
            decision = self._router.route(query, now, self._draw.random())
            assert isinstance(decision, Decision)
            self._send(asked, Placed(decision, self._router.begin(decision, query, str(number), now)), now)
            return
        placed = self._gate.try_pass(what, now, self._draw.random())
        if isinstance(placed, Placed):
            self._send(asked, placed, now)
            return
        assert placed is None, "there always is a replica"
        entry, displaced = self._gate.wait(what, now, now, self._draw.random())
        self._waiting[entry] = asked
        self._most_queued = max(self._most_queued, len(self._gate))
        if displaced is not None:
            self._drop(displaced)
        self._hear(now)

    def _send(self, asked: _Asked, placed: Placed, now: float) -> None:
        request = self._workload.requests[asked.number]
        asked.replica, asked.reservation = int(placed.decision.replica_id), placed.reservation
        number, chosen = asked.number, asked.replica
        sampling = Sampling(max_tokens=request.max_tokens, seed=number, ignore_eos=True)
        submit = Submit(
            rid=number,
            request_id=str(number),
            prompt=request.prompt.encode(),
            sampling=sampling,
            priority=placed.engine_priority(Priority.DEFAULT) if self._priorities else 0,
            patience=self._router.patience,
        )
        replica = self._replicas[chosen]
        if replica.running is None:
            replica.engine.submit(submit)
            self._begin_step(chosen, now)
        else:
            replica.arrived.append(submit)

    def _drop(self, entry: Entry[Asked]) -> None:
        self._dropped.append(self._waiting.pop(entry))
        self._ended(self._dropped[-1])

    def _ended(self, asked: _Asked) -> None:
        self._open -= self._until in (None, asked.tenant)

    def _on_look(self, _: int, now: float) -> None:
        """As `gateway.admission` does: looks at the queue when something was heard and when a replica should be free."""
        assert self._gate is not None
        if now != self._look_at:
            return  # another one came before it
        self._look_at, self._looked_at = None, now
        for entry, end in self._gate.release(now, self._draw.random, 16):
            if isinstance(end, Dropped):
                self._drop(entry)
            else:
                assert isinstance(end, Placed)
                self._send(self._waiting.pop(entry), end, now)
        if self._gate:
            self._look(now + self._gate.next_in_s())

    def _hear(self, now: float) -> None:
        if self._gate:
            self._look(now)

    def _look(self, at_s: float) -> None:
        at_s = max(at_s, self._looked_at + _LEAST_PAUSE_S)
        if self._look_at is None or at_s < self._look_at:
            self._look_at = at_s
            self._plan(at_s, "look", 0)

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
            assert asked.reservation is not None
            if asked.first_at is None:
                asked.first_at, asked.cached_tokens = now, output.cached_tokens
                self._router.answered(asked.reservation, now)
            if output.finish_reason is not None:
                self._router.finish(asked.reservation, now, Outcome.OK, output.cached_tokens)
                if self._gate is not None:
                    self._gate.answered(asked.tenant, self._workload.requests[asked.number].max_tokens)
                self._ended(asked)
        self._hear(now)
        self._begin_step(number, now)

    def _publish(self, number: int, report: StepReport, now: float) -> None:
        replica = self._replicas[number]
        for frame in self._decoder.feed(b"".join(replica.log.append(report, now))):
            self._tell(_name(number), frame, now)
        replica.loads.note(report)
        self._on_load(number, now, planned=False)

    def _on_load(self, number: int, now: float, *, planned: bool = True) -> None:
        replica = self._replicas[number]
        if planned:
            replica.load_planned = False
        if now >= replica.loads.due_at():
            self._tell(_name(number), replica.loads.take(seq=replica.log.seq, now=now, ts=now), now)
        if not replica.load_planned:
            replica.load_planned = True
            self._plan(max(replica.loads.due_at(), now + 0.01), "load", number)

    def _tell(self, name: str, frame: Frame, now: float) -> None:
        if not self._frame_s:
            self._router.apply(name, frame, now)
            self._hear(now)
            return
        number = next(self._numbers)
        self._frames[number] = name, frame
        self._plan(now + self._frame_s, "frame", number)

    def _on_frame(self, number: int, now: float) -> None:
        self._router.apply(*self._frames.pop(number), now)
        self._hear(now)

    def figures(self, tenant: str | None = None, after_s: float = 0.0) -> Figures:
        """Of a tenant's requests, or of all, that came later than `after_s`; after `run`."""
        requests = self._workload.requests
        counted = [
            asked
            for asked in self._asked.values()
            if not requests[asked.number].warm
            and tenant in (None, asked.tenant)
            and asked.first_at is not None
            and asked.due_at >= after_s
        ]
        ideal = ideal_cached_tokens(requests)
        ttft_ms = sorted(1000 * (asked.first_at - asked.due_at) for asked in counted if asked.first_at is not None)
        computed = [0] * REPLICAS
        for asked in counted:
            computed[asked.replica] += requests[asked.number].prompt_tokens - asked.cached_tokens
        return Figures(
            hit_of_ideal=sum(asked.cached_tokens for asked in counted)
            / max(sum(ideal[asked.number] for asked in counted), 1),
            ttft_p50=ttft_ms[len(ttft_ms) // 2],
            ttft_p90=ttft_ms[len(ttft_ms) * 9 // 10],
            ttft_mean=sum(ttft_ms) / len(ttft_ms),
            ttft_max=ttft_ms[-1],
            prefill_imbalance=max(computed) * REPLICAS / sum(computed),
            last_first_s=max(asked.first_at for asked in counted if asked.first_at is not None),
            dropped=sum(tenant in (None, asked.tenant) for asked in self._dropped),
            most_queued=self._most_queued,
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
@click.option("--queue", is_flag=True, help="Each both with and without the queue before the fleet.")
@click.option("--ahead-s", type=float, help="Of the queue; by default its own.")
@click.option("--patience", default=RoutingSettings().patience, show_default=True, help="0: first come, first served.")
@click.option("--w-per-wait-s", type=float, help="Of the policy `cost`; by default the router's own.")
def main(
    workload: str,
    load: float,
    policies: str,
    seeds: int,
    queue: bool,
    ahead_s: float | None,
    patience: float,
    w_per_wait_s: float | None,
) -> None:
    """Compare policies in virtual time. About 10 s a run."""
    for seed in range(1, seeds + 1):
        for policy in policies.split(","):
            options: dict[str, Any] = {"policy": policy, "patience": patience}
            if w_per_wait_s is not None:
                options["w_per_wait_s"] = w_per_wait_s
            made = make_workload(workload, load=load, seed=seed)
            with_queue = GateSettings() if ahead_s is None else GateSettings(ahead_s=ahead_s)
            for gate in (None, with_queue) if queue else (None,):
                found = VirtualFleet(made, RoutingSettings(**options), seed=seed, queue=gate).run()
                click.echo(
                    f"{workload} {load}x seed {seed} {policy:24} {'queue' if gate is with_queue else '     '} "
                    f"hit {found.hit_of_ideal:.3f}  TTFT p50 {found.ttft_p50:,.0f} p90 {found.ttft_p90:,.0f} mean "
                    f"{found.ttft_mean:,.0f} max {found.ttft_max:,.0f} ms  imbalance {found.prefill_imbalance:.2f}  "
                    f"last first token {found.last_first_s:.1f} s  most queued {found.most_queued}  dropped {found.dropped}"
                )


if __name__ == "__main__":
    main()
