"""The admin API: replicas, keys, decisions, settings, metrics. Its own listener, on loopback unless the operator says else.

Everything under /admin/v1 needs a key; who needs which stands in `ENDPOINTS`, and `gateway.rest` holds everyone to it. A
replica's join token may register, renew and remove what it registered, nothing else. Health, readiness and metrics need no
key, because probes and Prometheus have none: whoever can reach the listener may read them, and they hold no secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.addresses import AddressNotAllowed, AllowList, Resolve, pinned_url
from gateway.admin_bodies import (
    DecisionList,
    DrainBody,
    DrainRequest,
    ExplanationBody,
    HeartbeatRequest,
    KeyBody,
    KeyList,
    KeyRequest,
    LeaseBody,
    NewKeyBody,
    ReplicaBody,
    ReplicaList,
    ReplicaPatch,
    State,
    decision_body,
    drain_body,
    explanation_body,
    key_body,
    lease_body,
    new_key_body,
    replica_body,
)
from gateway.api_error import ApiError
from gateway.dispatch import Record
from gateway.keys import KeyStore, KeyStoreError
from gateway.registry import (
    InvalidReplica,
    NotHolder,
    Registrant,
    Registry,
    RegistryError,
    ReplicaConflict,
    ReplicaMismatch,
    UnknownReplica,
)
from gateway.rest import Call, Endpoint, Needs, openapi, rest_app
from gateway.settings import Settings
from gateway.telemetry import CONTENT_TYPE, Telemetry
from router import Decision, ReplicaView, Router
from router.wire import ReplicaSpec

__all__ = ["ENDPOINTS", "AdminContext", "admin_app"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """What the admin API works on."""

    settings: Settings
    keys: KeyStore
    router: Router
    registry: Registry
    telemetry: Telemetry
    resolve: Resolve
    explain: Callable[[bytes, str | None], Awaitable[Decision]]
    """Decide for the body of a request, in a sharing group or the default one, and send nothing. Raises `ApiError`."""
    decisions: Callable[[], Sequence[Record]]
    """The requests that ended last."""
    in_flight: Callable[[], int]
    """Requests being answered."""
    unready: Callable[[], str | None]
    """Why the gateway should get no requests now; None when it should."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    wall_clock: Callable[[], float]
    """Unix seconds."""
    version: str

    @property
    def unix_offset(self) -> float:
        """Add it to a monotonic time to get Unix time."""
        return self.wall_clock() - self.clock()

    @property
    def allow_list(self) -> AllowList:
        return self.settings.registry.allow_list


def admin_app(context: AdminContext) -> ASGIApp:
    return rest_app(ENDPOINTS, context, context.keys)


# --- replicas

_REGISTRY_STATUS: Final[dict[type[RegistryError], tuple[int, str]]] = {
    InvalidReplica: (400, "invalid_value"),
    NotHolder: (403, "insufficient_permissions"),
    UnknownReplica: (404, "replica_not_found"),
    ReplicaConflict: (409, "replica_conflict"),
    ReplicaMismatch: (409, "model_mismatch"),
}


def _refusal(error: RegistryError) -> ApiError:
    status, code = _REGISTRY_STATUS[type(error)]
    return ApiError(status, code, str(error))


def _registrant(call: Call) -> Registrant:
    return Registrant(call.caller.id, is_admin=call.caller.kind == "admin")


def _replica_id(context: AdminContext, call: Call) -> str:
    """The id in the path, of a replica that there is."""
    replica_id = call.path["replica_id"]
    if replica_id not in context.registry:
        raise _refusal(UnknownReplica("There is no such replica."))
    return replica_id


def _view(context: AdminContext, replica_id: str) -> ReplicaView:
    return next(view for view in context.router.replicas() if view.id == replica_id)


def _replica(context: AdminContext, view: ReplicaView) -> ReplicaBody:
    lease, drain = context.registry.lease(view.id), context.registry.drain_of(view.id)
    return replica_body(view, lease, drain, context.clock(), context.unix_offset)


async def _put_replica(context: AdminContext, call: Call) -> LeaseBody:
    spec: ReplicaSpec = call.body
    try:
        url = await pinned_url(spec.url, context.allow_list, context.resolve)
    except AddressNotAllowed as error:
        raise ApiError(400, "address_not_allowed", f"{error}.".capitalize(), param="url") from error
    spec = msgspec.structs.replace(spec, url=url)
    try:
        lease = context.registry.put(call.path["replica_id"], spec, _registrant(call), context.clock())
    except RegistryError as error:
        raise _refusal(error) from error
    return lease_body(lease, context.unix_offset)


