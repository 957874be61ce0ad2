"""A checked request → all that an answer needs: what the engine is asked for, and what reads what it says.

Tokenizes, renders and compiles, each off the event loop when it takes long. Nothing has been submitted yet, so whatever is
wrong with a request is a status.
"""

from __future__ import annotations

import itertools
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from router.wire import pack_ids
from workers.api_error import invalid_value
from workers.choice import Choice
from workers.echo import Echo, echo_of
from workers.encoder import Encoder
from workers.ending import ending
from workers.message import MessageParser
from workers.openai import GenerationRequest
from workers.output import Decode, OutputText
from workers.prompts import completion_prompts
from workers.protocol import EngineInfo, Submit
from workers.shapes import Usage
from workers.submission import check_request, context_length, given_ids, resumed_ids, submissions

__all__ = ["PreparedAnswer", "PreparedChoice", "Preparer"]


@dataclass(frozen=True, slots=True)
class PreparedChoice:
    submit: Submit
    choice: Choice
    echo: Echo | None


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    response_id: str
    created: int
    """Unix time, seconds."""
    choices: Sequence[PreparedChoice]
    choices_per_prompt: int

    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices it has. The first says what was cached, for it warms the rest."""
        firsts = self.choices[:: self.choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(first.submit.prompt) // 4 for first in firsts),
            completion_tokens=sum(prepared.choice.num_tokens for prepared in self.choices),
            cached_tokens=sum(first.choice.cached_tokens for first in firsts),
            reasoning_tokens=sum(prepared.choice.num_reasoning_tokens for prepared in self.choices),
        )


class Preparer:
    def __init__(self, info: EngineInfo, encoder: Encoder) -> None:
        self._info = info
        self._eos_ids = frozenset(info.eos_ids)
        self._encoder = encoder
        self._rids = itertools.count(1)

    async def prepare(self, request: GenerationRequest, request_id: str) -> PreparedAnswer:
        """Raises `ApiError`."""
        prompts = await self._encode(request)
        check_request(request, prompts, self._info)
        resumed = resumed_ids(request, self._info)
        response_id, created = _identity(request, request_id)
        echoes = await self._echoes(request, prompts)
        submits = submissions(
            request,
            prompts,
            self._info,
            request_id=request_id,
            seed=request.seed if request.seed is not None else secrets.randbits(64),
            rids=self._rids,
            resume=pack_ids(resumed),
        )
        choices = [
            PreparedChoice(submit, self._choice(request, index, response_id, echo), echo)
            for index, (submit, echo) in enumerate(
                zip(submits, [echo for echo in echoes for _ in range(request.n)], strict=True)
            )
        ]
        for prepared in choices:
            self._replay(resumed, prepared)
        return PreparedAnswer(response_id, created, choices, request.n)

    async def _encode(self, request: GenerationRequest) -> list[bytes]:
        given = given_ids(request)
        if given is not None:
            return [given]
        if request.chat:
            return [await self._encoder.encode_chat(request.body)]
        return [
            await self._encoder.encode_prompt(prompt, add_special_tokens=request.add_special_tokens)
            for prompt in completion_prompts(request.prompt)
        ]

    async def _echoes(self, request: GenerationRequest, prompts: Sequence[bytes]) -> list[Echo | None]:
        if not request.echo:
            return [None for _ in prompts]
        texts = _texts(request, len(prompts))
        return [await self._echo(request, *pair) for pair in zip(prompts, texts, strict=True)]

    async def _echo(self, request: GenerationRequest, packed: bytes, text: str | None) -> Echo:
        return await self._encoder.run(
            len(packed),
            lambda: echo_of(packed, text, self._decode(request), offsets=request.logprobs is not None),
        )

    def _choice(self, request: GenerationRequest, index: int, response_id: str, echo: Echo | None) -> Choice:
        return Choice(
            index,
            OutputText(self._decode(request), request.stop, include_stop=request.include_stop),
            has_stops=bool(request.stop),
            min_tokens=request.min_tokens,
            include_stop=request.include_stop,
            eos_ids=() if request.ignore_eos else self._eos_ids,
            logprobs=request.logprobs is not None,
            num_chars_before=len(echo.text) if echo is not None else 0,
            parser=_parser(request, index, response_id),
            show_reasoning=request.include_reasoning,
            calls_end_it=request.tool_use is not None and request.tool_use.choice != "named",
        )

    def _decode(self, request: GenerationRequest) -> Decode:
        prompter = self._encoder.prompter
        if request.skip_special_tokens:
            return prompter.decode
        return lambda ids: prompter.decode(ids, skip_special_tokens=False)

    def _replay(self, ids: array[int], prepared: PreparedChoice) -> None:
        """Bring a choice to where it was when its stream broke. Raises `ApiError` if it cannot have come so far."""
        choice, sampling = prepared.choice, prepared.submit.sampling
        num_prompt = len(prepared.submit.prompt) // 4
        for num_generated, id_ in enumerate(ids, 1):
            if choice.end is not None:
                raise invalid_value("'warmpath.resume.ids' go on behind the answer's end.", "warmpath.resume.ids")
            ended = ending(
                id_,
                num_generated=num_generated,
                num_ids=num_prompt + num_generated,
                sampling=sampling,
                eos_ids=self._eos_ids,
                max_len=context_length(self._info),
            )
            choice.replay(id_, ended)


def _identity(request: GenerationRequest, request_id: str) -> tuple[str, int]:
    if request.resume is not None:
        return request.resume.response_id, request.resume.created
    return f"{'chatcmpl' if request.chat else 'cmpl'}-{request_id}", int(time.time())


def _texts(request: GenerationRequest, num_prompts: int) -> list[str | None]:
    """The prompts as their client wrote them, where they are no ids."""
    if request.prompt in (b"", b"null"):  # the gateway sent the ids alone
        return [None] * num_prompts
    return [prompt if isinstance(prompt, str) else None for prompt in completion_prompts(request.prompt)]


def _parser(request: GenerationRequest, index: int, response_id: str) -> MessageParser | None:
    use = request.tool_use
    if use is None or not use.looked_for:
        return None
    return MessageParser(
        tools=True,
        parallel=use.parallel,
        call_id=lambda number: f"call_{xxhash.xxh3_64_hexdigest(f'{response_id}/{index}/{number}'.encode())}",
    )
