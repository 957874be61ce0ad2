"""The routes of the data path: who, how much, what, then `gateway.dispatch`.

Order matters: a request without a valid key costs no body read, nor does one whose key has no requests left; what it takes of
its limits is known, and taken, once its prompt is; a refused one takes nothing, and costs nothing upstream. Whatever goes wrong
becomes one answer in OpenAI's shape here, at the edge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast
from weakref import ref

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.aliases import Aliases
from gateway.api_error import ApiError
from gateway.authentication import Authenticator
from gateway.dispatch import Dispatcher
from gateway.failures import shutting_down, unroutable, unsupported
from gateway.homes import Home, Homes
from gateway.hot_head import Client, HotHead, hot_head
from gateway.job import Job, Record
from gateway.keys import KeyRecord, KeyScope
from gateway.limits import (
    LOCAL_HEADER,
    Caller,
    Limiter,
    Refused,
    Rules,
    limit_headers,
    refusal_error,
    refusal_headers,
)
from gateway.model_cards import ModelCards
from gateway.openai import Endpoint, GenerationRequest, parse_decoded, parse_request
from gateway.prepare import PreparedPrompt, Preparer, is_short_text
from gateway.response_events import response_error_event
from gateway.server.asgi import AsgiExchange
from gateway.server.exchange import ClientGone, Exchange, Header, Route
from gateway.server.headers import new_request_id
from gateway.server.reply import Reply, while_connected
from gateway.spending import Spending
from gateway.sse import error_event
from gateway.stages import is_staged
from gateway.stored import StoredCall
from gateway.tenants import Standing
from gateway.tokenizing import Tokenizing
from gateway.tracing import Trace
from router import Pool, Router, UnknownReplica

__all__ = ["PUBLIC_GROUP", "Access", "HotPath", "authenticate"]

_log = logging.getLogger("warmpath.gateway")
PUBLIC_GROUP: Final = "public"
"""The sharing group, and the tenant, of everyone when the gateway is open."""
_OWN_WORKERS_LACK: Final = frozenset({"/v1/embeddings", "/v1/responses"})
_TOKENIZING: Final = frozenset({"/tokenize", "/detokenize"})
_SCOPES: Final[dict[str, KeyScope]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
}
"""What a key needs for each of `ENDPOINTS`."""
_LAST_WORDS_S: Final = 1.0
"""A client that does not take them in time has stopped reading."""
_LONG_PROMPT_TOKENS: Final = 32 << 10
"""Shorter ones are refused by the replica as cheaply."""
_USUAL: Final = Standing()
_NOTHING_TO_COMPUTE: Final = PreparedPrompt(names=[], num_tokens=0, ids=None)
"""Of a request that fills no cache: it goes where it waits least."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the gateway, and how much. `authenticator` is None when it is open to everyone who reaches it."""

    authenticator: Authenticator | None
    rules: Rules
    limiter: Limiter
    salt_for: Callable[[str], str]
    tenants: Mapping[str, Standing]
    """Those that stand otherwise than usual."""


