"""What the client listener serves beside the hot path: the list of models, liveness, and a true 404 for the rest."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.hotpath import ENDPOINTS, authenticate
from gateway.keys import KeyStore
from gateway.openai import ApiError, model_body, model_list_body
from gateway.rest import answer_error, answer_framework_error, with_request_id
from router import Router

__all__ = ["public_app"]


def public_app(router: Router, keys: KeyStore | None, unix_time: Callable[[float], float]) -> ASGIApp:
    """`keys`: None when the gateway is open. `unix_time`: of a time on the router's clock."""

    async def list_models(request: Request) -> Response:
        authenticate(keys, request.scope)
        pools = filter(None, map(router.pool, router.models()))
        return _json(model_list_body((pool.model, unix_time(pool.created)) for pool in pools))

    async def show_model(request: Request) -> Response:
        authenticate(keys, request.scope)
        model: str = request.path_params["model"]
        pool = router.pool(model)
        if pool is None:
            raise ApiError(404, "model_not_found", f"The model '{model}' does not exist.", param="model")
        return _json(model_body(pool.model, unix_time(pool.created)))

    app = Starlette(
        routes=[
            Route("/v1/models", list_models),
            Route("/v1/models/{model:path}", show_model),
            Route("/health", _health),
            *(Route(path, _only_post, methods=["POST"]) for path in ENDPOINTS),
        ],
        exception_handlers={ApiError: answer_error, HTTPException: answer_framework_error},
    )
    app.router.redirect_slashes = False
    return with_request_id(app)


async def _health(_: Request) -> Response:
    return Response(b"ok", media_type="text/plain")


async def _only_post(_: Request) -> Response:
    """Never called: the hot path takes its POSTs first. It is here so that other methods get a 405, not a 404."""
    raise AssertionError


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
