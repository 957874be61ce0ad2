"""The composition root: builds every object of a gateway, runs its two listeners, ends all of it in order.

Order of the end: the listeners stop accepting and give running answers `grace_s`; then nothing needs the watcher, the
upstream connections and the thread that tokenizes, and they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import logging
import random
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, cast

import click
import msgspec
import uvicorn
from starlette.types import ASGIApp

from gateway.admin.addresses import resolve_host
from gateway.admin.context import AdminContext
from gateway.admin.registry import Registry
from gateway.admin.routes import admin_app
from gateway.admission import Admission
from gateway.dispatch import Dispatcher, Record
from gateway.failures import unroutable
from gateway.homes import Homes
from gateway.hotpath import PUBLIC_GROUP, Access, HotPath
from gateway.keys import KeyKind, KeyStore
from gateway.limits import RequestLimiter
from gateway.model_cards import ModelCards
from gateway.openai import Endpoint, parse_request
from gateway.prepare import Preparer, Prompters
from gateway.public import public_app
from gateway.server.listener import ADMIN_SHARE, Listener, raise_descriptor_limit
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from gateway.tokenizing import Tokenizing
from gateway.upstream.contract import Timeouts
from gateway.upstream.http1 import Http1Upstream
from gateway.watch import Watcher
from router import Decision, Router, Unroutable

__all__ = ["Gateway", "build_gateway", "run_gateway"]

_log = logging.getLogger("warmpath.gateway")

_EXPIRE_EVERY_S: Final = 1.0
_KEPT_DECISIONS: Final = 256
_DEFAULT_GROUP: Final = "default"
"""Of keys that were made without a tenant."""
_BACKLOG: Final = 2048


@dataclass(frozen=True, slots=True)
class Gateway:
    """A built gateway: two apps, and what runs beside them (`Gateway.background`)."""

    settings: Settings
    public: ASGIApp
    admin: ASGIApp
    keys: KeyStore
    registry: Registry
    watcher: Watcher
    admission: Admission
    upstream: Http1Upstream
    executor: ThreadPoolExecutor

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Watches replicas and ends leases while the block runs."""
        for replica in self.settings.replicas:
            self.registry.add_static(replica.replica_id, replica.spec, time.monotonic())
        expiring = asyncio.create_task(self._expire_leases())
        try:
            yield
        finally:
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)
            await self.admission.aclose()
            await self.watcher.aclose()
            await self.upstream.aclose()
            self.executor.shutdown(wait=False, cancel_futures=True)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            self.registry.expire(time.monotonic())


def build_gateway(settings: Settings) -> Gateway:
    """Raises `KeyStoreError` or OSError when the state folder cannot be used."""
    clock = time.monotonic
    keys = KeyStore.open(settings.state_dir)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
    router = Router(settings.routing.router_settings)
    upstream = Http1Upstream()
    prompters = Prompters()
    preparer = Preparer(prompters, executor, settings.prompts.escapes)
    cards = ModelCards()
    homes = Homes()
    telemetry = Telemetry()
    admission = Admission(
        router,
        settings.admission.gate_settings,
        clock=clock,
        draw=random.random,
        on_wait=telemetry.queue_wait,
        on_refusal=telemetry.queue_refused,
    )
    watcher = Watcher(router, upstream, prompters, cards, clock=clock, on_frame=admission.heard)
    registry = Registry(
        router,
        lease_s=settings.leases.lease_s,
        forget_after_s=settings.leases.forget_after_s,
        start_watch=watcher.start,
        stop_watch=watcher.stop,
    )
    decisions: deque[Record] = deque(maxlen=_KEPT_DECISIONS)

    def finished(record: Record) -> None:
        telemetry.finished(record)
        if record.decision is not None:
            decisions.append(record)

    hot_path = HotPath(
        public_app(
            router,
            cards,
            None if settings.server.open else keys,
            unix_time=lambda moment: moment + time.time() - clock(),
        ),
        router=router,
        access=Access(
            keys=None if settings.server.open else keys,
            limiter=RequestLimiter(settings.limits.requests_per_minute),
            salt_for=keys.salt_for,
        ),
        cards=cards,
        preparer=preparer,
        tokenizing=Tokenizing(prompters, cards, executor),
        homes=homes,
        dispatcher=Dispatcher(
            router,
            upstream,
            homes,
            admission,
            timeouts=Timeouts(
                connect_s=settings.stream.connect_s,
                first_byte_s=settings.stream.first_byte_s,
                idle_s=settings.stream.idle_s,
            ),
            commit_after_s=settings.stream.commit_after_s,
            ping_s=settings.stream.ping_s,
            clock=clock,
            draw=random.random,
            on_gap=telemetry.gap,
            on_failed_try=telemetry.upstream_failed,
        ),
        tenants={name: tenant.standing for name, tenant in settings.tenants.items()},
        max_body_bytes=settings.server.max_body_bytes,
        clock=clock,
        on_finish=finished,
    )
    context = AdminContext(
        settings=settings,
        keys=keys,
        router=router,
        registry=registry,
        telemetry=telemetry,
        resolve=resolve_host,
        explain=_Explainer(
            router, admission, preparer, keys, PUBLIC_GROUP if settings.server.open else _DEFAULT_GROUP, random.random
        ).explain,
        decisions=lambda: list(decisions),
        in_flight=lambda: hot_path.in_flight,
        queues=admission.views,
        unready=lambda: _unready(router),
        clock=clock,
        wall_clock=time.time,
        version=importlib.metadata.version("warmpath"),
    )
    return Gateway(settings, hot_path, admin_app(context), keys, registry, watcher, admission, upstream, executor)


