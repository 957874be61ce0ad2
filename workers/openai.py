"""OpenAI requests as a replica takes them: bytes in, checked values out. Pure; it knows no engine, tokenizer or socket.

What must hold: a value that leaves this module cannot break the engine. Types and ranges are checked (`workers.body`), and so
is here what one field means for another; what depends on the replica's own limits is `workers.submission`'s. A field that
would change the answer but is not known to us is refused by name, never ignored in silence. Fields that change nothing pass.

`messages` and `prompt` stay raw bytes until they are needed: the gateway sends the token ids along, and then nothing of
the prompt's text is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from router.wire import PromptField, Resume
from workers.api_error import ApiError, decode_json, invalid_value
from workers.body import FORBIDDEN, HARMLESS, MAX_INTEGER, Body, ChatBody, CompletionBody, NamedTool
from workers.prompts import Tool

__all__ = ["GenerationRequest", "ToolUse", "parse_chat", "parse_completion", "sane_request_id"]

MAX_STOP_CHARS: Final = 256
MAX_SALT_CHARS: Final = 256
MAX_PATIENCE: Final = 100

LEAST_TEMPERATURE: Final = 1e-5
"""Below it logits divided by the temperature overflow, and the most likely token is what remains."""

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RESPONSE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,160}")
_SEED_MIN: Final = -(1 << 63)
_SEED_MASK: Final = (1 << 64) - 1


def sane_request_id(text: str) -> bool:
    """Whether a request id from outside may be logged and echoed as it is."""
    return _REQUEST_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools the model may call, and whether it has to."""

    tools: tuple[Tool, ...]
    choice: Literal["none", "auto", "required", "named"]
    parallel: bool
    """Whether there may be more than one call."""
    name: str | None = None
    """Of the function that must be called, with ``named``."""

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request whose every value but the prompt is known to be good."""

    chat: bool
    model: str | None
    """None: the client left the choice to us."""
    n: int
    max_tokens: int | None
    """As the client said it; None leaves it to the kind of request and the context. 0 with `echo` only: no answer."""
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    seed: int | None
    """u64."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    """Whether the text ends behind what stopped it, not before."""
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    """How many likely tokens to tell beside each chosen one; None: no logprobs at all."""
    echo: bool
    """Whether the prompt comes first in the answer. Text completions only."""
    return_token_ids: bool
    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    tool_use: ToolUse | None
    include_reasoning: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Whether every event tells the usage so far."""
    add_special_tokens: bool
    """Text prompts only; a chat template writes its special tokens itself."""
    priority: int
    field: PromptField | None
    prompt: bytes
    """Raw JSON of ``messages`` or ``prompt``; b'' when absent."""
    body: bytes

    @property
    def only_echoes(self) -> bool:
        """Whether the answer is the prompt and nothing else, so that no engine has to do with it."""
        return self.max_tokens == 0 and self.logprobs is None

    @property
    def resume(self) -> Resume | None:
        return self.field.resume if self.field is not None else None


_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


def parse_chat(body: bytes) -> GenerationRequest:
    """``POST /v1/chat/completions``. Raises `ApiError` 400. The messages are checked by `workers.prompts`."""
    fields = decode_json(_chat_decoder, body)
    _refuse_unknown(fields, ChatBody)
    if fields.add_generation_prompt and fields.continue_final_message:
        message = "'add_generation_prompt' and 'continue_final_message' exclude each other."
        raise invalid_value(message, "continue_final_message")
    if fields.top_logprobs and not fields.logprobs:
        raise invalid_value("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    request = _checked(
        fields,
        body,
        messages_or_prompt=bytes(fields.messages),
        chat=True,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        tool_use=_tool_use(fields),
        include_reasoning=fields.include_reasoning is not False,
    )
    _require_prompt(request, "messages")
    return request


def parse_completion(body: bytes) -> GenerationRequest:
    """``POST /v1/completions``. Raises `ApiError` 400. The prompt is checked by `workers.prompts`."""
    fields = decode_json(_completion_decoder, body)
    _refuse_unknown(fields, CompletionBody)
    request = _checked(
        fields,
        body,
        messages_or_prompt=bytes(fields.prompt),
        chat=False,
        logprobs=fields.logprobs,
        echo=bool(fields.echo),
        add_special_tokens=fields.add_special_tokens is not False,
    )
    _require_prompt(request, "prompt")
    return request


