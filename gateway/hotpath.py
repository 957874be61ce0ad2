"""The routes of the data path as raw ASGI: who, how much, what, then `gateway.dispatch`.

Order matters: a request without a valid key costs no body read, one over its limit costs no tokenizing, and a refused one
costs nothing upstream. Whatever goes wrong becomes one answer in OpenAI's shape here, at the edge.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api_error import ApiError
from gateway.dispatch import Dispatcher, Job, Record
from gateway.failures import unroutable, unsupported
from gateway.homes import Home, Homes
from gateway.keys import KeyRecord, KeyStore
from gateway.limits import Refused, RequestLimiter, limit_headers
from gateway.model_cards import ModelCards
from gateway.openai import ENDPOINTS, Endpoint, GenerationRequest, parse_request
from gateway.prepare import PreparedPrompt, Preparer
from gateway.response_events import response_error_event
from gateway.server.asgi import ClientGone, Reply, header, read_body, request_id, while_connected
from gateway.sse import error_event
from gateway.stored import StoredCall, parse_stored_call
from gateway.tenants import Standing, priority_asked
from gateway.tokenizing import Tokenizing
from router import Pool, Router, UnknownReplica

__all__ = ["PUBLIC_GROUP", "Access", "HotPath", "authenticate"]

_log = logging.getLogger("warmpath.gateway")
_PASSED_ON: Final = frozenset({b"traceparent", b"tracestate", b"baggage"})
PUBLIC_GROUP: Final = "public"
"""The sharing group, and the tenant, of everyone when the gateway is open."""
_OWN_WORKERS_LACK: Final = frozenset({"/v1/embeddings", "/v1/responses"})
_TOKENIZING: Final = frozenset({"/tokenize", "/detokenize"})
_LONG_PROMPT_TOKENS: Final = 32 << 10
"""Shorter ones are refused by the replica as cheaply."""
_USUAL: Final = Standing()
_NOTHING_TO_COMPUTE: Final = PreparedPrompt(names=[], num_tokens=0, ids=None)
"""Of a request that fills no cache: it goes where it waits least."""


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
        cards: ModelCards,
        preparer: Preparer,
        tokenizing: Tokenizing,
        dispatcher: Dispatcher,
        homes: Homes,
        tenants: Mapping[str, Standing],
        max_body_bytes: int,
        clock: Callable[[], float],
        on_finish: Callable[[Record], None],
    ) -> None:
        """`rest` serves every other route. `tenants`: those that stand otherwise than usual. `on_finish` is called once for
        each request that came to one of ours.
        """
        self._rest = rest
        self._router = router
        self._access = access
        self._cards = cards
        self._preparer = preparer
        self._tokenizing = tokenizing
        self._dispatcher = dispatcher
        self._homes = homes
        self._tenants = tenants
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._on_finish = on_finish
        self.in_flight = 0
        """Requests being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in ENDPOINTS and scope["method"] == "POST":
            await self._handle(scope, receive, send, None)
        elif (stored := parse_stored_call(scope["method"], path, scope["query_string"])) is not None:
            await self._handle(scope, receive, send, stored)
        else:
            await self._rest(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, stored: StoredCall | None) -> None:
        reply = Reply(send, request_id(scope))
        record = Record(
            request_id=reply.request_id, endpoint=stored.endpoint if stored else scope["path"], started_at=self._clock()
        )
        self.in_flight += 1
        try:
            await self._answer(scope, receive, reply, record, stored)
            record.status = reply.status or 0
        except ApiError as error:
            record.error_code = error.code
            if reply.status is None:
                await reply.error(error)
            else:  # committed while it waited for its first token
                await reply.end(_error_event(record.endpoint, error))
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

    async def _answer(
        self, scope: Scope, receive: Receive, reply: Reply, record: Record, stored: StoredCall | None
    ) -> None:
        key = authenticate(self._access.keys, scope)
        if key is not None:
            record.key_id = key.id
            self._spend(key, reply)
        owner = key.tenant if key is not None else PUBLIC_GROUP
        standing = self._tenants.get(owner, _USUAL)
        priority = priority_asked(scope["headers"], standing.priority)
        home = None
        if stored is not None:
            request, home = self._find(stored, owner)
        else:
            _require_json(scope)
            body = await read_body(scope, receive, self._max_body_bytes)
            request = parse_request(cast(Endpoint, scope["path"]), body, open_access=key is None)
            if request.follows is not None and (known := self._home(owner, request.follows)) is not None:
                home = known.replica_id if known.model == request.model else None
        pool = self._pool(request)
        record.model = request.model
        salt = self._access.salt_for(key.group if key is not None else PUBLIC_GROUP)
        async with while_connected(scope, receive, reply):
            if request.endpoint in _TOKENIZING and (tokens := await self._tokenizing.answer(request, pool)) is not None:
                await reply.json(200, tokens)
                return
            job = Job(
                request=request,
                prompt=await self._prompt(request, pool, salt),
                salt=salt,
                seed=request.seed if request.seed is not None else secrets.randbits(63),
                request_id=reply.request_id,
                debug=key is not None and key.debug,
                owner=owner,
                weight=standing.weight,
                priority=priority,
                home=home,
                passed_on=[pair for pair in scope["headers"] if pair[0] in _PASSED_ON],
            )
            await self._dispatcher.answer(job, reply, record)

    async def _prompt(self, request: GenerationRequest, pool: Pool, salt: str) -> PreparedPrompt:
        if request.subpath:
            return _NOTHING_TO_COMPUTE
        prompt = await self._preparer.prepare(request, pool, salt)  # which also finds what is wrong with the body
        if request.endpoint in _TOKENIZING:
            return _NOTHING_TO_COMPUTE
        if prompt.ids is not None and prompt.num_tokens > _LONG_PROMPT_TOKENS:
            self._require_room(request, prompt.num_tokens)
        return prompt

    def _require_room(self, request: GenerationRequest, num_tokens: int) -> None:
        """A prompt that fits into no replica is refused here: to route and send it would cost more than to look."""
        longest = self._cards.longest(request.model)
        if longest is not None and num_tokens >= longest:
            param = "messages" if request.is_chat else "prompt"
            message = (
                f"The context has {longest} tokens; the prompt takes {num_tokens}, which leaves none for an answer."
            )
            raise ApiError(400, "context_length_exceeded", message, param=param)

    def _spend(self, key: KeyRecord, reply: Reply) -> None:
        verdict = self._access.limiter.try_acquire(key.id, key.requests_per_minute, self._clock())
        if verdict is None:
            return
        reply.headers += limit_headers(verdict)
        if isinstance(verdict, Refused):
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"This key may send {verdict.limit} requests a minute.",
                retry_after_s=verdict.retry_after_s,
            )

    def _find(self, stored: StoredCall, owner: str) -> tuple[GenerationRequest, str]:
        """A call for a response that is there already → the request for the replica that made it, and that replica."""
        home = self._home(owner, stored.response_id)
        if home is None:
            raise ApiError(404, "response_not_found", f"There is no response '{stored.response_id}'.")
        return stored.request(home.model), home.replica_id

    def _home(self, owner: str, name: str) -> Home | None:
        """Where it is kept, as long as that replica is there and serves the same model."""
        home = self._homes.find(owner, name)
        try:
            return home if home is not None and self._router.spec(home.replica_id).model == home.model else None
        except UnknownReplica:
            return None

    def _pool(self, request: GenerationRequest) -> Pool:
        pool = self._router.pool(request.model)
        if pool is None:
            raise unroutable(self._router.unserved(), request.model)
        if pool.key_space == "tokens" and request.endpoint in _OWN_WORKERS_LACK:
            raise unsupported(request)
        return pool


def _error_event(endpoint: str, error: ApiError) -> bytes:
    if endpoint == "/v1/responses":
        return response_error_event(error.message, code=error.code)
    return error_event(error.message, code=error.code, type_=error.type)


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
