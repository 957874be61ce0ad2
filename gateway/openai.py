"""OpenAI request and answer shapes as typed values. Pure: bytes in, values and bytes out.

What the gateway acts on becomes typed values; the body reaches the replica as the client wrote it, with fields added by
splicing, never by encoding it anew. Where a talk may be known by its bytes, `messages` and `prompt` stay raw (`parse_request`);
where all of the prompt will be looked at anyhow, the body is decoded at once (`parse_decoded`). Both find the same valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec

from gateway.api_error import ApiError
from gateway.json_body import decode_object, invalid_json

__all__ = [
    "ENDPOINTS",
    "REFUSED",
    "Body",
    "Endpoint",
    "GenerationRequest",
    "Response",
    "Usage",
    "parse_decoded",
    "parse_request",
    "parse_response",
    "parse_usage",
    "usage_of",
]

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize"
]

_PROMPT_FIELDS: Final[Mapping[Endpoint, str | None]] = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": None,  # `input` is one way of several to say what is asked
    "/tokenize": None,  # `prompt` or `messages`
    "/detokenize": "tokens",
}
"""The field without which there is nothing to answer."""

ENDPOINTS: Final = frozenset(_PROMPT_FIELDS)
"""Where replicas are asked. All of them take POST."""

_STREAMING: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_USAGE_ON_REQUEST: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Streams that end with their usage only if ``stream_options`` asks for it. Responses always do."""

_MAX_ITEMS: Final = 2048
"""Messages, parts of messages, inputs: each costs a step of its own, here and at the replica. OpenAI's limit for inputs."""

_TELLING_BYTES: Final = 64
"""Of a list, by which its place is found: to search for all of it would take a table as long as it."""
_FEW_BYTES: Final = 100_000
"""Half of `MAX_VALUES` at most, which leaves the other half to what is known."""

_COUNT_DIGITS: Final = 16
_MOST_COUNTED: Final = 1 << 31

