"""Replicas: to register, renew, list, change, drain and remove them. A join token may do so with what it registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.admin.addresses import AddressNotAllowed, pinned_url
from gateway.admin.bodies import (
    DrainBody,
    DrainRequest,
    HeartbeatRequest,
    LeaseBody,
    ReplicaBody,
    ReplicaList,
    ReplicaPatch,
    ReplicaRequest,
    State,
    drain_body,
    lease_body,
    replica_body,
)
from gateway.admin.context import AdminContext
from gateway.admin.registry import (
    InvalidReplica,
    NotHolder,
    Registrant,
    RegistryError,
    ReplicaConflict,
    ReplicaMismatch,
    UnknownReplica,
    replica_id_of,
)
from gateway.admin.rest import Call, Endpoint
from gateway.api_document import Needs
from gateway.api_error import ApiError
from router import ReplicaView
from router.wire import ReplicaSpec

__all__ = ["REPLICA_ENDPOINTS", "replica_bodies"]


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


async def _checked_url(context: AdminContext, url: str) -> str:
    try:
        return await pinned_url(url, context.allow_list, context.resolve)
    except AddressNotAllowed as error:
        raise ApiError(400, "address_not_allowed", f"{error}.".capitalize(), param="url") from error


async def _add_replica(context: AdminContext, call: Call) -> ReplicaBody:
    wanted: ReplicaRequest = call.body
    url = await _checked_url(context, wanted.url)
    replica_id = wanted.id if wanted.id is not None else replica_id_of(url)
    spec = ReplicaSpec(
        url=url, model=wanted.model, kind="openai", credential=wanted.credential, priority=wanted.priority
    )
    try:
        context.registry.add_by_hand(replica_id, spec, _registrant(call), context.clock())
    except RegistryError as error:
        raise _refusal(error) from error
    return _replica(context, _view(context, replica_id))


async def _put_replica(context: AdminContext, call: Call) -> LeaseBody:
    spec: ReplicaSpec = call.body
    spec = msgspec.structs.replace(spec, url=await _checked_url(context, spec.url))
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
    replica_id, who = _replica_id(context, call), _registrant(call)
    if who.is_admin and call.query.get("force") != "true":
        _require_another(context, replica_id)
    try:
        context.registry.remove(replica_id, who)
    except RegistryError as error:
        raise _refusal(error) from error
    return State("removed")


def replica_bodies(context: AdminContext) -> list[ReplicaBody]:
    """All replicas as they are now, by id."""
    return [_replica(context, view) for view in sorted(context.router.replicas(), key=lambda view: view.id)]


def _require_another(context: AdminContext, replica_id: str) -> None:
    """An operator's slip shall not end a service. A replica that says goodbye itself is asked nothing: it ends anyway."""
    view = _view(context, replica_id)
    serving = [other.id for other in context.router.replicas() if other.spec.model == view.spec.model and other.healthy]
    if serving == [replica_id]:
        raise ApiError(
            409,
            "last_replica",
            f"No other replica of '{view.spec.model}' is healthy. Add ?force=true to end its service all the same.",
        )


async def _list_replicas(context: AdminContext, call: Call) -> ReplicaList:
    return ReplicaList(replica_bodies(context))


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


_REPLICA: Final = "/admin/v1/replicas/{replica_id}"

REPLICA_ENDPOINTS: Final[Sequence[Endpoint[AdminContext]]] = (
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
        is_audited=False,  # each worker, every few seconds; it is news only when it stops
    ),
    Endpoint(
        method="DELETE",
        path=_REPLICA,
        needs=Needs.JOIN,
        summary="Remove a replica at once; what runs there runs on",
        handle=_delete_replica,
        query={"force": "'true' removes the last healthy replica of a model as well"},
        answer=State,
    ),
    Endpoint(
        method="POST",
        path="/admin/v1/replicas",
        needs=Needs.ADMIN,
        summary="Add an OpenAI-compatible server by hand, without a lease",
        handle=_add_replica,
        body=ReplicaRequest,
        answer=ReplicaBody,
        status=201,
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
)