async def _beat(context: AdminContext, call: Call) -> LeaseBody:
    try:
        lease = context.registry.beat(_replica_id(context, call), call.body.epoch, _registrant(call), context.clock())
    except RegistryError as error:
        raise _refusal(error) from error
    return lease_body(lease, context.unix_offset)


async def _delete_replica(context: AdminContext, call: Call) -> State:
    try:
        context.registry.remove(_replica_id(context, call), _registrant(call))
    except RegistryError as error:
        raise _refusal(error) from error
    return State("removed")


async def _list_replicas(context: AdminContext, call: Call) -> ReplicaList:
    views = sorted(context.router.replicas(), key=lambda view: view.id)
    return ReplicaList([_replica(context, view) for view in views])


async def _get_replica(context: AdminContext, call: Call) -> ReplicaBody:
    return _replica(context, _view(context, _replica_id(context, call)))


async def _patch_replica(context: AdminContext, call: Call) -> ReplicaBody:
    replica_id, patch = _replica_id(context, call), call.body
    context.router.patch(replica_id, weight=patch.weight, cordoned=patch.cordoned)
    return _replica(context, _view(context, replica_id))


async def _drain(context: AdminContext, call: Call) -> DrainBody:
    replica_id, now = _replica_id(context, call), context.clock()
    drain = context.registry.drain(replica_id, call.body.deadline_s, now)
    return drain_body(drain, _view(context, replica_id), now, context.unix_offset)


async def _stop_drain(context: AdminContext, call: Call) -> ReplicaBody:
    replica_id = _replica_id(context, call)
    context.registry.stop_drain(replica_id)
    return _replica(context, _view(context, replica_id))


# --- keys: every change waits for the disk, so it happens in a thread


async def _create_key(context: AdminContext, call: Call) -> NewKeyBody:
    wanted: KeyRequest = call.body
    expires = context.wall_clock() + wanted.expires_in_s if wanted.expires_in_s is not None else None
    try:
        record, text = await asyncio.to_thread(
            context.keys.create,
            wanted.kind,
            name=wanted.name,
            tenant=wanted.tenant,
            group=wanted.group,
            debug=wanted.debug,
            expires=expires,
            requests_per_minute=wanted.requests_per_minute,
        )
    except KeyStoreError as error:
        raise _storage_failed() from error
    return new_key_body(record, text)


async def _list_keys(context: AdminContext, call: Call) -> KeyList:
    return KeyList([key_body(record) for record in context.keys.records()])


async def _revoke_key(context: AdminContext, call: Call) -> KeyBody:
    key_id = call.path["key_id"]
    if [record.id for record in context.keys.usable("admin")] == [key_id]:
        raise ApiError(409, "last_admin_key", "This is the last valid admin key: make another one first.")
    try:
        record = await asyncio.to_thread(context.keys.revoke, key_id)
    except KeyStoreError as error:
        raise _storage_failed() from error
    if record is None:
        raise ApiError(404, "key_not_found", "There is no such key.")
    return key_body(record)


def _storage_failed() -> ApiError:
    return ApiError(500, "storage_failed", "The key store cannot be written; nothing was changed.")


# --- how it decides, how it is


async def _explain(context: AdminContext, call: Call) -> ExplanationBody:
    return explanation_body(await context.explain(bytes(call.body), call.query.get("group")))


async def _decisions(context: AdminContext, call: Call) -> DecisionList:
    offset = context.unix_offset
    return DecisionList(
        [
            decision_body(record, record.decision, offset)
            for record in context.decisions()
            if record.decision is not None
        ]
    )


async def _config(context: AdminContext, call: Call) -> dict[str, Any]:
    return context.settings.model_dump(mode="json")  # secrets are masked


async def _openapi(context: AdminContext, call: Call) -> dict[str, Any]:
    return openapi(ENDPOINTS, title="Warmpath admin API", version=context.version)


async def _health(context: AdminContext, call: Call) -> State:
    return State("ok")


async def _ready(context: AdminContext, call: Call) -> State:
    if (reason := context.unready()) is not None:
        raise ApiError(503, "not_ready", reason, retry_after_s=1.0)
    return State("ready")


