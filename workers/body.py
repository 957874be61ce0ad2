"""The JSON bodies of generation requests: which fields there are, of which types, within which bounds. Pure data.

Types are strict (a bool is no int, 1.0 is no int, NaN is no number), null is the same as absent, of a field that is given twice
the last one counts, and fields that are not named here pass. What one field means for another is `workers.openai`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from router.chat_rules import MAX_TOOLS
from router.wire import PromptField
from workers.prompts import TokenId, Tool

__all__ = ["FORBIDDEN", "HARMLESS", "MAX_TOP_LOGPROBS", "Body", "ChatBody", "CompletionBody", "NamedTool"]

MAX_CHOICES: Final = 8
MAX_STOPS: Final = 4
MAX_STOP_TOKENS: Final = 64
MAX_BIASES: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_INTEGER: Final = 1 << 53
"""Where nothing else bounds a number: what every JSON reader and our wire format can carry."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What chat and text completions share."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INTEGER)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0, le=MAX_INTEGER)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INTEGER)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None
    ) = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Any = None
    """Looked at where no gateway says more."""
    warmpath: PromptField | None = None
    # What follows is only looked at to refuse it.
    prompt_logprobs: Any = None
    best_of: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    thinking_token_budget: Any = None
    chat_template: Any = None
    cache_salt: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    truncate_prompt_tokens: Any = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """A ``tool_choice`` that names the function to call."""

    type: str
    function: NamedFunction


class ChatBody(Body, kw_only=True):
    messages: Raw = Raw(b"")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # As above.
    function_call: Any = None
    functions: Any = None
    audio: Any = None
    echo: Any = None
    add_special_tokens: Any = None


class CompletionBody(Body, kw_only=True):
    prompt: Raw = Raw(b"")
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    # As above.
    suffix: Any = None


FORBIDDEN: Final = ("chat_template", "cache_salt", "prompt_embeds", "kv_transfer_params", "truncate_prompt_tokens")
"""They reach into the replica: templates run code, salts and transfers name other people's cache."""

HARMLESS: Final[Mapping[type[Body], Mapping[str, tuple[object, ...]]]] = {
    Body: {
        "prompt_logprobs": (False,),
        "best_of": (1,),
        "length_penalty": (1,),
        "use_beam_search": (False,),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "spaces_between_special_tokens": (True,),
        "return_tokens_as_token_ids": (False,),
        "thinking_token_budget": (),
    },
    ChatBody: {
        "function_call": ("none", "auto"),
        "functions": ([],),
        "audio": (),
        "echo": (False,),
        "add_special_tokens": (False,),
    },
    CompletionBody: {"suffix": ("",)},
}
"""Fields that would change the answer and that no replica of ours knows → the values besides null that ask for nothing."""