def _checked(
    fields: Body,
    body: bytes,
    *,
    chat: bool,
    messages_or_prompt: bytes,
    logprobs: int | None,
    echo: bool = False,
    tool_use: ToolUse | None = None,
    include_reasoning: bool = True,
    add_special_tokens: bool = False,
) -> GenerationRequest:
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise invalid_value("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    if fields.warmpath is not None:
        _check_field(fields.warmpath, resumable=bool(fields.stream) and fields.n in (None, 1))
    include_usage = bool(options and options.include_usage)
    return GenerationRequest(
        chat=chat,
        model=fields.model,
        n=fields.n or 1,
        max_tokens=_max_tokens(fields, least=0 if echo else 1),
        min_tokens=fields.min_tokens or 0,
        temperature=_temperature(fields.temperature),
        top_p=_or(fields.top_p, 1.0),
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        logit_bias=fields.logit_bias or {},
        seed=_seed(fields),
        stop=_stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=fields.skip_special_tokens is not False,
        logprobs=logprobs,
        echo=echo,
        return_token_ids=bool(fields.return_token_ids),
        response_format=fields.response_format,
        structured_outputs=fields.structured_outputs,
        tool_use=tool_use,
        include_reasoning=include_reasoning,
        stream=bool(fields.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        add_special_tokens=add_special_tokens,
        priority=_priority(fields),
        field=fields.warmpath,
        prompt=messages_or_prompt,
        body=body,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _refuse_unknown(fields: Body, kind: type[Body]) -> None:
    for name in FORBIDDEN:
        if getattr(fields, name) is not None:
            raise ApiError(400, "unknown_parameter", f"Unknown parameter: '{name}'.", param=name)
    for name, harmless in (*HARMLESS[Body].items(), *HARMLESS[kind].items()):
        value = getattr(fields, name)
        if value is not None and not any(_same(value, other) for other in harmless):
            raise ApiError(400, "unsupported_parameter", f"This value of '{name}' is not supported here.", param=name)


def _same(value: object, other: object) -> bool:
    """Equal as JSON: 0 is 0.0, but false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _max_tokens(fields: Body, least: int) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):  # the first one wins
        value: int | None = getattr(fields, name)
        if value is not None:
            if value < least:
                raise invalid_value(f"'{name}' must be at least {least}.", name)
            return value
    return None


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    return value if value >= LEAST_TEMPERATURE else 0.0


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise invalid_value(f"'stop' takes strings of 1 to {MAX_STOP_CHARS} characters.", "stop")
    return stops


def _tool_use(fields: ChatBody) -> ToolUse | None:
    choice = fields.tool_choice
    if fields.tools is None:
        if choice not in (None, "none"):
            raise invalid_value("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
        return None
    for index, tool in enumerate(fields.tools):
        if tool.type != "function":
            raise invalid_value("Only tools of type 'function' are supported.", f"tools[{index}].type")
    tools = tuple(fields.tools)
    parallel = fields.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if choice.type != "function" or name not in {tool.function.name for tool in tools}:
            raise invalid_value("'tool_choice' names no function of 'tools'.", "tool_choice")
        return ToolUse(tools, "named", parallel=False, name=name)
    match "auto" if choice is None else choice:
        case "none" | "auto" | "required" as word:
            return ToolUse(tools, word, parallel)
        case _:
            raise invalid_value("'tool_choice' must be none, auto, required or a function.", "tool_choice")


def _seed(fields: Body) -> int | None:
    """The gateway's seed goes first: it drew it for a retry to reuse."""
    seed = fields.seed
    if fields.warmpath is not None and fields.warmpath.seed is not None:
        seed = fields.warmpath.seed
    if seed is None:
        return None
    if not _SEED_MIN <= seed <= _SEED_MASK:
        raise invalid_value("'seed' must fit into 64 bits.", "seed")
    return seed & _SEED_MASK


def _priority(fields: Body) -> int:
    if fields.warmpath is not None or fields.priority is None:
        return 0
    if type(fields.priority) is not int or abs(fields.priority) > MAX_INTEGER:
        raise invalid_value("'priority' must be a whole number.", "priority")
    return fields.priority


def _check_field(field: PromptField, *, resumable: bool) -> None:
    if field.request_id and not sane_request_id(field.request_id):
        raise invalid_value("'warmpath.request_id' takes 1 to 128 letters, digits, '_' and '-'.", "warmpath.request_id")
    if len(field.salt) > MAX_SALT_CHARS:
        raise invalid_value(f"'warmpath.salt' takes at most {MAX_SALT_CHARS} characters.", "warmpath.salt")
    if abs(field.priority) > 1 << 31:
        raise invalid_value("'warmpath.priority' must fit into 32 bits.", "warmpath.priority")
    if not 0 <= field.patience <= MAX_PATIENCE:
        raise invalid_value(f"'warmpath.patience' must be from 0 to {MAX_PATIENCE}.", "warmpath.patience")
    if field.resume is not None:
        _check_resume(field.resume, resumable=resumable)


def _check_resume(resume: Resume, *, resumable: bool) -> None:
    if not resumable:
        raise invalid_value("Only a stream of one choice can be resumed.", "warmpath.resume")
    if _RESPONSE_ID.fullmatch(resume.response_id) is None:
        raise invalid_value("'warmpath.resume.response_id' is no id of an answer.", "warmpath.resume.response_id")
    if not 0 <= resume.created <= MAX_INTEGER:
        raise invalid_value("'warmpath.resume.created' is no time.", "warmpath.resume.created")


def _require_prompt(request: GenerationRequest, name: str) -> None:
    if request.prompt in (b"", b"null") and not (request.field and request.field.prompt_ids):
        raise ApiError(400, "missing_required_parameter", f"Missing required parameter: '{name}'.", param=name)