async def _metrics(context: AdminContext, call: Call) -> Response:
    replicas, in_flight = context.router.replicas(), context.in_flight()
    text = await asyncio.to_thread(context.telemetry.render, replicas, in_flight)
    return Response(text, headers={"content-type": CONTENT_TYPE})


_REPLICA: Final = "/admin/v1/replicas/{replica_id}"

ENDPOINTS: Final[Sequence[Endpoint[AdminContext]]] = (
    Endpoint(
        method="PUT",
        path=_REPLICA,
        needs=Needs.JOIN,
        summary="Register a replica, or renew its registration",
        handle=_put_replica,
        body=ReplicaSpec,
        answer=LeaseBody,
    ),
    Endpoint(
        method="POST",
        path=f"{_REPLICA}/heartbeat",
        needs=Needs.JOIN,
        summary="Prolong a lease; 404 means register again",
        handle=_beat,
        body=HeartbeatRequest,
        answer=LeaseBody,
        is_logged=False,  # each worker, every few seconds; it is news only when it stops
    ),
    Endpoint(
        method="DELETE",
        path=_REPLICA,
        needs=Needs.JOIN,
        summary="Remove a replica at once; what runs there runs on",
        handle=_delete_replica,
        answer=State,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/replicas",
        needs=Needs.ADMIN,
        summary="List the replicas",
        handle=_list_replicas,
        answer=ReplicaList,
    ),
    Endpoint(
        method="GET",
        path=_REPLICA,
        needs=Needs.ADMIN,
        summary="Show one replica",
        handle=_get_replica,
        answer=ReplicaBody,
    ),
    Endpoint(
        method="PATCH",
        path=_REPLICA,
        needs=Needs.ADMIN,
        summary="Change a replica's weight, or keep requests from it",
        handle=_patch_replica,
        body=ReplicaPatch,
        answer=ReplicaBody,
    ),
    Endpoint(
        method="POST",
        path=f"{_REPLICA}/drain",
        needs=Needs.ADMIN,
        summary="Send a replica nothing new and see how much still runs there; ask again for progress",
        handle=_drain,
        body=DrainRequest,
        answer=DrainBody,
    ),
    Endpoint(
        method="DELETE",
        path=f"{_REPLICA}/drain",
        needs=Needs.ADMIN,
        summary="Take a draining replica back into service",
        handle=_stop_drain,
        answer=ReplicaBody,
    ),
    Endpoint(
        method="POST",
        path="/admin/v1/keys",
        needs=Needs.ADMIN,
        summary="Make a key; its text is shown this once",
        handle=_create_key,
        body=KeyRequest,
        answer=NewKeyBody,
        status=201,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/keys",
        needs=Needs.ADMIN,
        summary="List the keys, without what could open anything",
        handle=_list_keys,
        answer=KeyList,
    ),
    Endpoint(
        method="DELETE",
        path="/admin/v1/keys/{key_id}",
        needs=Needs.ADMIN,
        summary="Revoke a key",
        handle=_revoke_key,
        answer=KeyBody,
    ),
    Endpoint(
        method="POST",
        path="/admin/v1/explain",
        needs=Needs.ADMIN,
        summary="Decide where a request would go, with all candidates, and send nothing",
        handle=_explain,
        body=msgspec.Raw,
        max_body_bytes=4 << 20,
        answer=ExplanationBody,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/decisions",
        needs=Needs.ADMIN,
        summary="How the last requests were routed",
        handle=_decisions,
        answer=DecisionList,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/config",
        needs=Needs.ADMIN,
        summary="The settings in force, secrets masked",
        handle=_config,
        answer=dict[str, Any],
    ),
    Endpoint(
        method="GET",
        path="/openapi.json",
        needs=Needs.NO_KEY,
        summary="This document",
        handle=_openapi,
        answer=dict[str, Any],
    ),
    Endpoint(
        method="GET",
        path="/health",
        needs=Needs.NO_KEY,
        summary="Whether the process lives",
        handle=_health,
        answer=State,
    ),
    Endpoint(
        method="GET",
        path="/ready",
        needs=Needs.NO_KEY,
        summary="Whether the gateway should get requests",
        handle=_ready,
        answer=State,
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        needs=Needs.NO_KEY,
        summary="Metrics for Prometheus",
        handle=_metrics,
        answer=str,
    ),
)
