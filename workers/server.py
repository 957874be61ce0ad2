"""A replica over HTTP: OpenAI's API, health and metrics, and what its gateways need of it.

    POST /v1/chat/completions, /v1/completions      raw ASGI: they carry the load
    GET  /v1/models[/{id}]  /health  /metrics       Starlette, as all that follows
    POST /tokenize, /detokenize
    GET  /tokenizer  /kv_events  /kv_snapshot       for gateways

What must hold: every answer has a request id, and every error is in OpenAI's shape, the framework's own included.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.prompt import Prompter, TokenizerFiles
from router.wire import Hello, unpack_ids
from workers.access import Access
from workers.api_error import ApiError
from workers.asgi import ClientGone, Reply, WhileConnected, headers_named, read_json_body
from workers.client import EngineClient
from workers.completions import Completions
from workers.encoder import Encoder
from workers.health import find_fault
from workers.metrics import CONTENT_TYPE, WorkerMetrics
from workers.openai import GenerationRequest, parse_chat, parse_completion, sane_request_id
from workers.prompts import parse_detokenize, parse_tokenize
from workers.protocol import EngineInfo, StepReport
from workers.publisher import Listener, Publisher
from workers.shapes import model_card, model_list
from workers.submission import check_model, check_vocabulary, context_length
from workers.tracing import Tracer, sampled_parent

__all__ = ["ReplicaApp", "new_request_id"]

_log = logging.getLogger(__name__)

_NOTHING_YET: Final = StepReport(
    waiting=0,
    waiting_uncached_tokens=0,
    running=0,
    kv_used_blocks=0,
    kv_cached_blocks=0,
    prefill_tok_s=0.0,
    step_ms=0.0,
    prompt_tokens_total=0,
    cached_tokens_total=0,
    generated_tokens_total=0,
    preemptions_total=0,
)
"""Stands in until the engine has reported."""

_FRAMES: Final = "application/x-warmpath-frames"

_FRAMEWORK_CODES: Final = {404: "not_found", 405: "method_not_allowed"}

_CLIENT_CLOSED_REQUEST: Final = 499
"""What nginx logs where there is nobody left to tell."""

_OUR_FAULT: Final = ApiError(500, "internal_error", "The replica failed; its log says more under this request id.")


class ReplicaApp:
    """The ASGI app of one replica, over an engine that has started."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        info: EngineInfo,
        files: TokenizerFiles,
        prompter: Prompter,
        executor: Executor,
        credential: str,
        on_loopback: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        """Names this life of the replica; another one has another cache."""
        self._engine = engine
        self._info = info
        self._started_at = time.time()
        self._access = Access(credential, on_loopback=on_loopback)
        self._encoder = Encoder(prompter, executor)
        self._metrics = WorkerMetrics(info, _NOTHING_YET)
        self._completions = Completions(
            engine=engine, info=info, encoder=self._encoder, metrics=self._metrics, tracer=tracer
        )
        self._publisher = Publisher(self._hello, _NOTHING_YET, lambda: self.find_fault() is None)
        self._tokenizer_json = msgspec.json.encode({**msgspec.to_builtins(files), "digest": prompter.digest})
        self._generating: dict[str, Callable[[bytes], GenerationRequest]] = {
            "/v1/chat/completions": parse_chat,
            "/v1/completions": parse_completion,
        }
        self._rest = self._build_rest()
        engine.listen(self._take_report)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is run without lifespan and websockets"
        request_id = _request_id(scope)
        parse = self._generating.get(scope["path"]) if scope["method"] == "POST" else None
        if parse is None:
            await self._rest(scope, receive, _with_request_id(send, request_id))
        else:
            await self._generate(parse, scope, receive, Reply(send, request_id))

    def find_fault(self) -> str | None:
        """Why the replica cannot generate now; None when it can."""
        report = self._metrics.last_report
        busy = self._completions.num_open > 0 or report.running > 0 or report.waiting > 0
        silent_s = time.monotonic() - self._engine.last_tick
        return find_fault(
            alive=self._engine.alive,
            busy=busy,
            silent_s=silent_s,
            step_limit_s=report.step_limit_s,
            failing=report.failing,
        )

    def close_streams(self) -> None:
        """End the event streams, which would never end by themselves: the replica is about to stop."""
        self._publisher.close()

    def when_gateway_leaves(self, call: Callable[[], None]) -> None:
        """`call` whenever somebody stops following the events."""
        self._publisher.on_leave = call

    def _take_report(self, report: StepReport) -> None:
        self._metrics.last_report = report
        self._publisher.report(report)

    def _hello(self, seq: int) -> Hello:
        return Hello(
            epoch=self.epoch,
            seq=seq,
            model=self._info.model,
            revision=self._info.revision,
            block_size=self._info.block_size,
            tokenizer_digest=self._encoder.prompter.digest,
            numerics=self._info.numerics,
            capacity_blocks=self._info.num_blocks,
            max_num_seqs=self._info.max_num_seqs,
            started_at=self._started_at,
        )

    async def _generate(
        self, parse: Callable[[bytes], GenerationRequest], scope: Scope, receive: Receive, reply: Reply
    ) -> None:
        try:
            is_gateway = self._access.require_client(scope)
            self._refuse_if_hung()
            request = parse(await read_json_body(scope, receive))
            if request.field is not None:
                if not is_gateway:
                    raise ApiError(400, "unknown_parameter", "Unknown parameter: 'warmpath'.", param="warmpath")
                reply.request_id = request.field.request_id or reply.request_id
            await self._completions.answer(request, reply, receive, sampled_parent(scope))
        except ApiError as error:
            await reply.error(error)
        except ClientGone:
            _log.info("%s: the client left", reply.request_id)
        except Exception:
            _log.exception("%s: failed", reply.request_id)
            if reply.started:
                raise  # nothing can be said any more; the server cuts the connection
            await reply.error(_OUR_FAULT)

    def _refuse_if_hung(self) -> None:
        """An idle engine that hangs must stay so: one more request would make its silence look like a long step."""
        fault = self.find_fault()
        if fault is not None and self._engine.alive:  # of a dead one the engine's client says more
            raise ApiError(503, "unhealthy", fault)

    # --- everything that carries no load ---

    def _build_rest(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}", self._show_model),
                # Only to answer another method with 405; POST never comes this far.
                Route("/v1/chat/completions", _unreachable, methods=["POST"]),
                Route("/v1/completions", _unreachable, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
                Route("/tokenizer", self._tokenizer),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/kv_events", self._kv_events),
                Route("/kv_snapshot", self._kv_snapshot),
            ],
            exception_handlers={
                ApiError: _api_error,
                ClientGone: _nobody_to_answer,
                HTTPException: _http_error,
                Exception: _our_fault,
            },
        )
        app.router.redirect_slashes = False
        return app

    async def _list_models(self, request: Request) -> Response:
        self._access.require_client(request.scope)
        return _json(model_list([self._model_card()]))

    async def _show_model(self, request: Request) -> Response:
        self._access.require_client(request.scope)
        check_model(request.path_params["model"], self._info)
        return _json(msgspec.json.encode(self._model_card()))

    def _model_card(self) -> dict[str, Any]:
        return model_card(
            model=self._info.model, created=int(self._started_at), max_model_len=context_length(self._info)
        )

    async def _health(self, request: Request) -> Response:
        fault = self.find_fault()
        if fault is not None:
            raise ApiError(503, "unhealthy", fault)
        return _json(b'{"status":"ok"}')

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _tokenizer(self, request: Request) -> Response:
        self._access.require_gateway(request.scope)
        return _json(self._tokenizer_json)

    async def _tokenize(self, request: Request) -> Response:
        self._access.require_client(request.scope)
        body = await read_json_body(request.scope, request.receive)
        asked = parse_tokenize(body)
        check_model(asked.model, self._info)
        if asked.prompt is None:
            packed = await self._encoder.encode_chat(body)
        else:
            add_special_tokens = asked.add_special_tokens is not False
            (packed,) = await self._encoder.encode_prompts([asked.prompt], add_special_tokens=add_special_tokens)
        tokens = unpack_ids(packed).tolist()
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": context_length(self._info), "tokens": tokens}
        if asked.return_token_strs:
            answer["token_strs"] = await self._encoder.token_texts(tokens)
        return _json(msgspec.json.encode(answer))

    async def _detokenize(self, request: Request) -> Response:
        self._access.require_client(request.scope)
        asked = parse_detokenize(await read_json_body(request.scope, request.receive))
        check_model(asked.model, self._info)
        check_vocabulary(asked.tokens, self._info, "tokens")
        text = await self._encoder.decode(asked.tokens)
        return _json(msgspec.json.encode({"prompt": text}))

    async def _kv_events(self, request: Request) -> ASGIApp:
        self._access.require_gateway(request.scope)
        if self._publisher.closed:
            raise ApiError(503, "stopping", "The replica is about to stop.")
        listener = self._publisher.listen(request.query_params.get("epoch", ""), _after(request))
        if listener is None:
            raise ApiError(410, "gone", "These events are no longer kept; take /kv_snapshot.", param="after")
        return _EventStream(self._publisher, listener)

    async def _kv_snapshot(self, request: Request) -> Response:
        self._access.require_gateway(request.scope)
        return StreamingResponse(self._publisher.snapshot(), media_type=_FRAMES)


