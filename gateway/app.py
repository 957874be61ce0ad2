"""The composition root: builds every object of a gateway, and runs it as one process.

    Knowledge      router, watcher and what they need: of every process
    DataPlane      what clients speak to: of a whole gateway, and of each data process
    ControlPlane   keys, leases, admin API: of a whole gateway, and of a supervisor

Of several processes `gateway.processes.supervising` and `gateway.processes.data` put these together.

Order of the end: the client listener stops as `gateway.shutdown` says, then the admin listener; then nothing needs the watcher,
the upstream connections and the thread that tokenizes, and they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import random
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import click
import msgspec
from starlette.types import ASGIApp

from gateway.access_log import AccessLog, open_access_log
from gateway.admin.addresses import resolve_host
from gateway.admin.bodies import DecisionBody, RequestRates, decision_body
from gateway.admin.context import AdminContext, Insight
from gateway.admin.live import Live, RateMeter
from gateway.admin.registry import Registry
from gateway.admin.replicas import replica_bodies
from gateway.admin.routes import admin_app
from gateway.admission import Admission
from gateway.aliases import Aliases
from gateway.authentication import Authenticator
from gateway.dispatch import Dispatcher, Record
from gateway.failures import unroutable
from gateway.homes import Homes
from gateway.hotpath import PUBLIC_GROUP, Access, HotPath
from gateway.keys import KeyKind, KeyStore, KeyStoreError, RingSource
from gateway.keys.opening import given_keys, open_key_store
from gateway.limiting import build_limiter, limit_rules, limiter_running
from gateway.limits import LedgerLink, Limiter
from gateway.model_cards import ModelCards
from gateway.openai import Endpoint, parse_request
from gateway.prepare import Preparer, Prompters
from gateway.public import public_app, public_routes
from gateway.queue_gauges import queue_gauges
from gateway.reloading import Reloader, SettingsSource
from gateway.repeating import repeat
from gateway.retries import Quarantine
from gateway.server.listener import ADMIN_SHARE, Listener, raise_descriptor_limit
from gateway.serving import keep_freed_memory, listening, make_server, spare_collections
from gateway.settings import Settings, TracingSettings
from gateway.shutdown import ClientServer
from gateway.telemetry import Telemetry, render
from gateway.tokenizing import Tokenizing
from gateway.tracing import SpanExport, Tracer
from gateway.upstream.contract import Upstream
from gateway.upstream.http1 import Http1Upstream
from gateway.upstream.httpx_upstream import HttpxUpstream
from gateway.watch import Watcher
from router import Decision, ReplicaView, Router, Unroutable
from router.wire import ReplicaSpec

__all__ = [
    "ControlPlane",
    "DataPlane",
    "Gateway",
    "Knowledge",
    "build_control_plane",
    "build_data_plane",
    "build_gateway",
    "build_knowledge",
    "client_server",
    "first_keys",
    "run_gateway",
    "unready",
]

_log = logging.getLogger("warmpath.gateway")

_EXPIRE_EVERY_S: Final = 1.0
_KEPT_DECISIONS: Final = 256
_DEFAULT_GROUP: Final = "default"
"""Of keys that were made without a tenant."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a process knows of replicas, and by what."""

    router: Router
    watcher: Watcher
    upstream: Upstream
    prompters: Prompters
    cards: ModelCards
    preparer: Preparer
    aliases: Aliases
    executor: ThreadPoolExecutor

    def apply(self, settings: Settings) -> None:
        """Go by these from now on, and keep all that is known."""
        self.router.configure(settings.routing.router_settings)
        self.watcher.configure(settings.probes.rules)
        self.preparer.configure(settings.prompts.escapes)
        self.aliases.configure(settings.aliases)

    async def aclose(self) -> None:
        await self.watcher.aclose()
        await self.upstream.aclose()
        self.executor.shutdown(wait=False, cancel_futures=True)


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

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Measures the event loop while the block runs; what is to be told of requests is told at its end."""
        watching = asyncio.create_task(self.telemetry.watch_loop())
        try:
            async with limiter_running(self.limiter):
                yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.admission.close()
            await self.tracer.aclose()
            if self.access_log is not None:
                await asyncio.to_thread(self.access_log.close)

    def decision_bodies(self) -> list[DecisionBody]:
        offset = time.time() - time.monotonic()
        return [
            decision_body(record, record.decision, offset) for record in self.decisions if record.decision is not None
        ]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Who may, which replicas there are, and by what settings."""

    registry: Registry
    admin: ASGIApp
    reloader: Reloader
    live: Live

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Watches the settings and their replicas, and ends leases, while the block runs."""
        self.registry.set_static(_static(self.reloader.settings), time.monotonic())
        tasks = [
            asyncio.create_task(repeat(self._expire_leases, _EXPIRE_EVERY_S, _log, "ending leases")),
            asyncio.create_task(self.reloader.run()),
        ]
        try:
            yield
        finally:
            self.live.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _expire_leases(self) -> None:
        self.registry.expire(time.monotonic())


@dataclass(frozen=True, slots=True)
class Gateway:
    """A whole gateway in one process: two apps, and what runs beside them (`Gateway.background`)."""

    keys: KeyStore
    knowledge: Knowledge
    data: DataPlane
    control: ControlPlane
    stopping: asyncio.Event
    """Set when it should get no new requests, because it is to end."""

    @property
    def public(self) -> HotPath:
        return self.data.public

    @property
    def admin(self) -> ASGIApp:
        return self.control.admin

    @property
    def upstream(self) -> Upstream:
        return self.knowledge.upstream

    @property
    def registry(self) -> Registry:
        return self.control.registry

    @property
    def reloader(self) -> Reloader:
        return self.control.reloader

    @property
    def live(self) -> Live:
        return self.control.live

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Watches replicas and ends leases while the block runs."""
        try:
            async with self.data.background(), self.control.background(), self.keys.following():
                yield
        finally:
            await self.knowledge.aclose()
            await self.keys.aclose()


