"""A model's chat template: a chat → the one text that the model was trained to continue.

The rules are those of `apply_chat_template` in Hugging Face transformers, so that gateway, worker and training agree on
every character; tests/data/chat_golden holds texts that it rendered. Knows nothing of tokens.

Every template is compiled for jinja2, which defines what it means, and for minijinja where that is known to write the same
(`router.native_template`). Nothing changes after that: any thread may render.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2

from router.chat import Chat
from router.native_template import NativeTemplate, compile_native
from router.prompt_errors import PromptError, TokenizerError
from router.rehearsal import rehearsal_chats
from router.resumable import MARK, NOTE, SKIP, STATE, Resumable, make_resumable
from router.sandbox import compile_template, template_literals

__all__ = ["ChatTemplate", "LoopRendering", "are_texts"]

_MARK: Final = "WARMPATH_CONTINUES_HERE "
"""Put behind a final message that shall stay open, to find where it ends in the rendered text. Its space tells whether the
template trimmed the message: then the open end is trimmed too."""

_SOME_DATE: Final = datetime(2026, 3, 1)  # noqa: DTZ001 - templates print wall clocks

_PROBE: Final = "WARMPATH_PROBE"

_MAX_REASON_CHARS: Final = 300
"""A template may quote a whole message in its exception."""


@dataclass(frozen=True, slots=True)
class LoopRendering:
    """A chat's text in its parts, of which the first iterations of the loop over the messages may have been left out."""

    before: str
    """What comes before the loop."""
    texts: Sequence[str]
    """What each iteration wrote; the last one's has behind it what follows the loop."""
    states: Sequence[Sequence[Any]]
    """What the template had noted when each iteration began (`router.resumable`); empty if that is nothing."""
    _resumable: Resumable
    _name: str
    _noted: Sequence[Any]
    _variables: Mapping[str, Any]

    @property
    def reach(self) -> int:
        """How many messages after the one of its place may change the text of an iteration."""
        return self._resumable.reach

    def key(self, iterations: int) -> bytes | None:
        """Where it is the same and the messages are, the first texts are, this many. None: they must not be taken for known."""
        key = self._resumable.key(self._noted, self._variables, iterations)
        return None if key is None else self._name.encode() + b"\0" + key