@dataclass(frozen=True, slots=True)
class _Explainer:
    router: Router
    admission: Admission
    preparer: Preparer
    keys: KeyStore
    default_group: str
    draw: Callable[[], float]

    async def explain(self, body: bytes, group: str | None) -> tuple[Decision, bool]:
        """Where a request with this body would go now, and whether it would have to wait before; nothing is sent or promised.
        Raises `ApiError`.
        """
        request = parse_request(_endpoint_of(body), body, open_access=True)
        pool = self.router.pool(request.model)
        if pool is None:
            raise unroutable(self.router.unserved(), request.model)
        prompt = await self.preparer.prepare(request, pool, self.keys.salt_for(group or self.default_group))
        decision = self.router.route(prompt.query(request), time.monotonic(), self.draw())
        if isinstance(decision, Unroutable):
            raise unroutable(decision, request.model)
        return decision, self.admission.would_wait(request.model, decision)


class _Shape(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _endpoint_of(body: bytes) -> Endpoint:
    """Where clients would send it; what is no object at all is refused by whoever parses it next."""
    try:
        is_chat = msgspec.json.decode(body, type=_Shape).messages is not msgspec.UNSET
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        is_chat = False
    return "/v1/chat/completions" if is_chat else "/v1/completions"


def _unready(router: Router) -> str | None:
    if any(replica.healthy for replica in router.replicas()):
        return None
    return "No replica is healthy."


async def run_gateway(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises OSError for a port in use."""
    raise_descriptor_limit()
    with (
        _listen(settings.server.host, settings.server.port) as public_socket,
        _listen(settings.admin.host, settings.admin.port) as admin_socket,
    ):
        gateway = build_gateway(settings)
        _first_keys(gateway.keys, settings)
        grace_s = settings.server.grace_s
        servers = [
            _server(gateway.public, Listener(settings.server.limits), grace_s),
            _server(gateway.admin, Listener(descriptor_share=ADMIN_SHARE), grace_s),
        ]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _ask_to_stop, servers)
        _log.info(
            "serving http://%s:%d/v1, admin http://%s:%d",
            *public_socket.getsockname()[:2],
            *admin_socket.getsockname()[:2],
        )
        _spare_collections()
        async with gateway.background():
            await asyncio.gather(servers[0].serve([public_socket]), servers[1].serve([admin_socket]))


def _spare_collections() -> None:
    """What the start made is never garbage, and the index grows to millions of numbers that a full collection would visit, for
    tens of milliseconds each time. Cycles are few here and young when they die, so the small collections find them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)


def _ask_to_stop(servers: list[uvicorn.Server]) -> None:
    """Asked again, it waits for no answer that still runs."""
    for server in servers:
        server.force_exit = server.should_exit
        server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Two servers share this process, so neither may own its signals; `run_gateway` does."""
        yield


def _server(app: ASGIApp, listener: Listener, grace_s: float) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            app,
            http=cast(Any, listener.protocol),
            proxy_headers=False,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
    )


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror}") from error
    with listening:
        yield listening


def _first_keys(keys: KeyStore, settings: Settings) -> None:
    """Take the keys of the operator's choice; where there are none at all, make them and show them, once."""
    if settings.admin.key is not None:
        keys.adopt(settings.admin.key.get_secret_value(), "admin", name="settings")
    if settings.admin.join_token is not None:
        keys.adopt(settings.admin.join_token.get_secret_value(), "join", name="settings")
    wanted: dict[KeyKind, str] = {"admin": "admin key", "join": "join token for workers", "client": "client key"}
    for kind, what in wanted.items():
        if not keys.usable(kind) and not (kind == "client" and settings.server.open):
            _, text = keys.create(kind, name="first")
            click.echo(f"{what} (shown this once): {text}")
