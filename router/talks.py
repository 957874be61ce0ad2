"""The ids of talks that go on: what was rendered and tokenized of their beginning is remembered.

A talk is known up to the last message but one of its last request (`router.known_talks`): what a client says next, or says
instead, comes behind. Then only the new messages are decoded and rendered, and only their text is tokenized; `router.resumable`
says why the rest stays as it was. What holds without being looked at again: the known messages are valid, and were counted.

Proven or not, every `_CHECK_EVERY`-th continuation is compared with a rendering of the whole. One difference, and nothing is
taken from memory any more. Any thread may use it, and none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import msgspec

from router.chat import Chat
from router.known_talks import NEW, KnownTalk, KnownTalks, Sighting, TalkSize
from router.segments import longest_match
from router.template import ChatTemplate, LoopRendering, are_texts

__all__ = ["Sighting", "TalkCounts", "Talks"]

_CHECK_EVERY: Final = 256
_STATES: Final = (str, int, bool, type(None))
"""Kinds of values that mean the same to a template when they have been outside of it."""
_WHITE: Final = b" \t\n\r"
"""Of JSON."""


@dataclass(slots=True)
class TalkCounts:
    """Threads that meet lose one at worst."""

    begun: int = 0
    """Rendered in parts, to be remembered."""
    continued: int = 0
    """Of which only the new part was rendered."""
    mistaken: int = 0
    """Continued otherwise than the whole, which must not happen."""


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A talk and what was rendered behind it."""

    talk: KnownTalk
    messages: Sequence[Mapping[str, Any]]
    """All of them, as templates expect them."""
    only_text: bool
    """They hold nothing but texts."""
    new: Sequence[Mapping[str, Any]]
    """Those behind the talk, as the client sent them."""
    rendering: LoopRendering

    def text(self, start: int, end: int | None = None) -> str:
        """Of some of the rendered iterations; the first one has before it what begins the prompt, if that is not known."""
        begun = "" if start or self.talk.ids else self.rendering.before
        return begun + "".join(self.rendering.texts[start:end])


class Talks:
    def __init__(
        self, template: ChatTemplate, encode: Callable[[str], bytes], cuts: Sequence[str], max_bytes: int
    ) -> None:
        """`cuts`: tokens before which a text may be cut in two, and `encode` gives the same ids."""
        self._template = template
        self._encode = encode
        self._may_cut_before = longest_match(cuts).match
        self._known = KnownTalks(max_bytes)
        self.trusted = template.is_resumable and bool(cuts)
        """Whether anything is remembered: not with a template or tokenizer unfit for it, nor once it was wrong."""
        self.counts = TalkCounts()

    @property
    def size_bytes(self) -> int:
        """Of the talks that are kept, at most."""
        return self._known.size_bytes

    def sight(self, messages: bytes | msgspec.Raw) -> Sighting:
        """Look at the messages of a request, given as JSON."""
        return self._known.sight(messages) if self.trusted else NEW

    def begin(self, sighting: Sighting, chat: Chat, now: datetime) -> bytes | None:
        """Packed ids, and the talk will be known. None: `ChatTemplate.render` must say, and nothing is remembered."""
        if not sighting.is_again or len(chat.messages) < 2:  # the last message is never remembered
            return None
        messages = self._template_messages(chat)
        only_text = are_texts(messages)
        rendering = self._template.render_loop(chat, messages, now, only_text=only_text)
        if rendering is None:
            return None
        nothing = KnownTalk(
            source=b"[",
            messages=(),
            only_text=True,
            size=TalkSize(),
            iterations=0,
            missing=len(messages) - len(rendering.texts),
            state=(),
            before=rendering.before,
            key=b"",
            ids=b"",
        )
        self.counts.begun += 1
        return self._packed(_Continuation(nothing, messages, only_text, chat.messages, rendering), sighting)

    def go_on(self, sighting: Sighting, chat: Chat, now: datetime) -> bytes | None:
        """Packed ids of the known talk with the messages of `chat` behind it. None: ask as if none were known."""
        talk = sighting.known
        if talk is None or not talk.size.and_of(chat.messages).is_certainly_allowed:
            return None
        new = self._template_messages(chat)
        messages = [*talk.messages, *new]
        only_text = talk.only_text and are_texts(new)
        rendering = self._template.render_loop(
            chat, messages, now, only_text=only_text, skip=talk.iterations, state=talk.state
        )
        if (
            rendering is None
            or rendering.before != talk.before
            or len(messages) - len(rendering.texts) != talk.iterations + talk.missing
            or rendering.key(talk.iterations) != talk.key
            or not self._may_cut_before(rendering.texts[0])
        ):
            return None
        packed = self._packed(_Continuation(talk, messages, only_text, chat.messages, rendering), sighting)
        self.counts.continued += 1
        if self.counts.continued % _CHECK_EVERY:
            return packed
        whole = self._encode(self._template.render(replace(chat, messages=messages), now))
        if whole != packed:
            self.counts.mistaken += 1
            self.trusted = False
            self._known.forget()
        return whole

    def _template_messages(self, chat: Chat) -> list[Mapping[str, Any]]:
        return chat.in_servers_form(join_parts=not self._template.reads_parts).template_messages()

    def _packed(self, went_on: _Continuation, sighting: Sighting) -> bytes:
        """If there is more behind the talk than a last message, a longer one is kept."""
        lasting = self._lasting(went_on)
        longer = self._longer(went_on, lasting, sighting.source) if lasting else None
        if longer is None:
            return went_on.talk.ids + self._encode(went_on.text(0))
        self._known.keep(longer, sighting)
        return longer.ids + self._encode(went_on.text(lasting))

    def _lasting(self, went_on: _Continuation) -> int:
        """How many of the rendered iterations stay as they are, whatever stands in the place of the last message."""
        talk, texts = went_on.talk, went_on.rendering.texts
        num_known = len(went_on.messages) - 1
        if num_known <= len(talk.messages):
            return 0
        # The template may count what it reads ahead from the first message, or from the first that the loop goes through.
        from_end = went_on.rendering.reach + talk.missing
        lasting = min(num_known - from_end, talk.iterations + len(texts) - 1) - talk.iterations
        while lasting > 0 and not self._may_cut_before(texts[lasting]):
            lasting -= 1
        return max(lasting, 0)

    def _longer(self, went_on: _Continuation, lasting: int, source: bytes) -> KnownTalk | None:
        """The talk with this many of the rendered iterations and all messages but the last. None: it cannot be kept."""
        talk, rendering = went_on.talk, went_on.rendering
        iterations = talk.iterations + lasting
        key = rendering.key(iterations)
        state = rendering.states[lasting] if rendering.states else ()
        can_be_put_back = all(state[::2]) and all(type(value) in _STATES for value in state[1::2])
        size = talk.size.and_of(went_on.new[:-1])
        end = _end_of_last_but_one(source, len(talk.source))
        if key is None or end is None or not can_be_put_back or not size.is_certainly_allowed:
            return None
        return KnownTalk(
            source=source[:end],
            messages=went_on.messages[:-1],
            only_text=went_on.only_text,
            size=size,
            iterations=iterations,
            missing=talk.missing,
            state=state[1::2],
            before=talk.before,
            key=key,
            ids=talk.ids + self._encode(went_on.text(0, lasting)),
        )


_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def _end_of_last_but_one(source: bytes, known: int) -> int | None:
    """Where the last message but one ends, of messages of which so many bytes need not be looked at."""
    try:
        new = _list_decoder.decode(source if known == 1 else b"[" + source[known + 1 :])
    except (msgspec.MsgspecError, RecursionError):
        return None
    last = bytes(new[-1])
    end = len(source.rstrip(_WHITE)) - 1
    end = _without_white(source, end)
    if not source.endswith(last, 0, end):
        return None
    end = _without_white(source, end - len(last))
    return _without_white(source, end - 1) if source[end - 1 : end] == b"," else None


def _without_white(source: bytes, end: int) -> int:
    while source[end - 1 : end] in _WHITE and end > 0:
        end -= 1
    return end