REFUSED: Final = ("chat_template", "cache_salt", "prompt_embeds", "kv_transfer_params", "truncate_prompt_tokens")
"""Fields that would reach into a replica's inside: templates run code, salts and transfers name other people's cache."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_ABSENT: Final = msgspec.Raw(b"")


class Body(msgspec.Struct):
    """The fields that the gateway reads, of whatever endpoint. Plain `Raw` with a default, since `Raw | None` refuses real
    values (msgspec#659).
    """

    model: str
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    tokens: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT
    conversation: msgspec.Raw = _ABSENT
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    seed: int | None = None
    max_tokens: msgspec.Raw = _ABSENT
    max_completion_tokens: msgspec.Raw = _ABSENT
    max_output_tokens: msgspec.Raw = _ABSENT
    n: msgspec.Raw = _ABSENT
    best_of: msgspec.Raw = _ABSENT
    warmpath: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw = _ABSENT
    truncate_prompt_tokens: msgspec.Raw = _ABSENT
    priority: msgspec.Raw = _ABSENT


_body_decoder = msgspec.json.Decoder(Body)

_DecodedBody: Final = msgspec.defstruct(
    "_DecodedBody",
    [
        ("model", str),
        *(
            (each.name, Any if each.type is msgspec.Raw else each.type, each.default)
            for each in msgspec.structs.fields(Body)
            if not each.required
        ),
    ],
)
"""The same of a body that is decoded already: values where `Body` has raw bytes."""

_INNER: Final = ("warmpath", *REFUSED)
_inner_of = attrgetter(*_INNER)
_NO_INNER: Final = (_ABSENT,) * len(_INNER)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to replicas whose outer shape is valid."""

    endpoint: Endpoint
    model: str
    method: Literal["GET", "POST", "DELETE"] = "POST"
    subpath: str = ""
    """What follows the endpoint in the path, and the query: of a response that is there already."""
    stream: bool = False
    include_usage: bool = False
    """Whether the client asked for the usage chunk of a stream."""
    has_stream_options: bool = False
    has_priority: bool = False
    seed: int | None = None
    max_tokens: int | None = None
    """The most that each choice may generate; None: the request does not say."""
    choices: int = 1
    follows: str | None = None
    """Id of the response or conversation that this one goes on from."""
    body: bytes = b""
    messages: msgspec.Raw = msgspec.Raw(b"")
    """As they are in the body."""

    @property
    def is_chat(self) -> bool:
        return self.endpoint == "/v1/chat/completions"

    @property
    def is_response(self) -> bool:
        return self.endpoint == "/v1/responses"

    @property
    def generates(self) -> bool:
        """Whether its answer is tokens that are computed one after the other."""
        return self.endpoint in _STREAMING and not self.subpath

    @property
    def computes(self) -> bool:
        """Whether a replica computes a prompt for it."""
        return self.generates or self.endpoint == "/v1/embeddings"

    @property
    def path(self) -> str:
        return self.endpoint + self.subpath

    def fields(self) -> dict[str, Any]:
        """The whole body decoded. Raises `ApiError` 400 for what the first scan skipped."""
        fields = decode_object(self.body)
        _require_few_items(fields)
        return fields

    def fields_behind(self, messages: bytes, num_known: int) -> dict[str, Any] | None:
        """`fields`, with those messages only that come behind the first bytes of `messages`, as `fields` found them valid in
        another request; there is a comma. `messages`: the same as ours. None where `fields` must say.
        """
        start = self.body.find(messages[:_TELLING_BYTES])
        if not self.body.startswith(messages, start):
            return None
        end = start + len(messages)
        # Where the null comes out is the list that counts, and not another one like it.
        parts = (self.body[:start], b"[null", messages[num_known:], self.body[end:])
        shortened = b"".join(parts)
        if len(shortened) > _FEW_BYTES:
            return None
        try:
            fields = decode_object(shortened)
        except ApiError:
            return None
        new = fields["messages"]
        if new[0] is not None:
            return None
        fields["messages"] = new[1:]
        return fields

    def upstream_body(self, extra: dict[str, Any]) -> bytes:
        """The client's bytes with `extra` fields put in front, and with usage asked for in every stream."""
        body = self.body
        if self.has_priority and "priority" in extra:
            body = _without(body, "priority")
        if self.stream and not self.include_usage and self.endpoint in _USAGE_ON_REQUEST:
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
        raise _invalid_type(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(str(error)) from error
    except RecursionError as error:
        raise invalid_json("it is nested too deeply") from error
    return _request(endpoint, fields, body, fields.messages, open_access=open_access)


def parse_decoded(endpoint: Endpoint, body: bytes, *, open_access: bool) -> tuple[GenerationRequest, dict[str, Any]]:
    """The same, and what `GenerationRequest.fields` would give: for half the time where both are needed."""
    if not body.startswith(b"{"):  # white space is before it, or it is no object
        request = parse_request(endpoint, body, open_access=open_access)
        return request, request.fields()
    decoded = decode_object(body)
    try:
        fields = msgspec.convert(decoded, _DecodedBody)
    except msgspec.ValidationError as error:
        raise _invalid_type(error) from error
    _require_few_items(decoded)
    return _request(endpoint, fields, body, _ABSENT, open_access=open_access), decoded


def _request(
    endpoint: Endpoint, fields: Any, body: bytes, messages: msgspec.Raw, *, open_access: bool
) -> GenerationRequest:
    """`fields`: a `Body`, raw or decoded."""
    if _inner_of(fields) != _NO_INNER:
        _refuse_inner_fields(fields, open_access=open_access)
    _require_prompt(endpoint, fields)
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(
            400, "invalid_value", "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return GenerationRequest(
        endpoint=endpoint,
        model=fields.model,
        stream=bool(fields.stream) and endpoint in _STREAMING,
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        has_stream_options=fields.stream_options is not None,
        has_priority=fields.priority is not _ABSENT,
        seed=fields.seed,
        max_tokens=_most(fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens),
        choices=_most(fields.n, fields.best_of) or 1,
        follows=_followed(fields) if endpoint == "/v1/responses" else None,
        body=body,
        messages=messages,
    )


def _most(*values: Any) -> int | None:
    """Of those that are given: which of them counts is a replica's to say, and it may be the largest."""
    most = None
    for value in values:
        if value is not _ABSENT and (count := _count(value)) is not None and (most is None or count > most):
            most = count
    return most


def _count(value: object) -> int | None:
    """A number that only limits look at; what is none is the replica's to refuse."""
    if type(value) is int and value >= 0:
        return min(value, _MOST_COUNTED)
    try:
        if type(value) is msgspec.Raw:
            digits = bytes(value)
            if digits.isdigit() and len(digits) <= _COUNT_DIGITS:
                return min(int(digits), _MOST_COUNTED)
            value = msgspec.json.decode(digits)
        number = float(value)  # type: ignore[arg-type]  # there are replicas that take "16", 16.0 and 1e9 for numbers
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return int(min(number, _MOST_COUNTED)) if number >= 0 else None


def _require_prompt(endpoint: Endpoint, fields: Any) -> None:
    wanted = _PROMPT_FIELDS[endpoint]
    if wanted is None:
        return
    value = getattr(fields, wanted)
    if type(value) is msgspec.Raw:
        beginning = bytes(memoryview(value)[:4])
        is_given, is_list = beginning not in (b"", b"null"), beginning.startswith(b"[")
    else:
        is_given, is_list = value is not None, type(value) is list
    if not is_given:
        raise ApiError(400, "missing_required_parameter", f"Missing required parameter: '{wanted}'.", param=wanted)
    if wanted == "messages" and not is_list:
        raise ApiError(400, "invalid_type", "'messages' must be a list of messages.", param=wanted)


def _require_few_items(fields: Mapping[str, Any]) -> None:
    for name in ("messages", "input"):
        items = fields.get(name)
        if not isinstance(items, list) or not items or type(items[0]) is int:
            continue
        num_items = len(items)
        for item in items:
            if type(item) is dict and type(content := item.get("content")) is list:
                num_items += len(content)
        if num_items > _MAX_ITEMS:
            raise ApiError(
                400, "invalid_value", f"'{name}' may hold {_MAX_ITEMS} items and parts of content.", param=name
            )


class _Named(msgspec.Struct):
    id: str


_Followed = str | _Named | None
_followed_decoder: msgspec.json.Decoder[_Followed] = msgspec.json.Decoder(_Followed)


def _followed(fields: Any) -> str | None:
    for value in (fields.previous_response_id, fields.conversation):
        if value is _ABSENT:
            continue
        try:
            is_raw = type(value) is msgspec.Raw
            named = _followed_decoder.decode(value) if is_raw else msgspec.convert(value, _Followed)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue  # the replica says what is wrong with it
        if named is not None:
            return named if isinstance(named, str) else named.id
    return None


def _refuse_inner_fields(fields: Any, *, open_access: bool) -> None:
    for name in ("warmpath",) if open_access else _INNER:
        if getattr(fields, name) is not _ABSENT:
            raise ApiError(400, "unknown_parameter", f"Unknown parameter: '{name}'.", param=name)


def _invalid_type(error: msgspec.ValidationError) -> ApiError:
    return ApiError(400, "invalid_type", f"Invalid request: {error}", param=_param_of(error))


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


class _CachedTokens(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    prompt_tokens_details: _CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None when the replica does not report it."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _ResponseUsage(msgspec.Struct, frozen=True):
    """The same in a Response's words."""

    input_tokens: _Tokens = 0
    output_tokens: _Tokens = 0
    input_tokens_details: _CachedTokens | None = None


_usage_decoder = msgspec.json.Decoder(Usage | None)
_response_usage_decoder = msgspec.json.Decoder(_ResponseUsage)


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


class _UsualAnswer(msgspec.Struct):
    """One whose count is as it should be."""

    usage: Usage | None = None


class Response(msgspec.Struct):
    """What the gateway reads of an answer of ``/v1/responses``."""

    id: str = ""
    reported: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="usage")

    @property
    def usage(self) -> Usage | None:
        """None for one that cannot be true, as when none was sent (`usage_of`)."""
        try:
            usage = _response_usage_decoder.decode(self.reported)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return Usage(usage.input_tokens, usage.output_tokens, usage.input_tokens_details)


_answer_decoder = msgspec.json.Decoder(_Answer)
_usual_answer_decoder = msgspec.json.Decoder(_UsualAnswer)
_response_decoder = msgspec.json.Decoder(Response)


def parse_usage(answer: bytes) -> Usage | None:
    """Usage of a whole JSON answer. Raises `MsgspecError` when the bytes are no JSON object."""
    try:
        try:
            return _usual_answer_decoder.decode(answer).usage
        except msgspec.ValidationError:
            return usage_of(_answer_decoder.decode(answer).usage)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def parse_response(answer: bytes) -> Response:
    """Of a whole answer of ``/v1/responses``. Raises as `parse_usage` does."""
    return _response_decoder.decode(answer)