class _EventStream:
    """The long answer to ``GET /kv_events``."""

    def __init__(self, publisher: Publisher, listener: Listener) -> None:
        self._publisher = publisher
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", _FRAMES.encode()), (b"cache-control", b"no-store")]
        try:
            async with WhileConnected(receive):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                while (frames := await self._listener.read()) is not None:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass
        finally:
            self._publisher.leave(self._listener)


def _request_id(scope: Scope) -> str:
    """The caller's, if it can be logged and echoed as it is; else a new one."""
    given = headers_named(scope, b"x-request-id")
    text = given[0].decode("latin-1") if len(given) == 1 else ""
    return text if sane_request_id(text) else new_request_id()


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _with_request_id(send: Send, request_id: str) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
        await send(message)

    return send_with_id


def _after(request: Request) -> int:
    """The seq that the caller has; one that has nothing says nothing, or 0."""
    text = request.query_params.get("after", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ApiError(400, "invalid_value", "'after' must be a whole number.", param="after")
    return int(text)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, media_type="application/json")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _FRAMEWORK_CODES.get(error.status_code, "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path}"
    body = ApiError(error.status_code, code, message).body()
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


def _nobody_to_answer(request: Request, error: Exception) -> Response:
    """The framework wants an answer; the server drops it, for its connection is closed."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _our_fault(request: Request, error: Exception) -> Response:
    """The server logs the exception: Starlette hands it on after this."""
    return _api_error(request, _OUR_FAULT)


async def _unreachable(request: Request) -> Response:
    raise AssertionError(f"{request.url.path} is answered before the framework")