def build_gateway(settings: Settings, keys: KeyStore, source: SettingsSource | None = None) -> Gateway:
    """`Gateway.background` closes `keys`. `source`: where the settings came from, to read them again."""
    knowledge = build_knowledge(settings, Router(settings.routing.router_settings))
    data = build_data_plane(settings, knowledge, keys, None, Homes(), Quarantine())

    async def metrics(replicas: Sequence[ReplicaView]) -> bytes:
        in_flight, now = data.public.in_flight, time.monotonic()
        return await asyncio.to_thread(lambda: render(data.telemetry.families(in_flight), replicas, now))

    async def decisions() -> list[DecisionBody]:
        return data.decision_bodies()

    def rates() -> RequestRates:
        per_s, failed_per_s = data.rates.per_s(time.monotonic())
        return RequestRates(data.public.in_flight, len(data.admission), per_s, failed_per_s)

    def apply(new: Settings) -> None:
        knowledge.apply(new)
        data.apply(new)

    stopping = asyncio.Event()
    insight = Insight(
        metrics=metrics,
        decisions=decisions,
        unready=lambda: "The gateway is stopping." if stopping.is_set() else unready(knowledge.router),
        rates=rates,
    )
    control = build_control_plane(settings, knowledge, keys, insight, data.telemetry, source, apply)
    return Gateway(keys, knowledge, data, control, stopping)


def build_knowledge(settings: Settings, router: Router) -> Knowledge:
    upstream: Upstream = Http1Upstream() if settings.upstream.transport == "native" else HttpxUpstream()
    prompters, cards = Prompters(), ModelCards()
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
    return Knowledge(
        router=router,
        watcher=Watcher(router, upstream, prompters, cards, clock=time.monotonic, probes=settings.probes.rules),
        upstream=upstream,
        prompters=prompters,
        cards=cards,
        preparer=Preparer(prompters, executor, settings.prompts.escapes),
        aliases=Aliases(settings.aliases),
        executor=executor,
    )


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

    def finished(record: Record) -> None:
        if counts:
            telemetry.finished(record)
        if access_log is not None:
            access_log.finished(record)
        tracer.finished(record)
        rates.count(record.status >= 500, record.started_at + record.duration_s)
        if record.decision is not None:
            decisions.append(record)

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
                unix_time=lambda moment: moment + time.time() - clock(),
            )
        ),
        router=knowledge.router,
        access=Access(
            authenticator=authenticator,
            rules=limit_rules(settings),
            limiter=limiter,
            salt_for=lambda group: keys.ring.salt_for(group),
        ),
        cards=knowledge.cards,
        aliases=knowledge.aliases,
        preparer=knowledge.preparer,
        tokenizing=Tokenizing(knowledge.prompters, knowledge.cards, knowledge.executor),
        homes=homes,
        dispatcher=dispatcher,
        tenants={name: tenant.standing for name, tenant in settings.tenants.items()},
        max_body_bytes=settings.server.max_body_bytes,
        clock=clock,
        begin_trace=tracer.begin,
        on_finish=finished,
    )
    return DataPlane(hot_path, dispatcher, admission, limiter, telemetry, tracer, access_log, decisions, rates)