class ChatTemplate:
    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], *, native: bool = True) -> None:
        """`sources` by name: ``default``, and ``tool_use`` where a model has a template of its own for tools.

        `native`: use minijinja where it may be used; to find out takes some 30 ms. Raises TokenizerError when one does
        not compile.
        """
        self._templates = {name: _compiled(name, source) for name, source in sources.items()}
        self.literals = "\0".join(literal for source in sources.values() for literal in template_literals(source))
        """All that it may write of its own."""
        self._special_tokens = dict(special_tokens)
        self._native: dict[str, NativeTemplate] = {}
        if native:
            compiled = {name: compile_native(source) for name, source in sources.items()}
            self._native = {name: template for name, template in compiled.items() if template is not None}
            if self._native and not all(map(self._sounds_the_same, rehearsal_chats())):
                self._native = {}
        self._resumable: dict[str, tuple[Resumable, NativeTemplate]] = {}
        for name in self._native:
            if (resumable := make_resumable(sources[name])) and (
                loop := compile_native(resumable.source, frozenset({NOTE}))
            ):
                self._resumable[name] = (resumable, loop)
        if self._resumable and not all(map(self._sounds_the_same_in_parts, rehearsal_chats())):
            self._resumable = {}
        self.reads_parts = self._finds_text_in_parts()
        """Whether it knows a content given as parts; others print the list, or refuse it."""

    def render(self, chat: Chat, now: datetime) -> str:
        """The prompt's text. `now` is the wall clock, for templates that write the date.

        20 us and 1 to 2 us a message; by jinja2 70 us and 4 to 15 us. Raises PromptError when the template refuses the chat.
        """
        messages = chat.template_messages()
        if not chat.continue_final_message:
            return self._render(chat, messages, now)
        messages[-1], final_text = _mark_end(messages[-1])
        return _cut_at_mark(self._render(chat, messages, now), final_text)

    @property
    def is_native(self) -> bool:
        """Whether minijinja renders it."""
        return bool(self._native)

    @property
    def is_resumable(self) -> bool:
        """Whether there are chats that `render_loop` renders."""
        return bool(self._resumable)

    def render_loop(
        self,
        chat: Chat,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        *,
        only_text: bool,
        skip: int = 0,
        state: Sequence[Any] = (),
    ) -> LoopRendering | None:
        """The same text in parts, without what the first `skip` iterations of the loop over the messages write. None where
        `render` must say.

        `chat`: of which the messages are not looked at. `messages`: all of them, as templates expect them; `only_text`:
        they hold nothing but texts. `state`: what was noted when the first iteration began that is not left out.
        """
        name = self._choose(chat)
        if name not in self._resumable or chat.continue_final_message:
            return None
        resumable, loop = self._resumable[name]
        notes: list[Sequence[Any]] = []
        variables = self._variables(chat, messages, now)
        ours = {SKIP: skip, STATE: state, NOTE: lambda *noted: notes.append(noted)}
        only_text = only_text and _is_only_messages(chat)
        try:
            text = loop.render({**variables, **ours}, only_text=only_text)
        except Exception:  # out of fuel, as `render` will say
            return None
        if text is None:
            return None
        before, *texts = text.split(MARK)
        (_, num_iterations), noted, *states = notes
        if not texts or len(texts) != num_iterations - skip:  # or somebody wrote our mark
            return None
        return LoopRendering(before, texts, states, resumable, name, noted, variables)

    def _render(self, chat: Chat, messages: list[Mapping[str, Any]], now: datetime) -> str:
        name = self._choose(chat)
        variables = self._variables(chat, messages, now)
        if name in self._native and (text := self._render_native(name, chat, variables)) is not None:
            return text
        return self._render_jinja(name, variables)

    def _render_native(self, name: str, chat: Chat, variables: dict[str, Any]) -> str | None:
        only_text = _is_only_messages(chat) and are_texts(variables["messages"])
        try:
            return self._native[name].render(variables, only_text=only_text)
        except Exception as error:
            raise PromptError("the chat template does not come to an end over this request") from error

    def _render_jinja(self, name: str, variables: dict[str, Any]) -> str:
        try:
            return self._templates[name].render(variables)
        except Exception as error:  # foreign code over a client's values: anything can come out
            raise PromptError(f"the chat template refuses this request: {str(error)[:_MAX_REASON_CHARS]}") from error

    def _variables(self, chat: Chat, messages: Sequence[Mapping[str, Any]], now: datetime) -> dict[str, Any]:
        # Later entries win: a client's variables over the model's, ours over both.
        return {
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
            "strftime_now": now.strftime,
        }

    def _sounds_the_same(self, chat: Chat) -> bool:
        """Whether minijinja has nothing to say to this chat but what jinja2 says."""
        name = self._choose(chat)
        if name not in self._native:
            return True
        variables = self._variables(chat, chat.template_messages(), _SOME_DATE)
        try:
            text = self._render_native(name, chat, variables)
            return text is None or text == self._render_jinja(name, variables)
        except PromptError:
            return False

    def _sounds_the_same_in_parts(self, chat: Chat) -> bool:
        """Whether its parts are those of the whole, wherever the loop begins."""
        name = self._choose(chat)
        if name not in self._resumable:
            return True
        messages = chat.template_messages()
        variables = self._variables(chat, messages, _SOME_DATE)
        try:
            whole = self._render_native(name, chat, variables)
        except PromptError:
            return False
        only_text = are_texts(messages)
        all_parts = self.render_loop(chat, messages, _SOME_DATE, only_text=only_text)
        if all_parts is None:
            return True  # then `render` says it all
        if whole is None or "".join((all_parts.before, *all_parts.texts)) != whole:
            return False
        for skip in range(1, len(all_parts.texts)):
            state = all_parts.states[skip][1::2] if all_parts.states else ()
            parts = self.render_loop(chat, messages, _SOME_DATE, only_text=only_text, skip=skip, state=state)
            if parts is None or (parts.before, *parts.texts) != (all_parts.before, *all_parts.texts[skip:]):
                return False
        return True

    def _finds_text_in_parts(self) -> bool:
        probe = Chat([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        try:
            text = self.render(probe, _SOME_DATE)
        except PromptError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text

    def _choose(self, chat: Chat) -> str:
        wanted = "tool_use" if chat.tools is not None and "tool_use" in self._templates else "default"
        if wanted not in self._templates:
            raise PromptError("this model has no chat template")
        return wanted


def _compiled(name: str, source: str) -> jinja2.Template:
    try:
        return compile_template(source)
    except Exception as error:  # foreign code: besides jinja2's own errors, Python refuses what nests too deep
        raise TokenizerError(f"the chat template {name!r} does not compile: {error}") from error


def _is_only_messages(chat: Chat) -> bool:
    return not (chat.tools or chat.documents or chat.variables)


def are_texts(messages: Iterable[Mapping[str, Any]]) -> bool:
    for message in messages:
        for value in message.values():
            if type(value) is not str:
                return False
    return True


def _mark_end(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with the mark behind its last text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}, content
    parts = list(content) if isinstance(content, list) else []
    for position, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            parts[position] = {**part, "text": text + _MARK}
            return {**message, "content": parts}, text
    raise PromptError("continue_final_message needs a final message with text")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    end = rendered.rfind(_MARK.rstrip())
    if end < 0 or final_text.strip() not in rendered:
        raise PromptError("the chat template rewrites the final message, so it cannot be continued")
    open_text = rendered[:end]
    return open_text if rendered.startswith(_MARK, end) else open_text.rstrip()
