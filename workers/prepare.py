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

from router.wire import pack_ids, unpack_ids
from workers.api_error import ApiError, invalid_value
from workers.choice import Choice
from workers.echo import Echo, echo_of
from workers.encoder import Encoder
from workers.ending import ending
from workers.message import MessageParser
from workers.openai import GenerationRequest
from workers.output import Decode, OutputText
from workers.prompts import completion_prompts
from workers.protocol import EngineInfo, Grammar, Submit
from workers.reading import asks_for_constraint, constraint_of, parser_of
from workers.shapes import Usage
from workers.submission import check_request, context_length, given_ids, resumed_ids, submissions
from workers.tags import ModelTags, ReasoningState

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
        prompter = encoder.prompter
        self._tags = ModelTags.of(
            lambda text: prompter.encode_text(text, add_special_tokens=False), prompter.special_ids
        )

    async def prepare(self, request: GenerationRequest, request_id: str) -> PreparedAnswer:
        """Raises `ApiError`."""
        prompts = await self._encode(request)
        check_request(request, prompts, self._info)
        resumed = resumed_ids(request, self._info)
        state = self._reasoning_state(request, prompts[0])
        grammar = await self._grammar(request, state)
        response_id, created = _identity(request, request_id)
        echoes = await self._echoes(request, prompts)
        submits = submissions(
            request,
            prompts,
            self._info,
            request_id=request_id,
            seed=request.seed if request.seed is not None else secrets.randbits(64),
            rids=self._rids,
            grammar=grammar,
            resume=pack_ids(resumed),
        )
        choices = [
            PreparedChoice(
                submit,
                self._choice(
                    request, submit, index, echo, parser_of(request, state, index=index, response_id=response_id)
                ),
                echo,
            )
            for index, (submit, echo) in enumerate(
                zip(submits, [echo for echo in echoes for _ in range(request.n)], strict=True)
            )
        ]
        # An id costs some 5 us to replay.
        await self._encoder.run(16 * len(resumed), lambda: self._replay(resumed, choices[0]))
        return PreparedAnswer(response_id, created, choices, request.n)

    async def _encode(self, request: GenerationRequest) -> list[bytes]:
        given = given_ids(request)
        if given is not None:
            return [given]
        if request.chat:
            escape = request.field is not None and request.field.escape
            return [await self._encoder.encode_chat(request.body, escape=escape)]
        prompts = completion_prompts(request.prompt)
        return await self._encoder.encode_prompts(prompts, add_special_tokens=request.add_special_tokens)

    def _reasoning_state(self, request: GenerationRequest, prompt: bytes) -> ReasoningState | None:
        """None: no thoughts are looked for. A text completion is text, whatever tags it has."""
        if not request.chat or self._tags.reasoning is None:
            return None
        return self._tags.reasoning.state_of(unpack_ids(prompt))

    async def _grammar(self, request: GenerationRequest, state: ReasoningState | None) -> Grammar | None:
        if not asks_for_constraint(request):
            return None
        if self._info.precision == "simulated":
            message = "A simulated model cannot be made to obey a grammar: no 'response_format', no forced tool calls."
            raise ApiError(400, "unsupported_parameter", message, param=_constraining_field(request))
        constraint = await self._encoder.in_thread(lambda: constraint_of(request))
        return None if constraint is None else constraint.grammar(self._tags, state or "closed")

    async def _echoes(self, request: GenerationRequest, prompts: Sequence[bytes]) -> list[Echo | None]:
        if not request.echo:
            return [None for _ in prompts]
        texts = _texts(request, len(prompts))

        def write() -> list[Echo | None]:
            decode, offsets = self._decode(request), request.logprobs is not None
            return [echo_of(*pair, decode, offsets=offsets) for pair in zip(prompts, texts, strict=True)]

        return await self._encoder.run(sum(map(len, prompts)), write)

    def _choice(
        self, request: GenerationRequest, submit: Submit, index: int, echo: Echo | None, parser: MessageParser | None
    ) -> Choice:
        return Choice(
            index,
            OutputText(self._decode(request), request.stop, include_stop=request.include_stop),
            has_stops=bool(request.stop),
            min_tokens=request.min_tokens,
            include_stop=request.include_stop,
            eos_ids=() if submit.sampling.ignore_eos else self._eos_ids,
            logprobs=request.logprobs is not None,
            num_chars_before=len(echo.text) if echo is not None else 0,
            parser=parser,
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


def _constraining_field(request: GenerationRequest) -> str:
    if request.structured_outputs:
        return "structured_outputs"
    return "tool_choice" if request.tool_use is not None and request.tool_use.forced else "response_format"
