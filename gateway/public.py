"""What the client listener serves beside the hot path: the list of models, liveness, and a true 404 for the rest.

`gateway.public_operations` describes every route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.admin.rest import answer_error, answer_framework_error, with_request_id
from gateway.aliases import Aliases
from gateway.api_error import ApiError
from gateway.authentication import Authenticator
from gateway.failures import unroutable
from gateway.hotpath import authenticate
from gateway.keys import KeyRecord
from gateway.model_cards import ModelCards
from gateway.openai import ENDPOINTS
from router import Router, Unroutable

__all__ = ["public_app", "public_routes"]


def public_routes(
    router: Router,
    cards: ModelCards,
    aliases: Aliases,
    authenticator: Authenticator | None,
    unix_time: Callable[[float], float],
) -> list[Route]:
    """`authenticator`: None when the gateway is open. `unix_time`: of a time on the router's clock."""

    def entry(name: str) -> dict[str, Any] | None:
        pool = router.pool(aliases.target(name))
        return cards.entry(pool.model, unix_time(pool.created), name) if pool is not None else None

    def names() -> list[str]:
        """Models, each with its other names behind it."""
        return [
            name
            for model in router.models()
            for name in (*(() if aliases.hides(model) else (model,)), *aliases.of(model))
        ]

    def is_shown(model: str, key: KeyRecord | None) -> bool:
        return key is None or key.may_ask(model)

    async def list_models(request: Request) -> Response:
        key = authenticate(authenticator, request.scope, "models")
        shown = (entry(name) for name in names() if is_shown(name, key))
        return _json({"object": "list", "data": list(filter(None, shown))})

    async def show_model(request: Request) -> Response:
        key = authenticate(authenticator, request.scope, "models")
        model: str = request.path_params["model"]
        found = entry(model) if is_shown(model, key) else None
        if found is None:
            raise unroutable(Unroutable("model_not_found"), model)
        return _json(found)

    async def no_response(request: Request) -> Response:
        """The hot path takes the calls for ids that can be some."""
        authenticate(authenticator, request.scope, "responses")
        raise ApiError(404, "response_not_found", "There is no such response.")

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", show_model),
        Route("/v1/responses/{id}", no_response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", no_response, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", no_response),
        Route("/health", _health),
        *(Route(path, _only_post, methods=["POST"]) for path in sorted(ENDPOINTS)),
    ]


def public_app(routes: Sequence[Route]) -> ASGIApp:
    app = Starlette(routes=routes, exception_handlers={ApiError: answer_error, HTTPException: answer_framework_error})
    app.router.redirect_slashes = False
    return with_request_id(app)


async def _health(_: Request) -> Response:
    return Response(b"ok", media_type="text/plain")


async def _only_post(_: Request) -> Response:
    """Never called: the hot path takes its POSTs first. It is here so that other methods get a 405, not a 404."""
    raise AssertionError


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
