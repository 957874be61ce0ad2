"""Where a checked request meets the replica's own limits: its model, its context, its vocabulary. What passes cannot break the
engine. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from router.wire import decode_ids, unpack_ids
from workers.api_error import ApiError, invalid_value
from workers.openai import GenerationRequest
from workers.prompts import MAX_PROMPTS
from workers.protocol import EngineInfo, Grammar, Sampling, Submit

__all__ = [
    "check_model",
    "check_request",
    "check_vocabulary",
    "context_length",
    "given_ids",
    "resumed_ids",
    "submissions",
]

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default for text completions. A chat may use the rest of the context."""


def context_length(info: EngineInfo) -> int:
    """Tokens that a prompt and its answer may have together: the model's limit, or all the KV memory there is."""
    return min(info.max_model_len, info.num_blocks * info.block_size)


def check_model(name: str | None, info: EngineInfo) -> None:
    if name is not None and name != info.model:
        raise ApiError(404, "model_not_found", f"The model '{name}' does not exist.", param="model")


def given_ids(request: GenerationRequest) -> bytes | None:
    """The prompt's packed ids as the gateway sent them, if it did."""
    if request.field is None or not request.field.prompt_ids:
        return None
    return _decoded(request.field.prompt_ids, "warmpath.prompt_ids")


def resumed_ids(request: GenerationRequest, info: EngineInfo) -> array[int]:
    """Ids that were generated, and told, before the stream broke."""
    if request.resume is None:
        return array("I")
    ids = unpack_ids(_decoded(request.resume.ids, "warmpath.resume.ids"))
    check_vocabulary(ids, info, "warmpath.resume.ids")
    return ids


def _decoded(text: str, param: str) -> bytes:
    try:
        return decode_ids(text)
    except ValueError as error:
        raise invalid_value(f"'{param}' is no base64 of u32.", param) from error


def check_request(request: GenerationRequest, prompts: Sequence[bytes], info: EngineInfo) -> None:
    """Raises `ApiError` 400 for what the engine must not see."""
    if len(prompts) * request.n > MAX_PROMPTS:
        raise invalid_value(f"'prompt' and 'n' ask for more than {MAX_PROMPTS} choices in all.", "n")
    for prompt in prompts:
        _check_prompt(request, prompt, info)
        room = context_length(info) - len(prompt) // 4
        if request.min_tokens > _max_tokens(request, room):
            raise invalid_value("'min_tokens' must be no more than 'max_tokens'.", "min_tokens")
    if request.resume is not None and len(prompts) > 1:
        raise invalid_value("Only a stream of one choice can be resumed.", "warmpath.resume")
    check_vocabulary(request.stop_token_ids, info, "stop_token_ids")
    check_vocabulary(request.logit_bias, info, "logit_bias")


def check_vocabulary(ids: Collection[int], info: EngineInfo, param: str) -> None:
    highest = max(ids, default=0)
    if highest >= info.vocab_size:
        message = f"'{param}' has the token id {highest}, and the vocabulary ends at {info.vocab_size - 1}."
        raise invalid_value(message, param)


def _check_prompt(request: GenerationRequest, prompt: bytes, info: EngineInfo) -> None:
    param = "messages" if request.chat else "prompt"
    ids = unpack_ids(prompt)
    if not ids:
        raise invalid_value(f"'{param}' has no tokens.", param)
    # Without a wish of the client's there must be room for one token: a prompt that fills the context has no answer.
    wanted = 0 if request.only_echoes else request.max_tokens or 1
    context = context_length(info)
    if len(ids) + wanted > context:
        message = f"The context has {context} tokens; the prompt takes {len(ids)} and the answer may take {wanted}."
        raise ApiError(400, "context_length_exceeded", message, param=param)
    check_vocabulary(ids, info, param)


def submissions(
    request: GenerationRequest,
    prompts: Sequence[bytes],
    info: EngineInfo,
    *,
    request_id: str,
    seed: int,
    rids: Iterator[int],
    grammar: Grammar | None = None,
    resume: bytes = b"",
) -> list[Submit]:
    """One sequence a choice, prompt by prompt: choice j of prompt i has the index i * n + j."""
    gateway = request.field
    if gateway is not None:
        salt, priority, patience = gateway.salt, gateway.priority, gateway.patience
    else:
        salt, priority, patience = "", request.priority if info.takes_priority else 0, info.patience
    interrupts = (
        gateway is not None or not info.takes_priority
    )  # by a field of vLLM's what has begun is finished, as there
    return [
        Submit(
            rid=next(rids),
            request_id=request_id,
            prompt=prompt,
            salt=salt,
            priority=priority,
            patience=patience,
            interrupts=interrupts,
            resume=resume,
            sampling=_sampling(request, seed, choice, context_length(info) - len(prompt) // 4, grammar),
        )
        for prompt in prompts
        for choice in range(request.n)
    ]


def _sampling(request: GenerationRequest, seed: int, choice: int, room: int, grammar: Grammar | None) -> Sampling:
    return Sampling(
        max_tokens=_max_tokens(request, room),
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias,
        grammar=grammar,
        logprobs=request.logprobs,
        # What a stream said of its prompt it said at its beginning.
        prompt_logprobs=request.logprobs if request.echo and request.resume is None else None,
        seed=seed,
        choice=choice,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos and grammar is None,  # behind a grammar's sentence nothing can come
    )


def _max_tokens(request: GenerationRequest, room: int) -> int:
    """At least 1: where a client wants none, of its prompt's logprobs, the engine makes one and nobody shows it."""
    default = room if request.chat else min(DEFAULT_COMPLETION_TOKENS, room)
    return default if request.max_tokens is None else max(request.max_tokens, 1)
