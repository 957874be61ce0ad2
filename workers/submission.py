"""A checked request and the ids of its prompts → the sequences that the engine is to run. Pure.

Here a request meets the replica's own limits: its model, its context, its vocabulary. What passes cannot break the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from router.wire import decode_ids, unpack_ids
from workers.api_error import ApiError
from workers.openai import GenerationRequest
from workers.protocol import EngineInfo, Sampling, Submit

__all__ = ["check_model", "check_request", "check_vocabulary", "context_length", "given_ids", "submissions"]

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
    try:
        return decode_ids(request.field.prompt_ids)
    except ValueError as error:
        raise ApiError(400, "invalid_value", "'warmpath.prompt_ids' is no base64 of u32.", param="warmpath") from error


def check_request(request: GenerationRequest, prompts: Sequence[bytes], info: EngineInfo) -> None:
    """Raises `ApiError` 400 for what the engine must not see."""
    for prompt in prompts:
        _check_prompt(request, prompt, info)
    check_vocabulary(request.stop_token_ids, info, "stop_token_ids")


def check_vocabulary(ids: Sequence[int], info: EngineInfo, param: str) -> None:
    highest = max(ids, default=0)
    if highest >= info.vocab_size:
        message = f"'{param}' has the token id {highest}, and the vocabulary ends at {info.vocab_size - 1}."
        raise ApiError(400, "invalid_value", message, param=param)


def _check_prompt(request: GenerationRequest, prompt: bytes, info: EngineInfo) -> None:
    param = "messages" if request.chat else "prompt"
    ids = unpack_ids(prompt)
    if not ids:
        raise ApiError(400, "invalid_value", f"'{param}' has no tokens.", param=param)
    # Without a wish of the client's there must be room for one token: a prompt that fills the context has no answer.
    wanted = request.max_tokens or 1
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
) -> list[Submit]:
    """One sequence a choice, prompt by prompt: choice j of prompt i has the index i * n + j."""
    gateway = request.field
    return [
        Submit(
            rid=next(rids),
            request_id=request_id,
            prompt=prompt,
            salt=gateway.salt if gateway is not None else "",
            priority=gateway.priority if gateway is not None else 0,
            sampling=_sampling(request, seed, choice, room=context_length(info) - len(prompt) // 4),
        )
        for prompt in prompts
        for choice in range(request.n)
    ]


def _sampling(request: GenerationRequest, seed: int, choice: int, room: int) -> Sampling:
    default = room if request.chat else min(DEFAULT_COMPLETION_TOKENS, room)
    return Sampling(
        max_tokens=request.max_tokens or default,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=seed,
        choice=choice,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )
