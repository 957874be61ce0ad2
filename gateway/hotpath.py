"""The POST routes of the data path as raw ASGI: who, how much, what, then `gateway.dispatch`.

Order matters: a request without a valid key costs no body read, one over its limit costs no tokenizing, and a refused one
costs nothing upstream. Whatever goes wrong becomes one answer in OpenAI's shape here, at the edge.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.asgi import ClientGone, Reply, header, read_body, request_id, while_connected
from gateway.dispatch import Dispatcher, Job, Record
from gateway.failures import unroutable
from gateway.keys import KeyRecord, KeyStore
from gateway.limits import Refused, RequestLimiter
from gateway.openai import ApiError, Endpoint, GenerationRequest, parse_request
from gateway.prepare import Preparer
from gateway.sse import error_event
from router import Pool, Router

__all__ = ["ENDPOINTS", "PUBLIC_GROUP", "Access", "HotPath", "authenticate"]

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")

_log = logging.getLogger("warmpath.gateway")
_PASSED_ON: Final = frozenset({b"traceparent", b"tracestate", b"baggage"})
PUBLIC_GROUP: Final = "public"
"""The sharing group of everyone when the gateway is open."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the gateway. `keys` is None when it is open to everyone who reaches it."""

    keys: KeyStore | None
    limiter: RequestLimiter
    salt_for: Callable[[str], str]


class HotPath:
    def __init__(
        self,
        rest: ASGIApp,
        *,
        router: Router,
        access: Access,
        preparer: Preparer,
        dispatcher: Dispatcher,
        max_body_bytes: int,
        clock: Callable[[], float],
        on_finish: Callable[[Record], None],
    ) -> None:
        """`rest` serves every other route. `on_finish` is called once for each request that came to one of ours."""
        self._rest = rest
        self._router = router
        self._access = access
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._on_finish = on_finish
        self.in_flight = 0
        """Requests being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in ENDPOINTS:
            await self._handle(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, request_id(scope))
        record = Record(request_id=reply.request_id, endpoint=scope["path"], started_at=self._clock())
        self.in_flight += 1
        try:
            await self._answer(scope, receive, reply, record)
            record.status = reply.status or 0
        except ApiError as error:
            record.error_code = error.code
            if reply.status is None:
                await reply.error(error)
            else:  # committed while it waited for its first token
                await reply.end(error_event(error.message, code=error.code, type_=error.type))
            record.status = reply.status or 0
        except ClientGone:
            record.status, record.error_code = 499, "client_gone"
        except Exception:
            record.status, record.error_code = 500, "internal_error"
            _log.exception("request %s failed", reply.request_id)
            if reply.status is None:
                await reply.error(ApiError(500, "internal_error", "The gateway failed to handle this request."))
            else:
                raise  # the server closes the connection: the client sees a broken body, never a complete one
        finally:
            self.in_flight -= 1
            record.duration_s = self._clock() - record.started_at
            self._on_finish(record)

    async def _answer(self, scope: Scope, receive: Receive, reply: Reply, record: Record) -> None:
        key = authenticate(self._access.keys, scope)
        if key is not None:
            record.key_id = key.id
            self._spend(key)
        _require_json(scope)
        body = await read_body(scope, receive, self._max_body_bytes)
        endpoint = cast(Endpoint, scope["path"])
        request = parse_request(endpoint, body, open_access=key is None)
        pool = self._pool(request)
        record.model = request.model
        salt = self._access.salt_for(key.group if key is not None else PUBLIC_GROUP)
        async with while_connected(scope, receive, reply):
            prompt = await self._preparer.prepare(request, pool, salt)
            job = Job(
                request=request,
                prompt=prompt,
                salt=salt,
                seed=request.seed if request.seed is not None else secrets.randbits(63),
                request_id=reply.request_id,
                debug=key is not None and key.debug,
                passed_on=[pair for pair in scope["headers"] if pair[0] in _PASSED_ON],
            )
            await self._dispatcher.answer(job, reply, record)

    def _spend(self, key: KeyRecord) -> None:
        verdict = self._access.limiter.try_acquire(key.id, key.requests_per_minute, self._clock())
        if isinstance(verdict, Refused):
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"This key may send {verdict.limit} requests a minute.",
                retry_after_s=verdict.retry_after_s,
            )

    def _pool(self, request: GenerationRequest) -> Pool:
        pool = self._router.pool(request.model)
        if pool is None:
            raise unroutable(self._router.unserved(), request.model)
        return pool


def authenticate(keys: KeyStore | None, scope: Scope) -> KeyRecord | None:
    """The caller's key; None when the gateway is open. Raises `ApiError` 401 for everything that is no valid key."""
    if keys is None:
        return None
    try:
        key = keys.verify(header(scope, b"authorization") or b"", "client")
    except ApiError:
        key = None
    if key is None:
        raise ApiError(401, "invalid_api_key", "Incorrect API key provided.")
    return key


def _require_json(scope: Scope) -> None:
    kind = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "unsupported_media_type", "The body must be sent as 'content-type: application/json'.")
    if header(scope, b"content-encoding") not in (None, b"identity"):
        raise ApiError(415, "unsupported_encoding", "A compressed request body is not supported.")
