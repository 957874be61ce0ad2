"""What clients may call, for an OpenAPI document: every route of the client listener, and the fields that bodies may have.

Fields that the gateway reads itself have the types by which it reads them (`gateway.openai.Body`). The others it passes on;
they are described as our own workers take them, which refuse what is out of range. Fields that are not here pass as well, to
replicas that know more, except `REFUSED`, which no client may send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.api_document import Needs, Operation
from gateway.openai import REFUSED, Body, Endpoint
from router.chat_rules import MAX_MESSAGES, MAX_TOOLS

__all__ = ["PUBLIC_OPERATIONS", "request_schema"]

_MAX_INTEGER: Final = 1 << 53
_Count = Annotated[int, Meta(ge=0, le=_MAX_INTEGER)]
_TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    """A string or parts of text; only an assistant's may be left out."""


class ToolFunction(msgspec.Struct):
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    type: str
    function: ToolFunction


class Sampling(msgspec.Struct, kw_only=True):
    """What chat and text completions share."""

    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    min_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INTEGER)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=1024)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER)] | None = None
    """Without effect where the gateway says in which order prompts are computed; it takes a priority in the header
    `x-warmpath-priority`."""


class ChatCompletionRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | Annotated[list[Any], Meta(min_length=1)]
    """A text, token ids, or a list of either."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Any = None
    """Own workers take 1 at most."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    input: Any
    """A text, token ids, or a list of either."""
    priority: Any = None
    """As above."""


class ResponseRequest(msgspec.Struct, kw_only=True):
    input: Any = None
    previous_response_id: Any = None
    """It goes to the replica that made that one; so does a `conversation`."""
    conversation: Any = None
    max_output_tokens: Any = None
    priority: Any = None
    """As above."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: Any = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[_TokenId]


class Completion(msgspec.Struct, kw_only=True):
    """As the replica gives it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any] | None = None


class Tokens(msgspec.Struct):
    count: int
    tokens: list[int]
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    prompt: str


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


_REQUESTS: Final[Mapping[Endpoint, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_STREAMED: Final = ("stream", "stream_options")
_READ: Final[Mapping[Endpoint, Sequence[str]]] = {
    "/v1/chat/completions": ("model", "seed", *_STREAMED),
    "/v1/completions": ("model", "seed", *_STREAMED),
    "/v1/embeddings": ("model",),
    "/v1/responses": ("model", *_STREAMED),
    "/tokenize": ("model",),
    "/detokenize": ("model",),
}
"""Fields whose types are `Body`'s."""
_FAILURES: Final = (502, 503, 504)


def request_schema(endpoint: Endpoint) -> dict[str, Any]:
    """The JSON schema of a body."""
    schema = _inlined(_REQUESTS[endpoint])
    types = {field.name: field.type for field in msgspec.structs.fields(Body)}
    properties = schema["properties"] | {name: _inlined(types[name]) for name in _READ[endpoint]}
    refused = dict.fromkeys(("warmpath", *REFUSED), False)  # a schema that nothing fits
    return {**schema, "properties": properties | refused, "required": ["model", *schema.get("required", ())]}


def _inlined(type_: Any) -> dict[str, Any]:
    """A schema without references, since it becomes part of another."""
    [schema], components = msgspec.json.schema_components([type_], ref_template="{name}")

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(name := value.get("$ref"), str):
            return inline(components[name])
        return {key: inline(item) for key, item in value.items()}

    inlined: dict[str, Any] = inline(schema)
    return inlined


def _asking(endpoint: Endpoint, summary: str, answer: Any, *, streams: bool = False) -> Operation:
    return Operation(
        method="POST",
        path=endpoint,
        needs=Needs.CLIENT,
        summary=summary,
        body=request_schema(endpoint),
        answer=answer,
        failures=_FAILURES,
        streams=streams,
    )


def _stored(method: Literal["GET", "POST", "DELETE"], subpath: str, summary: str) -> Operation:
    return Operation(
        method=method,
        path=f"/v1/responses/{{id}}{subpath}",
        needs=Needs.CLIENT,
        summary=summary,
        answer=dict[str, Any],
        failures=_FAILURES,
        streams=(method, subpath) == ("GET", ""),
    )


PUBLIC_OPERATIONS: Final[Sequence[Operation]] = (
    _asking("/v1/chat/completions", "Answer a chat", Completion, streams=True),
    _asking("/v1/completions", "Go on from a text", Completion, streams=True),
    _asking("/v1/embeddings", "Embed texts; foreign replicas only", dict[str, Any]),
    _asking("/v1/responses", "Make a response; foreign replicas only", dict[str, Any], streams=True),
    _stored("GET", "", "A response that was made before"),
    _stored("DELETE", "", "Forget a response"),
    _stored("POST", "/cancel", "End a response that is being made"),
    _stored("GET", "/input_items", "What a response was made from"),
    _asking("/tokenize", "A text or a chat as token ids", Tokens),
    _asking("/detokenize", "Token ids as text", Text),
    Operation(
        method="GET", path="/v1/models", needs=Needs.CLIENT, summary="Models that the key may ask", answer=Models
    ),
    Operation(method="GET", path="/v1/models/{model:path}", needs=Needs.CLIENT, summary="One of them", answer=Model),
    Operation(
        method="GET",
        path="/health",
        needs=Needs.NO_KEY,
        summary="Whether the gateway lives",
        answer=str,
    ),
)
