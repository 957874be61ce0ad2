"""How the gateway decides and how it is: explain, decisions, models, settings, live state, health, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response

from gateway.admin.bodies import (
    ChangeEvent,
    DecisionList,
    ExplanationBody,
    ModelList,
    ReloadBody,
    State,
    StateEvent,
    explanation_body,
    model_body,
)
from gateway.admin.context import AdminContext
from gateway.admin.live import ServerSentEvents
from gateway.admin.rest import Call, Endpoint
from gateway.api_document import Needs
from gateway.api_error import ApiError
from gateway.settings_loader import SettingsError
from gateway.telemetry import CONTENT_TYPE
from router import ReplicaView

__all__ = ["INSIGHT_ENDPOINTS"]


_REPLICAS_A_TURN: Final = 128
"""Half a millisecond."""


async def _explain(context: AdminContext, call: Call) -> ExplanationBody:
    decision, queued = await context.explain(bytes(call.body), call.query.get("group"))
    return explanation_body(decision, queued=queued)


async def _decisions(context: AdminContext, call: Call) -> DecisionList:
    return DecisionList(list(await context.insight.decisions()))


async def _config(context: AdminContext, call: Call) -> dict[str, Any]:
    return context.settings.model_dump(mode="json")  # secrets are masked


async def _reload(context: AdminContext, call: Call) -> ReloadBody:
    try:
        plan = await context.reload()
    except SettingsError as error:
        raise ApiError(400, "invalid_settings", "Nothing was changed. " + "; ".join(error.faults)) from error
    return ReloadBody(plan.changed, plan.needs_restart)


async def _models(context: AdminContext, call: Call) -> ModelList:
    views = context.router.replicas()
    pools = filter(None, map(context.router.pool, sorted(context.router.models())))
    return ModelList(
        [
            model_body(
                pool,
                [view for view in views if view.spec.model == pool.model],
                context.aliases.of(pool.model),
                context.cards.max_model_len(pool.model),
            )
            for pool in pools
        ]
    )


async def _events(context: AdminContext, call: Call) -> ServerSentEvents:
    return ServerSentEvents(context.live)


async def _health(context: AdminContext, call: Call) -> State:
    return State("ok")


async def _ready(context: AdminContext, call: Call) -> State:
    if (reason := context.insight.unready()) is not None:
        raise ApiError(503, "not_ready", reason, retry_after_s=1.0)
    return State("ready")


async def _metrics(context: AdminContext, call: Call) -> Response:
    replicas: list[ReplicaView] = []
    for replica in context.router.each_replica():
        replicas.append(replica)
        if len(replicas) % _REPLICAS_A_TURN == 0:
            await asyncio.sleep(0)
    return Response(await context.insight.metrics(replicas), headers={"content-type": CONTENT_TYPE})


INSIGHT_ENDPOINTS: Final[Sequence[Endpoint[AdminContext]]] = (
    Endpoint(
        method="POST",
        path="/admin/v1/explain",
        needs=Needs.ADMIN,
        summary="Decide where a request would go, with all candidates, and send nothing",
        handle=_explain,
        failures=(503,),
        query={"group": "the sharing group of whoever asks; by default the one of keys without a tenant"},
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
        method="POST",
        path="/admin/v1/reload",
        needs=Needs.ADMIN,
        summary="Read the settings again: all of them are swapped, or with a fault none",
        handle=_reload,
        answer=ReloadBody,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/models",
        needs=Needs.ADMIN,
        summary="The models, their other names and the replicas that serve them",
        handle=_models,
        answer=ModelList,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/events",
        needs=Needs.ADMIN,
        summary="The replicas and the rate of requests, now and as they change, as server-sent events",
        handle=_events,
        failures=(503,),
        answer=StateEvent | ChangeEvent,
        media="text/event-stream",
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
        failures=(503,),
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