class HotPath:
    def __init__(
        self,
        rest: ASGIApp,
        *,
        router: Router,
        access: Access,
        cards: ModelCards,
        aliases: Aliases,
        preparer: Preparer,
        tokenizing: Tokenizing,
        dispatcher: Dispatcher,
        homes: Homes,
        max_body_bytes: int,
        clock: Callable[[], float],
        begin_trace: Callable[[Sequence[Header]], Trace],
        on_finish: Callable[[Record], None],
    ) -> None:
        """`rest` serves every other route. `on_finish` is called once for each request that came to one of ours."""
        self._rest = rest
        self._router = router
        self._access = access
        self._cards = cards
        self._aliases = aliases
        self._preparer = preparer
        self._tokenizing = tokenizing
        self._dispatcher = dispatcher
        self._homes = homes
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._begin_trace = begin_trace
        self._on_finish = on_finish
        self._running: set[asyncio.Task[None]] = set()
        self._is_cut = False

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return len(self._running)

    def cut(self) -> None:
        """End every answer that still runs with a clear error: this process is about to end."""
        self._is_cut = True
        for task in self._running:
            task.cancel()

    def set_rules(self, rules: Rules, tenants: Mapping[str, Standing]) -> None:
        """For requests from now on. What was used before counts against the new limits as well."""
        self._access = replace(self._access, rules=rules, tenants=tenants)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.direct_route(scope)
        if route is not None:
            await route(AsgiExchange(scope, receive, send))
        else:
            await self._rest(scope, receive, send)

    def direct_route(self, scope: Scope) -> Route | None:
        """See `gateway.server.exchange.RoutesDirectly`."""
        head = hot_head(scope)
        return partial(self._handle, head) if head is not None else None

    async def _handle(self, head: HotHead, exchange: Exchange) -> None:
        reply = Reply(exchange, head.given_id or new_request_id())
        record = Record(
            request_id=reply.request_id,
            endpoint=head.endpoint,
            started_at=self._clock(),
            trace=self._begin_trace(head.trace_headers),
            method=head.method,
            client_retries=head.client_retries,
        )
        task = exchange.task
        self._running.add(task)
        try:
            await self._answer(head, exchange, reply, record)
            record.status = reply.status or 0
        except ApiError as error:
            record.error_code = error.code
            if reply.status is None:
                await reply.error(error)
            else:  # committed while it waited for its first token
                await reply.end(_error_event(record.endpoint, error))
            record.status = reply.status or 0
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            task.uncancel()
            await _say_cut(reply, record)
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
            self._running.discard(task)
            record.duration_s = self._clock() - record.started_at
            self._on_finish(record)

    async def _answer(self, head: HotHead, exchange: Exchange, reply: Reply, record: Record) -> None:
        client = self._client(head)
        key, caller, standing = client.key, client.caller, client.standing
        owner = record.tenant = client.tenant
        if key is not None:
            record.key_id = key.id
        priority = head.priority(standing.priority)
        if caller.early and (refused := self._access.limiter.look(caller.early)) is not None:
            raise _refuse(refused, reply, record)
        home = None
        fields: Mapping[str, Any] | None = None
        if head.stored is not None:
            request, home = self._find(head.stored, owner)
            asked = (request.model, *self._aliases.of(request.model))  # by which of them is not known any more
        else:
            head.require_json()
            body = exchange.try_take_body(self._max_body_bytes)
            if body is None:
                body = await exchange.read_body(self._max_body_bytes)
            endpoint, open_access = cast(Endpoint, head.endpoint), key is None
            if self._router.all_text and is_short_text(body):
                request, fields = parse_decoded(endpoint, body, open_access=open_access)
            else:
                request = parse_request(endpoint, body, open_access=open_access)
            asked = (request.model,)
            request = self._aliases.resolve(request)
            if request.follows is not None and (known := self._home(owner, request.follows)) is not None:
                home = known.replica_id if known.model == request.model else None
        pool = self._pool(request, asked, key)
        record.model = request.model
        record.stream = request.stream
        salt = self._access.salt_for(client.group)
        staged = is_staged(len(self._running), len(request.body))

        def job(prompt: PreparedPrompt) -> Job:
            return Job(
                request=request,
                prompt=prompt,
                salt=salt,
                seed=request.seed if request.seed is not None else random.getrandbits(63),
                request_id=reply.request_id,
                debug=key is not None and key.debug,
                owner=owner,
                weight=standing.weight,
                priority=priority,
                home=home,
                staged=staged,
            )

        with while_connected(exchange, reply):
            if request.endpoint in _TOKENIZING:
                with await self._admit(caller, request, _NOTHING_TO_COMPUTE, reply, record):
                    if (tokens := await self._tokenizing.answer(request, pool)) is not None:
                        await reply.json(200, tokens)
                        return
                    await self._preparer.prepare(request, pool, salt)  # finds what is wrong with the body
                    await self._dispatcher.answer(job(_NOTHING_TO_COMPUTE), reply, record)
            else:
                prompt = await self._prompt(request, pool, salt, fields)
                fields = None  # which are as long as the body, and nobody's any more
                if staged:
                    await asyncio.sleep(0)
                with await self._admit(caller, request, prompt, reply, record):
                    await self._dispatcher.answer(job(prompt), reply, record)

    async def _prompt(
        self, request: GenerationRequest, pool: Pool, salt: str, fields: Mapping[str, Any] | None
    ) -> PreparedPrompt:
        if request.subpath:
            return _NOTHING_TO_COMPUTE
        prompt = self._preparer.try_prepare(request, pool, salt, fields)  # which also finds what is wrong with the body
        if prompt is None:
            prompt = await self._preparer.prepare(request, pool, salt)
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

    def _client(self, head: HotHead) -> Client:
        """Who asks. Raises `ApiError` as `authenticate` does."""
        access = self._access
        authenticator, known = access.authenticator, head.client
        if known is not None and known.access is access and _is_current(authenticator, known):
            return known
        key = authenticate(authenticator, head.scope, _SCOPES[head.endpoint])
        ring = ref(authenticator.ring) if authenticator is not None else None
        tenant, group = (key.tenant, key.group) if key is not None else (PUBLIC_GROUP, PUBLIC_GROUP)
        key_id, quota = (key.id, key.limits) if key is not None else (None, None)
        caller = access.rules.caller(key_id, quota, tenant)
        standing = access.tenants.get(tenant, _USUAL)
        head.client = Client(key, tenant, group, standing, caller, ring, access)
        return head.client

    async def _admit(
        self, caller: Caller, request: GenerationRequest, prompt: PreparedPrompt, reply: Reply, record: Record
    ) -> Spending:
        """Take what the request may need from all its limits. Raises `ApiError` 429, and has taken nothing then."""
        rules, limiter = self._access.rules, self._access.limiter
        limits = rules.limits(caller, request.model)
        max_tokens = request.max_tokens if request.generates else 0
        choices = request.choices * prompt.num_prompts
        amounts = rules.amounts(request.model, prompt.total_tokens, max_tokens, choices)
        verdict = limiter.try_reserve(limits, amounts)
        if verdict is None:
            verdict = await limiter.reserve(limits, amounts)
        if isinstance(verdict, Refused):
            raise _refuse(verdict, reply, record)
        reply.headers += limit_headers(verdict.limits, verdict.left)
        if verdict.is_local:
            reply.headers.append(LOCAL_HEADER)
        return Spending(verdict, rules, record, prompt.total_tokens)

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

    def _pool(self, request: GenerationRequest, asked: Sequence[str], key: KeyRecord | None) -> Pool:
        """`asked`: the names that the client may have used, one of which its key must allow."""
        pool = self._router.pool(request.model)
        if pool is None or (key is not None and not any(map(key.may_ask, asked))):
            raise unroutable(self._router.unserved(), asked[0])  # one answer: nobody learns what there is
        if pool.key_space == "tokens" and request.endpoint in _OWN_WORKERS_LACK:
            raise unsupported(request)
        return pool


async def _say_cut(reply: Reply, record: Record) -> None:
    """The last words of an answer that was cut. One that cannot have any is left broken, which the server shows as such."""
    if reply.complete:
        record.status = reply.status or 0
        return
    error = shutting_down()
    record.error_code = error.code
    record.status = reply.status or error.status
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_S):
            if reply.status is None:
                await reply.error(error)
            elif reply.streams:
                await reply.end(_error_event(record.endpoint, error))


def _refuse(refused: Refused, reply: Reply, record: Record) -> ApiError:
    record.limit = refused.limit.measure.name.lower()
    reply.headers += refusal_headers(refused)
    return refusal_error(refused)


def _error_event(endpoint: str, error: ApiError) -> bytes:
    if endpoint == "/v1/responses":
        return response_error_event(error.message, code=error.code)
    return error_event(error.message, code=error.code, type_=error.type)


def authenticate(authenticator: Authenticator | None, scope: Scope, needs: KeyScope) -> KeyRecord | None:
    """The caller's key; None when the gateway is open. Raises `ApiError`: 401 for everything that is no valid client key, 403
    for one that may not use what it `needs` here.
    """
    if authenticator is None:
        return None
    key = authenticator.client(scope)
    if not key.may_use(needs):
        raise ApiError(403, "insufficient_permissions", f"This key does not have the scope '{needs}'.")
    return key


def _is_current(authenticator: Authenticator | None, client: Client) -> bool:
    if authenticator is None or client.key is None or client.ring is None:
        return authenticator is None and client.key is None
    ring = client.ring()
    return ring is not None and authenticator.is_current(client.key, ring)
