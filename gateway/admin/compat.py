"""Replicas in the words of other routers, for scripts that were written for those: SMG's ``/workers``, and the older
``/add_worker``, ``/remove_worker`` and ``/list_workers`` of sglang-router and vllm-router.

Shapes and statuses are those that smg 1.13, sglang-router 0.3.2 and vllm-router 0.1.17 give. They need an admin key here, and
what they add is a foreign replica without a lease, behind the same guard of addresses as any that registers. An id is a UUID
made from the URL, so it outlives a restart; a replica's own id and its URL are understood as well.

What has no meaning here is taken and ignored (priority, cost, labels), except where it would change what a worker is: prefill
and decode workers and gRPC are a 400.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from starlette.responses import Response

from gateway.admin.addresses import AddressNotAllowed, pinned_url
from gateway.admin.context import AdminContext
from gateway.admin.registry import InvalidReplica, Registrant, RegistryError, ReplicaConflict, replica_id_of
from gateway.admin.rest import Call, Endpoint
from gateway.api_document import Needs
from router import ReplicaView
from router.wire import ReplicaSpec

__all__ = ["COMPATIBLE_ENDPOINTS"]


class WorkerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str
    model_id: str | None = None
    """By default the first model that it lists."""
    api_key: str = ""
    """Sent to the worker as its bearer token."""
    worker_type: Literal["regular"] = "regular"
    connection_mode: Literal["http", "HTTP", "Http"] = "http"
    runtime_type: str = ""
    provider: str | None = None
    labels: Mapping[str, str] = {}
    priority: int = 50
    cost: float = 1.0
    disable_health_check: Literal[False] = False


class WorkerBody(msgspec.Struct, frozen=True):
    id: str
    url: str
    model_id: str
    worker_type: str
    connection_mode: str
    is_healthy: bool
    status: Literal["ready", "not_ready", "failed", "draining"]
    load: int
    """Requests of this gateway there."""
    priority: int = 50
    cost: float = 1.0


class WorkerStats(msgspec.Struct, frozen=True):
    regular_count: int
    prefill_count: int = 0
    decode_count: int = 0


class WorkerList(msgspec.Struct, frozen=True):
    workers: list[WorkerBody]
    total: int
    stats: WorkerStats


class WorkerAccepted(msgspec.Struct, frozen=True):
    worker_id: str
    url: str
    location: str
    message: str
    status: Literal["accepted"] = "accepted"


class WorkerUrls(msgspec.Struct, frozen=True):
    urls: list[str]


class WorkerRefusal(msgspec.Struct, frozen=True):
    error: str
    code: str


class _Refused(Exception):
    """A `WorkerRefusal` with its status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def _worker_id(view: ReplicaView) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, view.spec.url))


def _worker(view: ReplicaView) -> WorkerBody:
    if view.draining:
        status: Literal["ready", "not_ready", "failed", "draining"] = "draining"
    elif view.mismatch:
        status = "failed"
    else:
        status = "ready" if view.healthy and not view.cordoned else "not_ready"
    return WorkerBody(
        id=_worker_id(view),
        url=view.spec.url,
        model_id=view.spec.model or "unknown",
        worker_type="regular",
        connection_mode="http",
        is_healthy=view.healthy,
        status=status,
        load=view.inflight,
    )


def _find(context: AdminContext, name: str) -> ReplicaView | None:
    """By its UUID, its replica id or its URL."""
    wanted = name.rstrip("/")
    for view in context.router.replicas():
        if wanted in (view.id, view.spec.url, _worker_id(view)):
            return view
    return None


async def _found(context: AdminContext, name: str) -> ReplicaView | None:
    """The same; a URL by name is also found under the address that the name had when the replica was added."""
    view = _find(context, name)
    if view is None and "://" in name:
        with contextlib.suppress(AddressNotAllowed):
            view = _find(context, await pinned_url(name, context.allow_list, context.resolve))
    return view


async def _known(context: AdminContext, call: Call) -> ReplicaView:
    name = call.path["worker_id"]
    view = await _found(context, name)
    if view is None:
        raise _Refused(404, "WORKER_NOT_FOUND", f"Worker {name[:_MAX_TOLD_CHARS]} not found")
    return view


async def _add(context: AdminContext, call: Call, wanted: WorkerRequest) -> ReplicaView:
    try:
        url = await pinned_url(wanted.url, context.allow_list, context.resolve)
    except AddressNotAllowed as error:
        raise _Refused(400, "BAD_REQUEST", f"Invalid value for field 'url': {error}") from error
    if (there := _find(context, url)) is not None:
        raise _Refused(
            409, "WORKER_ALREADY_EXISTS", f"Worker already exists at URL '{url}' with ID {_worker_id(there)}."
        )
    replica_id = replica_id_of(url)
    spec = ReplicaSpec(url=url, model=wanted.model_id or "", kind="openai", credential=wanted.api_key)
    try:
        context.registry.add_by_hand(replica_id, spec, Registrant(call.caller.id, is_admin=True), context.clock())
    except InvalidReplica as error:
        raise _Refused(400, "BAD_REQUEST", str(error)) from error
    except RegistryError as error:
        code = "WORKER_ALREADY_EXISTS" if isinstance(error, ReplicaConflict) else "MODEL_MISMATCH"
        raise _Refused(409, code, str(error)) from error
    return _view(context, replica_id)


def _view(context: AdminContext, replica_id: str) -> ReplicaView:
    return next(view for view in context.router.replicas() if view.id == replica_id)


def _remove(context: AdminContext, call: Call, view: ReplicaView) -> None:
    context.registry.remove(view.id, Registrant(call.caller.id, is_admin=True))


def _json(status: int, value: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value),
        status,
        {"cache-control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def _refusal(error: _Refused) -> Response:
    return _json(error.status, WorkerRefusal(str(error), error.code))


def _accepted(view: ReplicaView, message: str, headers: Mapping[str, str] | None = None) -> Response:
    worker_id = _worker_id(view)
    return _json(202, WorkerAccepted(worker_id, view.spec.url, f"/workers/{worker_id}", message), headers)


# --- SMG's


async def _list_workers(context: AdminContext, call: Call) -> WorkerList:
    workers = [_worker(view) for view in sorted(context.router.replicas(), key=lambda view: view.id)]
    return WorkerList(workers, len(workers), WorkerStats(regular_count=len(workers)))


async def _post_worker(context: AdminContext, call: Call) -> Response:
    try:
        view = await _add(context, call, call.body)
    except _Refused as error:
        return _refusal(error)
    return _accepted(
        view,
        "Worker is added; it takes requests once it is found healthy",
        {"location": f"/workers/{_worker_id(view)}"},
    )


async def _get_worker(context: AdminContext, call: Call) -> Response:
    try:
        return _json(200, _worker(await _known(context, call)))
    except _Refused as error:
        return _refusal(error)


async def _delete_worker(context: AdminContext, call: Call) -> Response:
    try:
        view = await _known(context, call)
    except _Refused as error:
        return _refusal(error)
    _remove(context, call, view)
    return _accepted(view, "Worker is removed")


# --- the older ones


async def _list_urls(context: AdminContext, call: Call) -> WorkerUrls:
    return WorkerUrls(sorted(view.spec.url for view in context.router.replicas()))


async def _add_url(context: AdminContext, call: Call) -> Response:
    url = call.query.get("url", "")
    try:
        view = await _add(context, call, WorkerRequest(url=url))
    except _Refused as error:
        return _text(400, str(error))
    return _text(200, f"Successfully added worker: {view.spec.url}")


async def _remove_url(context: AdminContext, call: Call) -> Response:
    url = call.query.get("url", "")
    view = await _found(context, url) if url else None
    if view is None:
        return _text(404, "There is no worker at this URL.")
    _remove(context, call, view)
    return _text(200, f"Successfully removed worker: {view.spec.url}")


def _text(status: int, text: str) -> Response:
    return Response(text, status, {"cache-control": "no-store"}, media_type="text/plain")


_MAX_TOLD_CHARS: Final = 200
_URL: Final = {"url": "of the worker"}


COMPATIBLE_ENDPOINTS: Final[Sequence[Endpoint[AdminContext]]] = (
    Endpoint(
        method="GET",
        path="/workers",
        needs=Needs.ADMIN,
        summary="List the replicas, as SMG does",
        handle=_list_workers,
        answer=WorkerList,
    ),
    Endpoint(
        method="POST",
        path="/workers",
        needs=Needs.ADMIN,
        summary="Add a replica, as SMG does",
        handle=_post_worker,
        body=WorkerRequest,
        answer=WorkerAccepted,
        status=202,
        refusal=WorkerRefusal,
    ),
    Endpoint(
        method="GET",
        path="/workers/{worker_id:path}",
        needs=Needs.ADMIN,
        summary="Show one replica by its UUID, id or URL, as SMG does",
        handle=_get_worker,
        answer=WorkerBody,
        refusal=WorkerRefusal,
    ),
    Endpoint(
        method="DELETE",
        path="/workers/{worker_id:path}",
        needs=Needs.ADMIN,
        summary="Remove a replica, as SMG does",
        handle=_delete_worker,
        answer=WorkerAccepted,
        status=202,
        refusal=WorkerRefusal,
    ),
    Endpoint(
        method="GET",
        path="/list_workers",
        needs=Needs.ADMIN,
        summary="URLs of the replicas, as vllm-router tells them",
        handle=_list_urls,
        answer=WorkerUrls,
    ),
    Endpoint(
        method="POST",
        path="/add_worker",
        needs=Needs.ADMIN,
        summary="Add a replica, as vllm-router does",
        handle=_add_url,
        answer=str,
        query=_URL,
        refusal=str,
    ),
    Endpoint(
        method="POST",
        path="/remove_worker",
        needs=Needs.ADMIN,
        summary="Remove a replica, as vllm-router does",
        handle=_remove_url,
        answer=str,
        query=_URL,
        refusal=str,
    ),
)
