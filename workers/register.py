"""Makes a replica known to its gateways and keeps it so: register, beat, and say goodbye.

One task a gateway, so that a dead one holds up nobody. A gateway that forgot us (it restarted, or our lease ran out)
answers a beat with 404, and we register again. Whatever else goes wrong is tried again for as long as the replica lives;
the log says when a state changes, never that it is still the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec

from router.wire import ReplicaSpec

__all__ = ["Pace", "Registration", "registered"]

_log = logging.getLogger(__name__)

_CALL_FAILED: Final = (httpx.HTTPError, httpx.InvalidURL, ValueError)
"""ValueError: a token or an address that no request can carry. It stops nothing: the other gateways are fine."""

REQUEST_TIMEOUT_S: Final = 5.0
GOODBYE_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to try."""

    beat_s: float = 5.0
    """At most; a short lease asks for more."""
    retry_min_s: float = 0.25
    retry_max_s: float = 0.5
    """A gateway that restarts serves nobody until its replicas are back, and a call in vain costs nothing."""


_BEATS_PER_LEASE: Final = 3
"""So that two may be lost."""


class _Lease(msgspec.Struct):
    """What is read of a gateway's answer."""

    lease_s: float = math.inf


@dataclass(frozen=True, slots=True)
class _Fault:
    text: str
    status: int | None = None
    """None: no answer came."""


class Registration:
    """One replica at one gateway."""

    def __init__(
        self, *, gateway: str, replica_id: str, spec: ReplicaSpec, join_token: str, pace: Pace = Pace()
    ) -> None:
        self._url = f"{gateway.rstrip('/')}/admin/v1/replicas/{replica_id}"
        self._gateway = gateway
        self._record = msgspec.json.encode(spec)
        self._beat = msgspec.json.encode({"epoch": spec.epoch})
        self._headers = {"authorization": f"Bearer {join_token}", "content-type": "application/json"}
        self._pace = pace
        self._fault: _Fault | None = None
        self._is_registered = False
        self._lease_s = math.inf
        self._due = asyncio.Event()

    def beat_soon(self) -> None:
        """Without waiting for the next beat: the gateway may have restarted."""
        self._due.set()

    async def run(self, http: httpx.AsyncClient) -> None:
        """Never returns: register until it works, then beat until told to register again."""
        retry_s = self._pace.retry_min_s
        while True:
            if await (self._send_beat(http) if self._is_registered else self._register(http)):
                retry_s = self._pace.retry_min_s
                await self._wait_for_beat()
            else:
                # Jitter, so that the replicas of a gateway that comes back do not arrive as one.
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311
                retry_s = min(retry_s * 2, self._pace.retry_max_s)

    async def _wait_for_beat(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._pace.beat_s, self._lease_s / _BEATS_PER_LEASE)):
                await self._due.wait()
        self._due.clear()

    async def leave(self, http: httpx.AsyncClient) -> None:
        """Best effort: the lease ends the registration in any case."""
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await http.delete(self._url, headers=self._headers)
        except (*_CALL_FAILED, TimeoutError) as error:
            _log.info("gateway %s: not told that we leave (%s)", self._gateway, _reason(error))

    async def _register(self, http: httpx.AsyncClient) -> bool:
        fault = await self._call(http, "PUT", self._url, self._record)
        self._note("cannot register", fault)
        if fault is None:
            self._is_registered = True
            _log.info("gateway %s: registered", self._gateway)
        return fault is None

    async def _send_beat(self, http: httpx.AsyncClient) -> bool:
        fault = await self._call(http, "POST", f"{self._url}/heartbeat", self._beat)
        if fault is not None and fault.status == 404:
            self._is_registered = False
            _log.info("gateway %s: does not know us any more", self._gateway)
            return await self._register(http)
        self._note("heartbeat fails", fault)
        return fault is None

    async def _call(self, http: httpx.AsyncClient, method: str, url: str, body: bytes) -> _Fault | None:
        try:
            answer = await http.request(method, url, content=body, headers=self._headers)
        except _CALL_FAILED as error:
            return _Fault(_reason(error))
        if not answer.is_success:
            return _Fault(answer.text[:200], answer.status_code)
        self._lease_s = _lease_s(answer.content)
        return None

    def _note(self, what: str, fault: _Fault | None) -> None:
        if fault == self._fault:
            return
        if fault is not None:
            _log.warning("gateway %s: %s: %s %s", self._gateway, what, fault.status or "", fault.text)
        elif self._is_registered:
            _log.info("gateway %s: heartbeat works again", self._gateway)
        self._fault = fault


@contextlib.asynccontextmanager
async def registered(registrations: Sequence[Registration]) -> AsyncIterator[None]:
    """Registers at all gateways in the background while the block runs; leaves them when it ends."""
    # Without the environment's proxies: a gateway is a neighbour.
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(registration.run(http)) for registration in registrations]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
        await asyncio.gather(*(registration.leave(http) for registration in registrations))


def _lease_s(answer: bytes) -> float:
    """How long the gateway keeps us without a beat; infinity when it does not say."""
    try:
        lease_s = msgspec.json.decode(answer, type=_Lease).lease_s
    except (msgspec.MsgspecError, RecursionError):
        return math.inf
    return lease_s if lease_s > 0 else math.inf


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
