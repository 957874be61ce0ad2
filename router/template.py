"""A model's chat template: a chat → the one text that the model was trained to continue.

The rules are those of `apply_chat_template` in Hugging Face transformers, so that gateway, worker and training agree on
every character; tests/data/chat_golden holds texts that it rendered. Knows nothing of tokens.

Templates are compiled once, and nothing changes after that: any thread may render.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import jinja2

from router.chat import Chat
from router.prompt_errors import PromptError, TokenizerError
from router.sandbox import compile_template

__all__ = ["ChatTemplate"]

_MARK: Final = "WARMPATH_CONTINUES_HERE "
"""Put behind a final message that shall stay open, to find where it ends in the rendered text. Its space tells whether the
template trimmed the message: then the open end is trimmed too."""

_PROBE: Final = "WARMPATH_PROBE"

_MAX_REASON_CHARS: Final = 300
"""A template may quote a whole message in its exception."""


class ChatTemplate:
    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` by name: ``default``, and ``tool_use`` where a model has a template of its own for tools.

        Raises TokenizerError when one does not compile.
        """
        self._templates = {name: _compiled(name, source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)
        self.reads_parts = self._finds_text_in_parts()
        """Whether it knows a content given as parts; others print the list, or refuse it."""

    def render(self, chat: Chat, now: datetime) -> str:
        """The prompt's text. `now` is the wall clock, for templates that write the date.

        20 to 70 us, and 4 to 15 us for each message after the third. Raises PromptError when the template refuses the chat.
        """
        messages = chat.template_messages()
        if not chat.continue_final_message:
            return self._render(chat, messages, now)
        final_text = _mark_end(messages[-1])
        return _cut_at_mark(self._render(chat, messages, now), final_text)

    def _render(self, chat: Chat, messages: list[dict[str, Any]], now: datetime) -> str:
        template = self._choose(chat)
        # Later entries win: a client's variables over the model's, ours over both.
        variables = {
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
            "strftime_now": now.strftime,
        }
        try:
            return template.render(variables)
        except Exception as error:  # foreign code over a client's values: anything can come out
            raise PromptError(f"the chat template refuses this request: {str(error)[:_MAX_REASON_CHARS]}") from error

    def _finds_text_in_parts(self) -> bool:
        probe = Chat([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        try:
            text = self.render(probe, datetime.min)  # noqa: DTZ901 - some date, for templates that write one
        except PromptError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text

    def _choose(self, chat: Chat) -> jinja2.Template:
        wanted = "tool_use" if chat.tools is not None and "tool_use" in self._templates else "default"
        try:
            return self._templates[wanted]
        except KeyError:
            raise PromptError("this model has no chat template") from None


def _compiled(name: str, source: str) -> jinja2.Template:
    try:
        return compile_template(source)
    except Exception as error:  # foreign code: besides jinja2's own errors, Python refuses what nests too deep
        raise TokenizerError(f"the chat template {name!r} does not compile: {error}") from error


def _mark_end(message: dict[str, Any]) -> str:
    """Put the mark behind the last text of a message, and return that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    parts = list(content) if isinstance(content, list) else []
    for position, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            parts[position] = {**part, "text": text + _MARK}
            message["content"] = parts
            return text
    raise PromptError("continue_final_message needs a final message with text")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    end = rendered.rfind(_MARK.rstrip())
    if end < 0 or final_text.strip() not in rendered:
        raise PromptError("the chat template rewrites the final message, so it cannot be continued")
    open_text = rendered[:end]
    return open_text if rendered.startswith(_MARK, end) else open_text.rstrip()
