"""What a chat completion request says about its prompt, checked as far as a template cannot check it.

Everything inside is a JSON value as a JSON decoder makes it. Nothing here changes a value of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from router.prompt_errors import PromptError

__all__ = ["Chat"]

_RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""What `chat_template_kwargs` may not set: fields of the body itself, and options of other servers' renderers that must not
be reached through us (CVE-2025-62426)."""

_REASONING_NAMES: Final = {"reasoning_content": None, "thinking": None, "reasoning": None}.keys()
"""What clients call a message's reasoning. Most templates read the first name, those of gpt-oss the second."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What else the template may read: ``chat_template_kwargs`` and ``reasoning_effort``."""

    def __post_init__(self) -> None:
        if not _are_objects(self.messages) or not self.messages:
            raise PromptError("messages must be a list of at least one object")
        for name, value in (("tools", self.tools), ("documents", self.documents)):
            if value is not None and not _are_objects(value):
                raise PromptError(f"{name} must be a list of objects")
        if self.add_generation_prompt and self.continue_final_message:
            raise PromptError("add_generation_prompt and continue_final_message exclude each other")

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """From a request's JSON object. Fields that do not concern the prompt are not looked at."""
        continues = _flag(body, "continue_final_message", default=False)
        return cls(
            messages=body.get("messages", ()),
            tools=body.get("tools"),
            documents=body.get("documents"),
            add_generation_prompt=_flag(body, "add_generation_prompt", default=not continues),
            continue_final_message=continues,
            variables=_variables(body),
        )

    def in_servers_form(self, *, join_parts: bool) -> Chat:
        """The same chat as inference servers hand it to a template, where transformers would leave it as it is.

        A missing content, which OpenAI's clients send beside tool calls, is empty text. With `join_parts`, a content given as
        text parts is one text, its parts on lines of their own: for templates that only know strings. Raises PromptError
        for parts that are no text, since no model of ours sees or hears.
        """
        messages = [
            message if type(message.get("content")) is str else _in_servers_form(message, join_parts)
            for message in self.messages
        ]
        return replace(self, messages=messages)

    def template_messages(self) -> list[Mapping[str, Any]]:
        """The messages as templates expect them: keys that are null left out, reasoning under the names they read.

        A message that is so already is not copied.
        """
        return [
            _template_message(message)
            if None in message.values() or not _REASONING_NAMES.isdisjoint(message)
            else message
            for message in self.messages
        ]


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PromptError(f"{name} must be true or false")
    return value


def _variables(body: Mapping[str, Any]) -> Mapping[str, Any]:
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise PromptError("chat_template_kwargs must be an object")
    if refused := sorted(_RESERVED.intersection(variables)):
        raise PromptError(f"chat_template_kwargs cannot set {', '.join(refused)}")
    effort = body.get("reasoning_effort")
    return variables if effort is None else {"reasoning_effort": effort, **variables}


def _are_objects(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is dict or isinstance(item, Mapping) for item in value)


def _in_servers_form(message: Mapping[str, Any], join_parts: bool) -> Mapping[str, Any]:
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if not isinstance(content, list | tuple):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise PromptError("this model reads text only: every content part must be {'type': 'text', 'text': ...}")
    return {**message, "content": "\n".join(map(str, texts))} if join_parts else message


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING_NAMES if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning} | present | {"reasoning_content": reasoning}