def build_control_plane(
    settings: Settings,
    knowledge: Knowledge,
    keys: KeyStore,
    insight: Insight,
    telemetry: Telemetry,
    source: SettingsSource | None,
    apply: Callable[[Settings], None],
) -> ControlPlane:
    """`insight`: of the data planes, in this process or in others. `telemetry`: of this process. `apply`: what new settings
    change beside the replicas.
    """
    router, watcher = knowledge.router, knowledge.watcher
    registry = Registry(
        router,
        lease_s=settings.leases.lease_s,
        forget_after_s=settings.leases.forget_after_s,
        start_watch=watcher.start,
        stop_watch=watcher.stop,
    )
    explainer = _Explainer(
        router,
        settings.admission.max_wait_s,
        knowledge.aliases,
        knowledge.preparer,
        keys,
        PUBLIC_GROUP if settings.server.open else _DEFAULT_GROUP,
        random.random,
    )

    def apply_all(new: Settings) -> None:
        apply(new)
        registry.configure(lease_s=new.leases.lease_s, forget_after_s=new.leases.forget_after_s)
        registry.set_static(_static(new), time.monotonic())
        keys.give(given_keys(new))

    def faults_of(new: Settings) -> list[str]:
        faults = [f"replicas: {fault}" for fault in registry.faults_of(_static(new))]
        try:
            keys.given_records(given_keys(new))
        except KeyStoreError as error:
            faults.append(f"keys.static: {error}")
        return faults

    reloader = Reloader(
        settings,
        source or SettingsSource(load=lambda: settings),
        faults_of=faults_of,
        apply=apply_all,
    )
    telemetry.register(
        "counter",
        "warmpath_config_reloads",
        "Attempts to read the settings again.",
        ("result",),
        lambda: {(result,): count for result, count in reloader.results.items()},
    )
    telemetry.register(
        "counter",
        "warmpath_health_transitions",
        "Times that a replica turned up or down, by its probes or its event stream.",
        ("model", "to"),
        lambda: {(model, to): count for (model, to), count in list(watcher.transitions.items())},
    )
    live = Live(lambda: (replica_bodies(context), insight.rates()), time.time)
    context = AdminContext(
        current_settings=lambda: reloader.settings,
        reload=reloader.reload,
        cards=knowledge.cards,
        aliases=knowledge.aliases,
        live=live,
        keys=keys,
        router=router,
        registry=registry,
        insight=insight,
        resolve=resolve_host,
        explain=explainer.explain,
        clock=time.monotonic,
        wall_clock=time.time,
        version=importlib.metadata.version("warmpath"),
    )
    return ControlPlane(registry, admin_app(context), reloader, live)


def _static(settings: Settings) -> dict[str, ReplicaSpec]:
    return {replica.replica_id: replica.spec for replica in settings.replicas}


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


def _count_nothing(model: str, value: object) -> None:
    """Where metrics are off."""


@dataclass(frozen=True, slots=True)
class _Explainer:
    router: Router
    max_wait_s: float
    aliases: Aliases
    preparer: Preparer
    keys: KeyStore
    default_group: str
    draw: Callable[[], float]

    async def explain(self, body: bytes, group: str | None) -> tuple[Decision, bool]:
        """Where a request with this body would go now, and whether it would wait before, because every replica is saturated;
        nothing is sent or promised. Raises `ApiError`.
        """
        request = self.aliases.resolve(parse_request(_endpoint_of(body), body, open_access=True))
        pool = self.router.pool(request.model)
        if pool is None:
            raise unroutable(self.router.unserved(), request.model)
        prompt = await self.preparer.prepare(request, pool, self.keys.salt_for(group or self.default_group))
        now = time.monotonic()
        decision = self.router.route(prompt.query(request), now, self.draw())
        if isinstance(decision, Unroutable):
            raise unroutable(decision, request.model)
        return decision, self.router.is_saturated(decision, self.max_wait_s, now)


class _Shape(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _endpoint_of(body: bytes) -> Endpoint:
    """Where clients would send it; what is no object at all is refused by whoever parses it next."""
    try:
        is_chat = msgspec.json.decode(body, type=_Shape).messages is not msgspec.UNSET
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        is_chat = False
    return "/v1/chat/completions" if is_chat else "/v1/completions"


def unready(router: Router) -> str | None:
    if any(replica.healthy for replica in router.replicas()):
        return None
    return "No replica is healthy."


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


async def run_gateway(settings: Settings, source: SettingsSource) -> None:
    """Serve in this one process until SIGINT or SIGTERM; SIGHUP reads the settings again.

    Raises OSError for a port in use, `KeyStoreError`.
    """
    raise_descriptor_limit()
    with (
        listening(settings.server.host, settings.server.port) as public_socket,
        listening(settings.admin.host, settings.admin.port) as admin_socket,
    ):
        gateway = build_gateway(settings, await open_key_store(settings), source)
        await first_keys(gateway.keys, is_open=settings.server.open)
        public = client_server(settings, gateway.data)
        admin = make_server(gateway.admin, Listener(descriptor_share=ADMIN_SHARE), 0.0)

        def stop() -> None:
            gateway.stopping.set()
            gateway.live.close()
            if public.is_stopping:
                admin.force_exit = True
            public.stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, gateway.reloader.ask)
        _log.info(
            "serving http://%s:%d/v1, admin http://%s:%d",
            *public_socket.getsockname()[:2],
            *admin_socket.getsockname()[:2],
        )
        spare_collections()
        keep_freed_memory()
        async with gateway.background():
            serving = asyncio.create_task(admin.serve([admin_socket]))
            try:
                await public.serve(public_socket)
            finally:
                admin.should_exit = True
                await serving


async def first_keys(keys: KeyStore, *, is_open: bool) -> None:
    """Where there are none at all, make them and show them, once."""
    wanted: dict[KeyKind, str] = {"admin": "admin key", "join": "join token for workers", "client": "client key"}
    if is_open:
        del wanted["client"]
    for kind, what in wanted.items():
        if (text := await keys.create_first(kind, name="first")) is not None:
            click.echo(f"{what} (shown this once): {text}")
