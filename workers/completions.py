"""One request's life in the HTTP process: a checked request in, sequences to the engine, an answer out.

    GenerationRequest → ids of each prompt → one Submit a choice → Output → text → an answer, whole or as a stream

What must hold: every sequence that was submitted is released when the request ends, however it ends, so a client that
leaves frees its blocks. A stream has no status line before its first token: until then an error is a status, after it an
event without `DONE`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Final, Protocol

from starlette.types import Receive

from workers.api_error import ApiError
from workers.asgi import Header, Reply, WhileConnected
from workers.choice import Choice
from workers.client import EngineBusy, EngineClient, EngineDead, Generation
from workers.encoder import Encoder
from workers.metrics import WorkerMetrics
from workers.openai import GenerationRequest
from workers.prompts import completion_prompts
from workers.protocol import EngineInfo, Output, Submit
from workers.shapes import DONE, FinishedChoice, Shape, Usage, error_event
from workers.submission import check_model, check_request, given_ids, submissions

__all__ = ["Completions"]

_EVENT_STREAM: Final[Sequence[Header]] = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class _Writer(Protocol):
    """How an answer goes out: at its end, or as it comes."""

    async def show(self, choice: Choice, text: str) -> None:
        """New text of a choice, or its end, or both."""
        ...

    async def finish(self, usage: Usage) -> None: ...

    async def fail(self, error: ApiError) -> None:
        """Raises `error` as long as it can still be a status."""
        ...


class Completions:
    """Answers chat and text completions."""

    def __init__(self, *, engine: EngineClient, info: EngineInfo, encoder: Encoder, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._info = info
        self._encoder = encoder
        self._metrics = metrics
        self._rids = itertools.count(1)
        self.num_open = 0
        """Sequences that the engine has to do with, as far as we know."""

    async def answer(self, request: GenerationRequest, reply: Reply, receive: Receive) -> None:
        """Raises `ApiError` as long as the answer has not begun, and `workers.asgi.ClientGone`."""
        check_model(request.model, self._info)
        prompts = await self._encode(request)
        check_request(request, prompts, self._info)
        seed = request.seed if request.seed is not None else secrets.randbits(64)
        submits = submissions(request, prompts, self._info, request_id=reply.request_id, seed=seed, rids=self._rids)
        decode = self._encoder.prompter.decode
        choices = [Choice(index, decode, request.stop) for index in range(len(submits))]
        writer = self._writer(request, reply)
        async with WhileConnected(receive), AsyncExitStack() as stack:
            # All or none: the first refusal leaves those before it.
            generations = [await stack.enter_async_context(self._submit(submit)) for submit in submits]
            try:
                await _run_all([self._follow(*pair, writer) for pair in zip(choices, generations, strict=True)])
            except ApiError as error:
                await writer.fail(error)
            else:
                await writer.finish(_usage(request, choices, prompts))

    async def _encode(self, request: GenerationRequest) -> list[bytes]:
        given = given_ids(request)
        if given is not None:
            return [given]
        if request.chat:
            escape = request.field is not None and request.field.escape
            return [await self._encoder.encode_chat(request.body, escape=escape)]
        return [
            await self._encoder.encode_prompt(prompt, add_special_tokens=request.add_special_tokens)
            for prompt in completion_prompts(request.prompt)
        ]

    def _writer(self, request: GenerationRequest, reply: Reply) -> _Writer:
        shape = Shape(
            chat=request.chat,
            request_id=reply.request_id,
            created=int(time.time()),
            model=self._info.model,
            fingerprint=self._info.numerics,
        )
        return _StreamWriter(reply, shape, request.include_usage) if request.stream else _WholeWriter(reply, shape)

    def _submit(self, submit: Submit) -> Generation:
        try:
            return self._engine.submit(submit)
        except EngineBusy as error:
            raise ApiError(503, "engine_busy", str(error), retry_after_s=math.ceil(error.retry_after_s)) from error
        except EngineDead as error:
            raise ApiError(503, "engine_dead", str(error)) from error

    async def _follow(self, choice: Choice, generation: Generation, writer: _Writer) -> None:
        """One choice from its submission to its end."""
        began = last = time.monotonic()
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
                    last, latency = now, self._metrics.inter_token_latency
                    text = choice.take(output)
                    await writer.show(choice, text)
                    if choice.finish_reason is not None:
                        ending = choice.finish_reason
                        return
        finally:
            self.num_open -= 1
            self._metrics.finished(ending, time.monotonic() - began)

    def _failure(self, output: Output) -> ApiError:
        if output.finish_reason == "rejected":
            return ApiError(400, "request_rejected", output.message)
        if not self._engine.alive:
            return ApiError(503, "engine_dead", f"The engine has ended: {output.message}")
        return ApiError(500, "engine_error", f"The engine failed: {output.message}")


class _WholeWriter:
    """One JSON object, when all choices have ended."""

    def __init__(self, reply: Reply, shape: Shape) -> None:
        self._reply = reply
        self._shape = shape
        self._pieces: dict[int, list[str]] = {}
        self._finished: dict[int, FinishedChoice] = {}

    async def show(self, choice: Choice, text: str) -> None:
        pieces = self._pieces.setdefault(choice.index, [])
        pieces.append(text)
        if choice.finish_reason is not None:
            self._finished[choice.index] = FinishedChoice(choice.index, "".join(pieces), choice.finish_reason)

    async def finish(self, usage: Usage) -> None:
        choices = [self._finished[index] for index in sorted(self._finished)]
        await self._reply.json(200, self._shape.whole(choices, usage))

    async def fail(self, error: ApiError) -> None:
        raise error


class _StreamWriter:
    """Server-sent events, one a write. The status line waits for the first token."""

    def __init__(self, reply: Reply, shape: Shape, include_usage: bool) -> None:
        self._reply = reply
        self._shape = shape
        self._include_usage = include_usage
        self._opened: set[int] = set()

    async def show(self, choice: Choice, text: str) -> None:
        if choice.index not in self._opened:
            await self._open(choice)
        if text:
            await self._reply.chunk(self._shape.text(choice.index, text))
        if choice.finish_reason is not None:
            await self._reply.chunk(self._shape.finish(choice.index, choice.finish_reason))

    async def finish(self, usage: Usage) -> None:
        if self._include_usage:
            await self._reply.chunk(self._shape.usage(usage))
        await self._reply.end(DONE)

    async def fail(self, error: ApiError) -> None:
        if not self._reply.started:
            raise error
        await self._reply.end(error_event(error))

    async def _open(self, choice: Choice) -> None:
        self._opened.add(choice.index)
        if not self._reply.started:
            await self._reply.start(200, _EVENT_STREAM)
        if opening := self._shape.opening(choice.index):
            await self._reply.chunk(opening)


def _usage(request: GenerationRequest, choices: Sequence[Choice], prompts: Sequence[bytes]) -> Usage:
    """A prompt counts once, however many choices it has. Its first choice says what was cached: it warms the others."""
    return Usage(
        prompt_tokens=sum(len(prompt) // 4 for prompt in prompts),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        cached_tokens=sum(choice.cached_tokens for choice in choices[:: request.n]),
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
