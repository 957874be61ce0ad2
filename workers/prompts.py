"""The prompt of a request as a client wrote it: messages, texts or ids, checked as far as a tokenizer cannot. Pure.

Read only when the gateway did not send the ids along.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from router.chat_rules import check_chat
from router.prompt_errors import PromptError
from workers.api_error import ApiError, decode_json, invalid_value

__all__ = [
    "MAX_PROMPTS",
    "DetokenizeRequest",
    "Prompt",
    "TokenId",
    "TokenizeRequest",
    "Tool",
    "ToolFunction",
    "chat_fields",
    "completion_prompts",
    "parse_detokenize",
    "parse_tokenize",
]

MAX_PROMPTS: Final = 128
"""Prompts in one completions body, times `n`. Each choice is a sequence of its own, so this bounds what one request may put
in the queue: a request that fills it alone would be told for ever to come again."""

TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]


class ToolFunction(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments; None: any object."""
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """What we read of a tool; the chat template sees all of it."""

    type: str
    function: ToolFunction


_object_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


def chat_fields(body: bytes) -> dict[str, Any]:
    """The decoded body for the chat template, once its messages and tools are known to be well formed."""
    fields = decode_json(_object_decoder, body)
    try:
        check_chat(fields)
    except PromptError as error:
        raise ApiError(400, error.code, str(error), param=error.param) from error
    return fields


Prompt = str | list[int]

_prompt_decoder: msgspec.json.Decoder[str | list[str | TokenId | list[TokenId]]] = msgspec.json.Decoder(
    str | list[str | TokenId | list[TokenId]]
)


def completion_prompts(raw: bytes) -> list[Prompt]:
    """A string, ids, a list of strings or a list of id lists → one prompt each, none empty."""
    value = decode_json(_prompt_decoder, raw, root="prompt")
    prompts = _as_prompts(value)
    if not prompts or not all(prompts):
        raise invalid_value("'prompt' must not be empty.", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise invalid_value(f"'prompt' takes at most {MAX_PROMPTS} prompts.", "prompt")
    return prompts


def _as_prompts(value: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    ids = [item for item in value if isinstance(item, int)]
    if ids and len(ids) == len(value):
        return [ids]
    prompts: list[Prompt] = [item for item in value if not isinstance(item, int)]
    if len(prompts) != len(value) or len({type(prompt) for prompt in prompts}) > 1:
        raise invalid_value("'prompt' must be a string, token ids, a list of strings or a list of id lists.", "prompt")
    return prompts


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a text, or a chat to be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: Raw = Raw(b"")
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    request = decode_json(_tokenize_decoder, body)
    if (request.prompt is None) == (bytes(request.messages) in (b"", b"null")):
        raise ApiError(400, "missing_required_parameter", "Give either 'prompt' or 'messages'.", param="prompt")
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    return decode_json(_detokenize_decoder, body)
