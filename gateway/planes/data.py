"""The data plane: what clients speak to, and what becomes of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.access_log import AccessLog, open_access_log
from gateway.admin.bodies import DecisionBody, decision_body
from gateway.admin.live import RateMeter
from gateway.admission import Admission
from gateway.authentication import Authenticator
from gateway.dispatch import Dispatcher
from gateway.endings import Endings
from gateway.homes import Homes
from gateway.hotpath import Access, HotPath
from gateway.job import Record
from gateway.keys import RingSource
from gateway.limits import LedgerLink, Limiter
from gateway.memory import advise_huge_pages
from gateway.planes.knowledge import Knowledge
from gateway.planes.limiter import build_limiter, limit_rules, limiter_running
from gateway.public import public_app, public_routes
from gateway.queue_gauges import queue_gauges
from gateway.repeating import repeat
from gateway.retries import Quarantine
from gateway.server.listener import Listener
from gateway.serving import make_server
from gateway.settings import Settings, TracingSettings
from gateway.shutdown import ClientServer
from gateway.telemetry import Telemetry
from gateway.tokenizing import Tokenizing
from gateway.tracing import SpanExport, Tracer

__all__ = ["DataPlane", "build_data_plane", "client_server"]

_KEPT_DECISIONS: Final = 256
_ADVISE_S: Final = 60.0
_log = logging.getLogger("warmpath.gateway")


@dataclass(frozen=True, slots=True)
class DataPlane:
    """What clients speak to, and what became of their requests."""

    public: HotPath
    dispatcher: Dispatcher
    admission: Admission
    limiter: Limiter
    telemetry: Telemetry
    tracer: Tracer
    access_log: AccessLog | None
    endings: Endings
    """To be told before what was counted is read."""
    decisions: deque[Record]
    rates: RateMeter

    def apply(self, settings: Settings) -> None:
        """For requests from now on."""
        self.public.set_rules(
            limit_rules(settings), {name: tenant.standing for name, tenant in settings.tenants.items()}
        )
        self.dispatcher.configure(
            settings.stream.timeouts, commit_after_s=settings.stream.commit_after_s, ping_s=settings.stream.ping_s
        )
        self.admission.configure(settings.admission.gate_settings)

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Measures the event loop while the block runs; what is to be told of requests is told at its end."""
        watching = asyncio.create_task(self.telemetry.watch_loop())
        advising = asyncio.create_task(repeat(_advise_huge_pages, _ADVISE_S, _log, "asking for huge pages"))
        try:
            async with limiter_running(self.limiter):
                yield
        finally:
            watching.cancel()
            advising.cancel()
            await asyncio.gather(watching, advising, return_exceptions=True)
            self.admission.close()
            self.endings.close()
            await self.tracer.aclose()
            if self.access_log is not None:
                await asyncio.to_thread(self.access_log.close)

    def decision_bodies(self) -> list[DecisionBody]:
        self.endings.tell()
        offset = time.time() - time.monotonic()
        return [
            decision_body(record, record.decision, offset) for record in self.decisions if record.decision is not None
        ]


def build_data_plane(
    settings: Settings,
    knowledge: Knowledge,
    keys: RingSource,
    ledger: LedgerLink | None,
    homes: Homes,
    quarantine: Quarantine,
) -> DataPlane:
    """`ledger`: the supervisor's, where there is one."""
    clock = time.monotonic
    telemetry = Telemetry()
    limiter = build_limiter(
        settings,
        supervisor=ledger,
        processes=settings.server.processes,
        on_mode=telemetry.limiter_mode,
        on_error=telemetry.limiter_failed,
    )
    tracer = _tracer(settings.tracing, unix_offset=lambda: time.time() - clock())
    access_log = open_access_log(settings.log.access)
    if access_log is not None:
        telemetry.register(
            "counter",
            "warmpath_access_log_dropped",
            "Lines of the access log that were lost: nobody took them in time, or the disk is full.",
            (),
            lambda: {(): access_log.num_dropped},
        )
    upstream = knowledge.upstream
    telemetry.register(
        "gauge",
        "warmpath_upstream_connections",
        "Connections to replicas: with a request on them, or kept for the next one.",
        ["state"],
        lambda: {("in_use",): upstream.in_use, ("idle",): upstream.idle},
    )
    telemetry.register(
        "counter",
        "warmpath_talks",
        "Prompts by what was known of them: begun, continued, or mistaken, after which that model's are not remembered.",
        ["result"],
        knowledge.prompters.talks,
    )
    counts = settings.telemetry.metrics
    admission = Admission(
        knowledge.router,
        settings.admission.gate_settings,
        clock=clock,
        draw=random.random,
        on_wait=telemetry.queue_wait,
        on_refusal=telemetry.queue_refused,
    )
    knowledge.watcher.on_frame = admission.heard
    for name, about, labels, read in queue_gauges(admission):
        telemetry.register("gauge", name, about, labels, read)
    decisions: deque[Record] = deque(maxlen=_KEPT_DECISIONS)
    rates = RateMeter()
    authenticator = None if settings.server.open else Authenticator(keys, clock=clock, wall_clock=time.time)

    def ended(records: Sequence[Record]) -> None:
        if counts:
            for record in records:
                telemetry.finished(record)
        if access_log is not None:
            unix_offset = time.time() - clock()
            for record in records:
                access_log.finished(record, record.ended_at + unix_offset)
        failures = sum(record.status >= 500 for record in records)
        rates.add(len(records), failures, records[-1].ended_at)  # the first ended a moment before
        decisions.extend(record for record in records if record.decision is not None)

    endings = Endings(ended)

    def finished(record: Record) -> None:
        if record.trace.sampled:  # few are, and to make the spans of many at once would hold the loop
            tracer.finished(record)
        endings.add(record)

    def unix_time(moment: float) -> float:
        return moment + time.time() - clock()

    dispatcher = Dispatcher(
        knowledge.router,
        knowledge.upstream,
        homes,
        admission,
        quarantine,
        timeouts=settings.stream.timeouts,
        commit_after_s=settings.stream.commit_after_s,
        ping_s=settings.stream.ping_s,
        clock=clock,
        unix_time=unix_time,
        draw=random.random,
        on_gap=telemetry.gap if counts else _count_nothing,
        on_failed_try=telemetry.upstream_failed if counts else _count_nothing,
    )
    hot_path = HotPath(
        public_app(
            public_routes(
                knowledge.router,
                knowledge.cards,
                knowledge.aliases,
                authenticator,
                unix_time=unix_time,
            )
        ),
        router=knowledge.router,
        access=Access(
            authenticator=authenticator,
            rules=limit_rules(settings),
            limiter=limiter,
            salt_for=lambda group: keys.ring.salt_for(group),
            tenants={name: tenant.standing for name, tenant in settings.tenants.items()},
        ),
        cards=knowledge.cards,
        aliases=knowledge.aliases,
        preparer=knowledge.preparer,
        tokenizing=Tokenizing(knowledge.prompters, knowledge.cards, knowledge.executor),
        homes=homes,
        dispatcher=dispatcher,
        max_body_bytes=settings.server.max_body_bytes,
        clock=clock,
        begin_trace=tracer.begin,
        on_finish=finished,
    )
    return DataPlane(hot_path, dispatcher, admission, limiter, telemetry, tracer, access_log, endings, decisions, rates)


def _tracer(settings: TracingSettings, unix_offset: Callable[[], float]) -> Tracer:
    export: SpanExport | None = None
    if settings.exporter == "otlp":
        from gateway.otlp import OtlpExport  # 0.3 s and 30 MB, which only who wants traces should pay

        export = OtlpExport(
            endpoint=settings.endpoint,
            service_name=settings.service_name,
            version=importlib.metadata.version("warmpath"),
        )
    return Tracer(
        export,
        sample_ratio=settings.sample_ratio,
        follow_caller=settings.follow_caller,
        unix_offset=unix_offset,
    )


async def _advise_huge_pages() -> None:
    await asyncio.to_thread(advise_huge_pages)


def _count_nothing(model: str, value: object) -> None:
    """Where metrics are off."""


def client_server(settings: Settings, data: DataPlane) -> ClientServer:
    """The server that clients of this process speak to, and what metrics tell of it."""
    listener, loop = Listener(settings.server.limits), asyncio.get_running_loop()
    data.telemetry.register(
        "gauge", "warmpath_client_connections", "Connections of clients.", [], lambda: {(): listener.num_connections}
    )
    data.telemetry.register(
        "gauge", "warmpath_tasks", "Tasks of the event loop.", [], lambda: {(): len(asyncio.all_tasks(loop))}
    )
    return ClientServer(
        make_server(data.public, listener, settings.server.grace_s),
        listener,
        drain_s=settings.server.drain_s,
        grace_s=settings.server.grace_s,
        cut=data.public.cut,
    )
