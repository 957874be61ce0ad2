"""OpenAI request and error shapes as typed values. Pure: bytes in, values and bytes out.

A body is scanned once. What the gateway acts on becomes typed values; `messages`, `prompt` and everything it does not know
stay raw bytes and reach the replica as the client wrote them. Fields are added by splicing, never by encoding the body anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec

__all__ = [
    "ApiError",
    "Endpoint",
    "GenerationRequest",
    "Usage",
    "error_body",
    "model_body",
    "model_list_body",
    "parse_request",
    "parse_usage",
    "usage_of",
]

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]

_REFUSED: Final = ("chat_template", "cache_salt", "prompt_embeds", "kv_transfer_params", "truncate_prompt_tokens")
"""Fields that would reach into a replica's inside: templates run code, salts and transfers name other people's cache."""

_TYPE_BY_STATUS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}


class ApiError(Exception):
    """An answer other than success, in OpenAI's shape. The one exception that reaches the edge of a request."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        """`should_retry`: what OpenAI's SDKs are told, whatever they would do by themselves at this status."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return _TYPE_BY_STATUS.get(self.status, "invalid_request_error")

    def body(self) -> bytes:
        return error_body(self.message, type_=self.type, code=self.code, param=self.param)


def error_body(message: str, *, type_: str, code: str, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_ABSENT: Final = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The fields the gateway reads. Plain `Raw` with a default, since `Raw | None` refuses real values (msgspec#659)."""

    model: str
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    seed: int | None = None
    warmpath: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw = _ABSENT
    truncate_prompt_tokens: msgspec.Raw = _ABSENT


_body_decoder = msgspec.json.Decoder(_Body)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat or text completion request whose outer shape is valid."""

    endpoint: Endpoint
    model: str
    stream: bool
    include_usage: bool
    """Whether the client asked for the usage chunk of a stream."""
    has_stream_options: bool
    seed: int | None
    body: bytes

    @property
    def is_chat(self) -> bool:
        return self.endpoint == "/v1/chat/completions"

    def fields(self) -> dict[str, Any]:
        """The whole body decoded, for rendering a chat template. Raises `ApiError` 400 for what the first scan skipped."""
        try:
            decoded: dict[str, Any] = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_json(error) from error
        return decoded

    def upstream_body(self, extra: dict[str, Any]) -> bytes:
        """The client's bytes with `extra` fields put in front, and with usage asked for in every stream."""
        body = self.body
        if self.stream and not self.include_usage:
            extra = {**extra, "stream_options": {"include_usage": True}}
            if self.has_stream_options:
                body = _without(body, "stream_options")
        if not extra:
            return body
        head = msgspec.json.encode(extra)
        # Both may be long, so each is copied once.
        return b"".join((memoryview(head)[:-1], b",", memoryview(body)[body.index(b"{") + 1 :]))


def parse_request(endpoint: Endpoint, body: bytes, *, open_access: bool) -> GenerationRequest:
    """Check what routing relies on. Raises `ApiError` 400; ranges of sampling fields are the replica's to check.

    `open_access`: the gateway passes engine fields on, for it fronts replicas on behalf of nobody in particular.
    """
    try:
        fields = _body_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, "invalid_type", f"Invalid request: {error}", param=_param_of(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from error
    _refuse_inner_fields(fields, open_access=open_access)
    wanted = "messages" if endpoint == "/v1/chat/completions" else "prompt"
    value = bytes(getattr(fields, wanted))
    if not value:
        raise ApiError(400, "missing_required_parameter", f"Missing required parameter: '{wanted}'.", param=wanted)
    if wanted == "messages" and not value.startswith(b"["):
        raise ApiError(400, "invalid_type", "'messages' must be a list of messages.", param=wanted)
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(
            400, "invalid_value", "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return GenerationRequest(
        endpoint=endpoint,
        model=fields.model,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        has_stream_options=fields.stream_options is not None,
        seed=fields.seed,
        body=body,
    )


def _not_json(error: Exception) -> ApiError:
    why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError(400, "invalid_json", f"The request body is not valid JSON: {why}")


def _refuse_inner_fields(fields: _Body, *, open_access: bool) -> None:
    refused = ("warmpath",) if open_access else ("warmpath", *_REFUSED)
    for name in refused:
        if bytes(getattr(fields, name)):
            raise ApiError(400, "unknown_parameter", f"Unknown parameter: '{name}'.", param=name)


def _param_of(error: msgspec.ValidationError) -> str | None:
    """msgspec names the place as ``... - at `$.stream` ``."""
    message = str(error)
    if "missing required field `" in message:
        return message.split("`")[1]
    _, marker, place = message.partition(" - at `$.")
    return place.rstrip("`") if marker else None


def _without(body: bytes, name: str) -> bytes:
    """The same object with one member left out; every other value keeps its bytes."""
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    members.pop(name, None)
    return msgspec.json.encode(members)


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
"""More than any context; sums of these are exact in a metric's float for ever."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None when the replica does not report it."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


_usage_decoder = msgspec.json.Decoder(Usage | None)


def usage_of(reported: msgspec.Raw) -> Usage | None:
    """A usage object as a replica sent it; None for one that cannot be true, as when it sent none.

    A good answer is not made bad by its count: servers leave parts of it null, or give fractions.
    """
    try:
        return _usage_decoder.decode(reported)
    except (msgspec.MsgspecError, RecursionError):
        return None


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"null")


_answer_decoder = msgspec.json.Decoder(_Answer)


def parse_usage(answer: bytes) -> Usage | None:
    """Usage of a whole JSON answer. Raises `MsgspecError` when the bytes are no JSON object."""
    try:
        return usage_of(_answer_decoder.decode(answer).usage)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def model_list_body(models: Iterable[tuple[str, float]]) -> bytes:
    """The answer to ``GET /v1/models`` from (id, created) pairs."""
    return msgspec.json.encode({"object": "list", "data": [_model(name, created) for name, created in models]})


def model_body(name: str, created: float) -> bytes:
    """The answer to ``GET /v1/models/{id}``."""
    return msgspec.json.encode(_model(name, created))


def _model(name: str, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "warmpath"}
