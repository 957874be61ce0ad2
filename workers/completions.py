"""One request's life in the HTTP process: a checked request in, sequences to the engine, an answer out.

    GenerationRequest → prepare → one Submit a choice → Output → Choice → Delta → an answer, whole or as a stream

What must hold: every sequence that was submitted is released when the request ends, however it ends, so a client that
leaves frees its blocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec
from starlette.types import Receive

from router.trace_context import TraceContext
from router.wire import unpack_ids
from workers.api_error import ApiError
from workers.asgi import Reply, WhileConnected
from workers.client import EngineBusy, EngineClient, EngineDead, Generation
from workers.encoder import Encoder
from workers.life import Life
from workers.metrics import WorkerMetrics
from workers.openai import GenerationRequest
from workers.prepare import PreparedAnswer, PreparedChoice, Preparer
from workers.protocol import EngineInfo, Output, Submit
from workers.shapes import Opening, Shape
from workers.submission import check_model
from workers.tracing import Tracer
from workers.writers import AnswerWriter, StreamWriter, WholeWriter

__all__ = ["Completions"]

_NOTHING_WANTED: Final = Output(rid=0, ids=[], finish_reason="length")


class Completions:
    """Answers chat and text completions."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        info: EngineInfo,
        encoder: Encoder,
        metrics: WorkerMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._engine = engine
        self._info = info
        self._encoder = encoder
        self._metrics = metrics
        self._tracer = tracer
        self._preparer = Preparer(info, encoder)
        self.num_open = 0
        """Sequences that the engine has to do with, as far as we know."""

    async def answer(
        self, request: GenerationRequest, reply: Reply, receive: Receive, parent: TraceContext | None = None
    ) -> None:
        """Raises `ApiError` as long as the answer has not begun, and `workers.asgi.ClientGone`. `parent`: the sender's span,
        where its trace is recorded.
        """
        check_model(request.model, self._info)
        answer = await self._preparer.prepare(request, reply.request_id)
        writer = self._writer(request, reply, answer)
        telling = [_Telling(request, prepared, writer) for prepared in answer.choices]
        async with WhileConnected(receive), AsyncExitStack() as stack:
            try:
                if request.only_echoes:
                    for each in telling:
                        await each.tell(_NOTHING_WANTED)
                else:
                    # Of a resumed stream the choice may have ended. All or none: the first refusal leaves those before it.
                    going = [each for each in telling if each.prepared.choice.end is None]
                    generations = [
                        await stack.enter_async_context(self._submit(each.prepared.submit)) for each in going
                    ]
                    await _run_all([self._follow(*pair, parent) for pair in zip(going, generations, strict=True)])
            except ApiError as error:
                await writer.fail(error)
            else:
                await writer.finish()

    def _writer(self, request: GenerationRequest, reply: Reply, answer: PreparedAnswer) -> AnswerWriter:
        shape = Shape(
            chat=request.chat,
            response_id=answer.response_id,
            created=answer.created,
            model=self._info.model,
            fingerprint=self._info.numerics,
            token_bytes=self._encoder.prompter.token_bytes,
            logprobs=request.logprobs is not None,
            token_ids=request.return_token_ids,
        )
        # A token with its likely others costs about a microsecond each: as much as four bytes of text to tokenize.
        id_bytes = 0 if request.logprobs is None else 4 * (1 + request.logprobs)

        def format_(num_ids: int, write: Callable[[], bytes]) -> Awaitable[bytes]:
            return self._encoder.run(num_ids * id_bytes, write)

        if not request.stream:
            return WholeWriter(reply, shape, answer.usage, format_)
        return StreamWriter(
            reply,
            shape,
            answer.usage,
            format_,
            numbered=len(answer.choices) == 1,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            resumed=request.resume is not None,
        )

    def _submit(self, submit: Submit) -> Generation:
        try:
            return self._engine.submit(submit)
        except EngineBusy as error:
            raise ApiError(503, "engine_busy", str(error), retry_after_s=math.ceil(error.retry_after_s)) from error
        except EngineDead as error:
            raise ApiError(503, "engine_dead", str(error)) from error

    async def _follow(self, telling: _Telling, generation: Generation, parent: TraceContext | None) -> None:
        """One choice from its submission to its end."""
        began = last = time.monotonic()
        prefill_at = first_at = None
        latency = self._metrics.time_to_first_token
        ending = "abort"
        self.num_open += 1
        try:
            async with generation:  # at a stop string we leave before its end, and the engine need not go on
                async for output in generation:
                    if output.finish_reason in ("rejected", "error"):
                        ending = "error"
                        raise self._failure(output)
                    now = time.monotonic()
                    latency.observe(now - last)
                    if first_at is None:
                        first_at, prefill_at = now, max(began, now - (output.prefill_s or 0.0))
                    last, latency = now, self._metrics.inter_token_latency
                    await telling.tell(output)
                    if (end := telling.prepared.choice.end) is not None:
                        ending = "length" if end.reason == "length" else "stop"
                        return
        finally:
            self.num_open -= 1
            choice = telling.prepared.choice
            life = Life(
                request_id=telling.prepared.submit.request_id,
                model=self._info.model,
                choice=choice.index,
                submitted_at=began,
                prefill_at=prefill_at,
                first_at=first_at,
                ended_at=time.monotonic(),
                ending=ending,
                prompt_tokens=generation.prompt_tokens,
                cached_tokens=choice.cached_tokens,
                generated_tokens=choice.num_tokens,
            )
            self._metrics.finished(life)
            if parent is not None and self._tracer is not None:
                self._tracer.tell(life, parent)

    def _failure(self, output: Output) -> ApiError:
        if output.finish_reason == "rejected":
            return ApiError(400, "request_rejected", output.message)
        if not self._engine.alive:
            return ApiError(503, "engine_dead", f"The engine has ended: {output.message}")
        return ApiError(500, "engine_error", f"The engine failed: {output.message}")


class _Telling:
    """One choice on its way from the engine to the writer."""

    def __init__(self, request: GenerationRequest, prepared: PreparedChoice, writer: AnswerWriter) -> None:
        self.prepared = prepared
        self._request = request
        self._writer = writer
        self._opened = False

    async def tell(self, output: Output) -> None:
        choice = self.prepared.choice
        if not self._opened:
            self._opened = True
            await self._writer.open(choice, self._opening(output))
        if self._request.max_tokens == 0:  # of an echo's logprobs: what was generated is not wanted
            output = msgspec.structs.replace(output, ids=[], logprobs=[], finish_reason="length")
        delta = choice.take(output)
        if delta is not None:
            await self._writer.show(choice, delta)

    def _opening(self, output: Output) -> Opening:
        echo = self.prepared.echo
        return Opening(
            echo=None if echo is None else echo.as_delta(output.prompt_logprobs),
            prompt_ids=unpack_ids(self.prepared.submit.prompt).tolist() if self._request.return_token_ids else None,
        )


async def _run_all(coroutines: Sequence[Coroutine[None, None, None]]) -> None:
    """Run them together; the first failure cancels the rest and comes out as itself, not in a group."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
