"""OpenAI requests as a replica takes them: bytes in, checked values out. Pure; it knows no engine, tokenizer or socket.

What must hold: a value that leaves this module cannot break the engine. Types and ranges are checked here (a bool is no
int, 1.0 is no int, NaN is no number), and a field that would change the answer but is not built yet is refused by name.
It is never ignored in silence. Fields unknown to us change nothing here and pass.

`messages` and `prompt` stay raw bytes until they are needed: the gateway sends the token ids along, and then nothing of
the prompt's text is read.

Tools: the chat template sees them, so the model does; what it writes comes back as plain content, since calls are not
parsed yet. ``tool_choice`` none and auto are therefore true as far as they go, and any other choice is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from router.wire import PromptField
from workers.api_error import ApiError, decode_json, invalid_value
from workers.prompts import TokenId

__all__ = ["GenerationRequest", "parse_chat", "parse_completion", "sane_request_id"]

MAX_CHOICES: Final = 8
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKENS: Final = 64
MAX_SALT_CHARS: Final = 256
MAX_INTEGER: Final = 1 << 53
"""Where nothing else bounds a number: what every JSON reader and our wire format can carry."""

LEAST_TEMPERATURE: Final = 1e-5
"""Below it logits divided by the temperature overflow, and the most likely token is what remains."""

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SEED_MIN: Final = -(1 << 63)
_SEED_MASK: Final = (1 << 64) - 1


def sane_request_id(text: str) -> bool:
    """Whether a request id from outside may be logged and echoed as it is."""
    return _REQUEST_ID.fullmatch(text) is not None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What chat and text completions share. A null is the same as an absent field."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INTEGER)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_INTEGER)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    warmpath: PromptField | None = None
    # What follows is only looked at to refuse it.
    logprobs: Any = None
    prompt_logprobs: Any = None
    best_of: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    logit_bias: Any = None
    min_p: Any = None
    min_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    thinking_token_budget: Any = None
    chat_template: Any = None
    cache_salt: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    truncate_prompt_tokens: Any = None


class _ChatBody(_Body, kw_only=True):
    messages: Raw = Raw(b"")
    top_logprobs: Any = None
    tool_choice: Any = None
    function_call: Any = None
    functions: Any = None
    audio: Any = None
    add_special_tokens: bool | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: Raw = Raw(b"")
    echo: Any = None
    suffix: Any = None
    add_special_tokens: bool | None = None


_FORBIDDEN: Final = ("chat_template", "cache_salt", "prompt_embeds", "kv_transfer_params", "truncate_prompt_tokens")
"""They reach into the replica: templates run code, salts and transfers name other people's cache."""


_HARMLESS: Final[Mapping[str, tuple[object, ...]]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that would change the answer and are not built yet → the values besides null that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request whose every value but the prompt is known to be good."""

    chat: bool
    model: str | None
    """None: the client left the choice to us."""
    n: int
    max_tokens: int | None
    """As the client said it; None leaves it to the kind of request and the context."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    """u64."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    add_special_tokens: bool
    """Text prompts only; a chat template writes its special tokens itself."""
    field: PromptField | None
    prompt: bytes
    """Raw JSON of ``messages`` or ``prompt``; b'' when absent."""
    body: bytes


_chat_decoder = msgspec.json.Decoder(_ChatBody)
_completion_decoder = msgspec.json.Decoder(_CompletionBody)


def parse_chat(body: bytes) -> GenerationRequest:
    """``POST /v1/chat/completions``. Raises `ApiError` 400. The messages are checked by `workers.prompts`."""
    fields = decode_json(_chat_decoder, body)
    request = _checked(fields, chat=True, body=body, prompt=bytes(fields.messages), add_special_tokens=False)
    if fields.add_special_tokens:
        raise _unsupported("add_special_tokens")
    _require_prompt(request, "messages")
    return request


def parse_completion(body: bytes) -> GenerationRequest:
    """``POST /v1/completions``. Raises `ApiError` 400. The prompt is checked by `workers.prompts`."""
    fields = decode_json(_completion_decoder, body)
    add_special_tokens = fields.add_special_tokens is not False
    request = _checked(
        fields, chat=False, body=body, prompt=bytes(fields.prompt), add_special_tokens=add_special_tokens
    )
    _require_prompt(request, "prompt")
    return request


def _checked(fields: _Body, *, chat: bool, body: bytes, prompt: bytes, add_special_tokens: bool) -> GenerationRequest:
    _refuse_what_is_not_built(fields)
    if fields.stream_options is not None and not fields.stream:
        raise invalid_value("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    if fields.warmpath is not None:
        _check_field(fields.warmpath)
    return GenerationRequest(
        chat=chat,
        model=fields.model,
        n=fields.n or 1,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        temperature=_temperature(fields.temperature),
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),
        seed=_seed(fields),
        stop=_stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        add_special_tokens=add_special_tokens,
        field=fields.warmpath,
        prompt=prompt,
        body=body,
    )


def _refuse_what_is_not_built(fields: _Body) -> None:
    for name in _FORBIDDEN:
        if getattr(fields, name) is not None:
            raise ApiError(400, "unknown_parameter", f"Unknown parameter: '{name}'.", param=name)
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        if value is not None and name in _HARMLESS and not any(_same(value, harmless) for harmless in _HARMLESS[name]):
            raise _unsupported(name)


def _same(value: object, other: object) -> bool:
    """Equal as JSON: 0 is 0.0, but false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _unsupported(name: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"This value of '{name}' is not supported here.", param=name)


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    return value if value >= LEAST_TEMPERATURE else 0.0


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise invalid_value(f"'stop' takes strings of 1 to {MAX_STOP_CHARS} characters.", "stop")
    return stops


def _seed(fields: _Body) -> int | None:
    """The gateway's seed goes first: it drew it for a retry to reuse."""
    seed = fields.seed
    if fields.warmpath is not None and fields.warmpath.seed is not None:
        seed = fields.warmpath.seed
    if seed is None:
        return None
    if not _SEED_MIN <= seed <= _SEED_MASK:
        raise invalid_value("'seed' must fit into 64 bits.", "seed")
    return seed & _SEED_MASK


def _check_field(field: PromptField) -> None:
    if field.request_id and not sane_request_id(field.request_id):
        raise invalid_value("'warmpath.request_id' takes 1 to 128 letters, digits, '_' and '-'.", "warmpath.request_id")
    if len(field.salt) > MAX_SALT_CHARS:
        raise invalid_value(f"'warmpath.salt' takes at most {MAX_SALT_CHARS} characters.", "warmpath.salt")
    if abs(field.priority) > 1 << 31:
        raise invalid_value("'warmpath.priority' must fit into 32 bits.", "warmpath.priority")


def _require_prompt(request: GenerationRequest, name: str) -> None:
    if request.prompt in (b"", b"null") and not (request.field and request.field.prompt_ids):
        raise ApiError(400, "missing_required_parameter", f"Missing required parameter: '{name}'.", param=name)
