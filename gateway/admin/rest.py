"""A table of endpoints → an ASGI app; `gateway.api_document` makes its OpenAPI document.

Every endpoint says whom it serves; the check, the decoding of bodies and the shape of answers and errors happen here, once,
so that a handler is reached only by those it is for and only with a valid body. A route outside the table cannot exist.

Paths come from the ASGI path alone, never from a URL built with the Host header (CVE-2026-48710), and no redirect is made.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api_document import Needs, Operation
from gateway.api_error import ApiError
from gateway.authentication import Authenticator
from gateway.json_body import decode_object
from gateway.keys import KeyRecord
from gateway.server.asgi import read_body
from gateway.server.exchange import ClientGone
from gateway.server.headers import header, request_id, require_json
from gateway.server.reply import error_headers

__all__ = [
    "Call",
    "Endpoint",
    "answer_error",
    "answer_framework_error",
    "rest_app",
    "with_request_id",
]

_audit_log = logging.getLogger("warmpath.audit")

_MAX_TARGET_CHARS: Final = 200

_BODY_S: Final = 10.0
"""How long a body may take to arrive."""

Context = TypeVar("Context")


@dataclass(frozen=True, slots=True)
class Call:
    """A request that may be answered."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Any
    """Of the endpoint's type; None where it takes none."""
    key: KeyRecord | None
    """None only where no key is needed."""
    idempotency_key: bytes | None = None
    """As the caller sent it."""

    @property
    def caller(self) -> KeyRecord:
        assert self.key is not None
        return self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Operation, Generic[Context]):
    handle: Callable[[Context, Call], Awaitable[object]]
    """Gives a value of type `answer`, or a whole `Response`; raises `ApiError`."""
    max_body_bytes: int = 64 << 10
    is_audited: bool = True
    """Whether the log says who called it, and what came of it; GETs never are."""


def rest_app(endpoints: Sequence[Endpoint[Context]], context: Context, authenticator: Authenticator) -> ASGIApp:
    by_path: dict[str, dict[str, Endpoint[Context]]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    app = Starlette(
        routes=[
            Route(path, _guarded(methods, context, authenticator), methods=list(methods))
            for path, methods in by_path.items()
        ],
        exception_handlers={
            ApiError: answer_error,
            HTTPException: answer_framework_error,
            ClientGone: _answer_nobody,
            Exception: _answer_bug,
        },
    )
    app.router.redirect_slashes = False
    return with_request_id(app)


def _guarded(
    methods: Mapping[str, Endpoint[Context]], context: Context, authenticator: Authenticator
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        endpoint = methods["GET" if request.method == "HEAD" else request.method]
        key = _authorize(endpoint.needs, authenticator, request.scope)
        audit = _Audit(endpoint, request, key) if key and endpoint.method != "GET" and endpoint.is_audited else None
        try:
            body = await _read_body(endpoint, request) if endpoint.body is not None else None
            idempotency_key = header(request.scope, b"idempotency-key")
            call = Call(request.path_params, request.query_params, body, key, idempotency_key)
            answer = await endpoint.handle(context, call)
        except ApiError as error:
            if audit is not None:
                audit.write(error.status, error.code)
            raise
        if not isinstance(answer, Response):
            answer = _json(endpoint.status, msgspec.json.encode(answer))
        if audit is not None:
            audit.write(answer.status_code)
        return answer

    return answer


class _Audit:
    """One line of JSON for each change that somebody with a key asked for: who, what, to what, and what came of it.

    Bodies and queries are not in it, because they hold secrets; names from paths are, escaped and cut.
    """

    def __init__(self, endpoint: Endpoint[Any], request: Request, key: KeyRecord) -> None:
        self._line: dict[str, object] = {
            "key_id": key.id,
            "key_kind": key.kind,
            "action": f"{endpoint.method} {endpoint.path}",
            "target": {name: str(value)[:_MAX_TARGET_CHARS] for name, value in request.path_params.items()},
        }

    def write(self, status: int, code: str = "") -> None:
        _audit_log.info("%s", json.dumps({**self._line, "status": status, **({"code": code} if code else {})}))


def _authorize(needs: Needs, authenticator: Authenticator, scope: Scope) -> KeyRecord | None:
    if needs is Needs.NO_KEY:
        return None
    key = authenticator.any(scope)
    if key.kind not in needs.value:
        raise ApiError(403, "insufficient_permissions", f"A key of kind '{key.kind}' may not do this.")
    return key


async def _read_body(endpoint: Endpoint[Context], request: Request) -> object:
    require_json(request.scope)
    try:
        async with asyncio.timeout(_BODY_S):
            data = await read_body(request.scope, request.receive, endpoint.max_body_bytes)
    except TimeoutError as error:
        raise ApiError(408, "request_timeout", f"The body did not arrive within {_BODY_S:.0f} s.") from error
    try:
        body = msgspec.json.decode(data, type=endpoint.body)
    except msgspec.ValidationError as error:
        raise ApiError(400, "invalid_value", f"Invalid request: {error}", param=_param_of(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_json", "The request body is not valid JSON.") from error
    if endpoint.body is not msgspec.Raw:  # else it is for whoever parses it
        decode_object(data)  # refuses a name that is there twice, of which msgspec takes the last
    return body


def _param_of(message: str) -> str | None:
    """msgspec names fields in backquotes and places as ``$.name``."""
    found = re.search(r"field `([^`]+)`|at `\$\.([^`]+)`", message)
    return (found[1] or found[2]) if found else None


# --- answers; those of errors are coroutines, as the framework would call a plain function in another thread


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    # Answers hold keys and addresses: no cache on the way shall keep them.
    return Response(body, status, {"cache-control": "no-store", **(headers or {})}, media_type="application/json")


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return _json(error.status, error.body(), headers)


async def answer_framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        refusal = ApiError(405, "method_not_allowed", "This path does not take this method.")
    else:
        refusal = ApiError(404, "not_found", "There is nothing at this path.")
    return _json(refusal.status, refusal.body(), error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    return _json(500, ApiError(500, "internal_error", "The gateway failed to handle this request.").body())


def with_request_id(app: ASGIApp) -> ASGIApp:
    """Put x-request-id on every answer of `app`: the caller's if it is sane, else a new one."""

    async def tagged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        tag = (b"x-request-id", request_id(scope).encode())

        async def send_tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], tag]}
            await send(message)

        await app(scope, receive, send_tagged)

    return tagged
