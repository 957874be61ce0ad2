"""``/tokenize`` and ``/detokenize`` from a pool's own tokenizer, in vLLM's shape: what its replicas would say, and no call.

A pool whose tokenizer is not here is asked as for any other request (`gateway.dispatch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.api_error import ApiError
from gateway.model_cards import ModelCards
from gateway.openai import GenerationRequest
from gateway.prepare import Prompters
from router import Pool
from router.chat_rules import check_chat
from router.prompt import Prompter, PromptError

__all__ = ["Tokenizing"]


class Tokenizing:
    def __init__(self, prompters: Prompters, cards: ModelCards, executor: Executor) -> None:
        self._prompters = prompters
        self._cards = cards
        self._executor = executor

    async def answer(self, request: GenerationRequest, pool: Pool) -> bytes | None:
        """The whole answer; None where the pool's tokenizer is not here. Raises `ApiError` 400."""
        prompter = self._prompters.get(pool.tokenizer_digest) if pool.key_space == "tokens" else None
        if prompter is None:
            return None
        loop = asyncio.get_running_loop()
        if request.endpoint == "/detokenize":
            return await loop.run_in_executor(self._executor, _detokenize, request, prompter)
        max_model_len = self._cards.max_model_len(pool.model)
        return await loop.run_in_executor(self._executor, _tokenize, request, prompter, max_model_len)


def _tokenize(request: GenerationRequest, prompter: Prompter, max_model_len: int | None) -> bytes:
    fields = request.fields()
    with_texts = fields.get("return_token_strs")
    if with_texts not in (None, False, True):
        raise ApiError(400, "invalid_type", "'return_token_strs' must be a boolean.", param="return_token_strs")
    try:
        ids = _ids(fields, prompter)
    except PromptError as error:
        raise ApiError(400, error.code, str(error), param=error.param) from error
    # Each token alone, as own workers say it: U+FFFD stands for the part of a character.
    texts = [prompter.token_bytes(id_).decode(errors="replace") for id_ in ids] if with_texts else None
    answer = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts}
    return msgspec.json.encode(answer)


def _ids(fields: Mapping[str, Any], prompter: Prompter) -> list[int]:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise PromptError("Give either 'prompt' or 'messages'.", code="missing_required_parameter", param="prompt")
    if messages is not None:
        check_chat(fields)
        return list(prompter.encode_chat(fields, now=datetime.now(UTC)))
    if not isinstance(prompt, str):
        raise PromptError("'prompt' must be a string.", code="invalid_type", param="prompt")
    return list(prompter.encode_text(prompt, fields.get("add_special_tokens") is not False))


def _detokenize(request: GenerationRequest, prompter: Prompter) -> bytes:
    tokens = request.fields()["tokens"]
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token <= prompter.max_id for token in tokens
    ):
        raise ApiError(400, "invalid_value", "'tokens' must be a list of token ids.", param="tokens")
    return msgspec.json.encode({"prompt": prompter.decode(tokens)})
