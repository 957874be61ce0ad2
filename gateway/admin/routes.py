"""The admin API: replicas, keys, decisions, settings, metrics. Its own listener, on loopback unless the operator says else.

Everything under /admin/v1, and what speaks as other routers do (`gateway.admin.compat`), needs a key; who needs which stands in
`ENDPOINTS`, and `gateway.admin.rest` holds everyone to it. A replica's join token may register, renew and remove what it
registered, nothing else. Health, readiness and metrics need no key, because probes and Prometheus have none: whoever can
reach the listener may read them, and they hold no secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Literal

from starlette.types import ASGIApp

from gateway.admin.compat import COMPATIBLE_ENDPOINTS
from gateway.admin.context import AdminContext
from gateway.admin.insight import INSIGHT_ENDPOINTS
from gateway.admin.key_routes import KEY_ENDPOINTS
from gateway.admin.replicas import REPLICA_ENDPOINTS
from gateway.admin.rest import Call, Endpoint, rest_app
from gateway.api_document import Needs, openapi
from gateway.authentication import Authenticator
from gateway.public_operations import PUBLIC_OPERATIONS

__all__ = ["ENDPOINTS", "admin_app"]


async def _openapi(context: AdminContext, call: Call) -> dict[str, Any]:
    return _document("admin", context.version)


async def _public_openapi(context: AdminContext, call: Call) -> dict[str, Any]:
    return _document("public", context.version)


@cache
def _document(listener: Literal["admin", "public"], version: str) -> dict[str, Any]:
    """Made once: it takes 6 ms, and needs no key."""
    if listener == "admin":
        return openapi(ENDPOINTS, title="Warmpath admin API", version=version)
    return openapi(PUBLIC_OPERATIONS, title="Warmpath", version=version)


ENDPOINTS: Final[Sequence[Endpoint[AdminContext]]] = (
    *REPLICA_ENDPOINTS,
    *KEY_ENDPOINTS,
    *INSIGHT_ENDPOINTS,
    *COMPATIBLE_ENDPOINTS,
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
        path="/openapi/public.json",
        needs=Needs.NO_KEY,
        summary="The document of what clients call, on the other listener",
        handle=_public_openapi,
        answer=dict[str, Any],
    ),
)


def admin_app(context: AdminContext) -> ASGIApp:
    authenticator = Authenticator(context.keys, clock=context.clock, wall_clock=context.wall_clock)
    return rest_app(ENDPOINTS, context, authenticator)
