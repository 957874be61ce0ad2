"""The ids of talks that go on: what was rendered and tokenized of their beginning is remembered.

A talk is found by the bytes of its messages as the client wrote them, up to the last message but one: what a client says next,
or says instead, comes behind these. They are compared byte by byte, for wrong ids would be a wrong answer. Then only the new
messages are decoded and rendered (`router.resumable` says why the rest stays as it was) and only their text is tokenized.

Most prompts never come again. So the first sighting leaves a few hashes, and the second one is remembered.

What holds without being looked at again: the known messages are valid, and were counted.

Proven or not, every `_CHECK_EVERY`-th continuation is compared with a rendering of the whole. One difference, and nothing is
taken from memory any more. Any thread may use it, and none waits; threads that meet lose a talk at worst.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from router.chat import Chat
from router.generations import Generations
from router.segments import longest_match
from router.template import ChatTemplate, LoopRendering, are_texts

__all__ = ["KnownTalk", "Sighting", "TalkCounts", "Talks"]

_MIN_BYTES: Final = 1 << 10
"""Less is as soon rendered as found."""
_CHECK_EVERY: Final = 256
_MOST_VALUES: Final = 50_000
_MOST_ITEMS: Final = 2048
"""Messages and parts of them, as many as a request may have."""
_SEEN: Final = 1 << 15
"""Beginnings to be known again, twice: 8 MB."""
_SEEN_PLACES: Final = 2
"""Of each sighting: the end of a talk may be another one when it comes again."""
_STATES: Final = (str, int, bool, type(None))
"""Kinds of values that mean the same to a template when they have been outside of it."""
_TALK_BYTES: Final = 600
"""What holds a talk in memory, beside what it holds."""
_SAME_PLACE: Final = 16
"""Talks that are the same up to one of `_PLACES` and may be kept."""
_WHITE: Final = b" \t\n\r"
"""Of JSON."""


def _places() -> list[int]:
    places = [_MIN_BYTES]
    while places[-1] < 1 << 30:
        places.append(places[-1] + places[-1] // 2)
    return places


_PLACES: Final = _places()
"""Lengths at which a text is hashed, to find what may be its beginning: 15 of them in 400 KB."""


class _Size(NamedTuple):
    """Of messages, as the client sent them."""

    num_items: int
    """Messages, and parts of their contents."""
    num_values: int
    """At least as many as there are JSON values."""
    num_bytes: int
    """In memory."""

    def and_of(self, messages: Iterable[Mapping[str, Any]]) -> _Size:
        num_items, num_values, num_bytes = self
        level: list[Any] = []
        for message in messages:
            content = message.get("content")
            num_items += 1 + (len(content) if isinstance(content, list | tuple) else 0)
            level.append(message)
        while level:
            value = level.pop()
            num_bytes += sys.getsizeof(value)
            if isinstance(value, Mapping | list | tuple):
                num_values += 1 + len(value)
                level += value.values() if isinstance(value, Mapping) else value
        return _Size(num_items, num_values, num_bytes)

    @property
    def is_certainly_allowed(self) -> bool:
        return self.num_items <= _MOST_ITEMS and self.num_values <= _MOST_VALUES


@dataclass(frozen=True, slots=True, eq=False)
class KnownTalk:
    source: bytes
    """JSON of the messages, from the bracket to the end of the last one that is known."""
    messages: Sequence[Mapping[str, Any]]
    """As templates expect them."""
    only_text: bool
    """They hold nothing but texts."""
    size: _Size
    iterations: int
    """Of the template's loop over the messages, whose text is known."""
    missing: int
    """How many messages the loop leaves out at the beginning."""
    state: Sequence[Any]
    before: str
    key: bytes
    ids: bytes
    """Of what comes before the loop, and of the known iterations."""

    @property
    def size_bytes(self) -> int:
        return _TALK_BYTES + len(self.source) + self.size.num_bytes + len(self.before) + len(self.key) + len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    source: bytes
    keys: Sequence[int]
    """Of its beginnings."""
    known: KnownTalk | None
    """The longest talk that it goes on from. Behind what is known there is a comma."""
    is_again: bool
    """Whether messages that began like these were sighted before. If not, the rest is not told."""


_NEW: Final = Sighting(b"", (), None, is_again=False)


@dataclass(slots=True)
class TalkCounts:
    """Threads that meet lose one at worst."""

    begun: int = 0
    """Rendered in parts, to be remembered."""
    continued: int = 0
    """Of which only the new part was rendered."""
    mistaken: int = 0
    """Continued otherwise than the whole, which must not happen."""


class Talks:
    def __init__(
        self, template: ChatTemplate, encode: Callable[[str], bytes], cuts: Sequence[str], max_bytes: int
    ) -> None:
        """`cuts`: tokens before which a text may be cut in two, and `encode` gives the same ids."""
        self._template = template
        self._encode = encode
        self.trusted = template.is_resumable and bool(cuts)
        """Whether anything is remembered: not with a template or tokenizer unfit for it, nor once it was wrong."""
        self._may_cut_before = longest_match(cuts).match
        self._max_bytes = max_bytes // 2
        self._young: dict[int, tuple[KnownTalk, ...]] = {}
        self._old: dict[int, tuple[KnownTalk, ...]] = {}
        self._young_bytes = self._old_bytes = 0
        self._seen: Generations[bool] = Generations(_SEEN)
        self.counts = TalkCounts()

    @property
    def size_bytes(self) -> int:
        """Of the talks that are kept, at most."""
        return self._young_bytes + self._old_bytes

    def sight(self, messages: bytes | msgspec.Raw) -> Sighting:
        """Look at the messages of a request, given as JSON."""
        view = memoryview(messages)
        if not self.trusted or len(view) <= _MIN_BYTES:
            return _NEW
        keys = _keys(view)
        is_again = any(map(self._seen.get, reversed(keys)))
        for key in keys[-_SEEN_PLACES:]:
            self._seen.put(key, True)
        if not is_again:
            return _NEW
        source = bytes(view)
        return Sighting(source, keys, self._find(source, keys), is_again)

    def _find(self, source: bytes, keys: Sequence[int]) -> KnownTalk | None:
        """The longest one that these messages go on from."""
        for key in reversed(keys):
            young = self._young.get(key, ())
            for talk in sorted((*young, *self._old.get(key, ())), key=_length, reverse=True):
                end = len(talk.source)
                if source[end : end + 1] == b"," and source.startswith(talk.source):
                    if not any(each is talk for each in young):
                        self._put(key, talk)
                    return talk
        return None

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
            size=_Size(0, 0, 0),
            iterations=0,
            missing=len(messages) - len(rendering.texts),
            state=(),
            before=rendering.before,
            key=b"",
            ids=b"",
        )
        self.counts.begun += 1
        return self._packed(nothing, sighting, chat, messages, only_text, rendering)

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
        packed = self._packed(talk, sighting, chat, messages, only_text, rendering)
        self.counts.continued += 1
        if self.counts.continued % _CHECK_EVERY:
            return packed
        whole = self._encode(self._template.render(replace(chat, messages=messages), now))
        if whole != packed:
            self.counts.mistaken += 1
            self.trusted, self._young, self._old = False, {}, {}
        return whole

    def _template_messages(self, chat: Chat) -> list[Mapping[str, Any]]:
        return chat.in_servers_form(join_parts=not self._template.reads_parts).template_messages()

    def _packed(
        self,
        talk: KnownTalk,
        sighting: Sighting,
        chat: Chat,
        messages: Sequence[Mapping[str, Any]],
        only_text: bool,
        rendering: LoopRendering,
    ) -> bytes:
        """Ids of `talk` and of what was rendered behind it. If that is more than a last message, it makes a longer talk.

        `chat`: of the new messages. `messages`: all of them.
        """
        texts = rendering.texts
        known = self._known_iterations(talk, len(messages) - 1, rendering)
        longer = self._longer(talk, sighting.source, chat, messages, only_text, rendering, known) if known else None
        if longer is None:
            begun = "" if talk.ids else talk.before
            return talk.ids + self._encode(begun + "".join(texts))
        self._put(sighting.keys[bisect_right(_PLACES, len(longer.source)) - 1], longer)
        return longer.ids + self._encode("".join(texts[known:]))

    def _longer(
        self,
        talk: KnownTalk,
        source: bytes,
        chat: Chat,
        messages: Sequence[Mapping[str, Any]],
        only_text: bool,
        rendering: LoopRendering,
        known: int,
    ) -> KnownTalk | None:
        """`talk` with this many of the rendered iterations and with all messages but the last. None: it cannot be kept."""
        iterations = talk.iterations + known
        key = rendering.key(iterations)
        end = _end_of_last_but_one(source, len(talk.source))
        state = rendering.states[known] if rendering.states else ()
        size = talk.size.and_of(chat.messages[:-1])
        can_be_put_back = all(state[::2]) and all(type(value) in _STATES for value in state[1::2])
        if key is None or end is None or not can_be_put_back or not size.is_certainly_allowed or end < _MIN_BYTES:
            return None
        begun = "" if talk.ids else talk.before
        return KnownTalk(
            source=source[:end],
            messages=messages[:-1],
            only_text=only_text,
            size=size,
            iterations=iterations,
            missing=talk.missing,
            state=state[1::2],
            before=talk.before,
            key=key,
            ids=talk.ids + self._encode(begun + "".join(rendering.texts[:known])),
        )

    def _known_iterations(self, talk: KnownTalk, num_known: int, rendering: LoopRendering) -> int:
        """How many of the rendered iterations are known to be the same whatever follows this many messages.

        0 for none, or if no message is new.
        """
        if num_known <= len(talk.messages):
            return 0
        iterations = min(num_known - max(rendering.reach, talk.missing), talk.iterations + len(rendering.texts) - 1)
        known = iterations - talk.iterations
        while known > 0 and not self._may_cut_before(rendering.texts[known]):
            known -= 1
        return max(known, 0)

    def _put(self, key: int, talk: KnownTalk) -> None:
        if self._young_bytes + talk.size_bytes > self._max_bytes:
            self._old, self._young = self._young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
        if talk.size_bytes <= self._max_bytes:
            self._young_bytes += talk.size_bytes
            others = [each for each in self._young.get(key, ()) if each.source != talk.source]
            self._young[key] = (talk, *others[: _SAME_PLACE - 1])


def _length(talk: KnownTalk) -> int:
    return len(talk.source)


def _keys(view: memoryview) -> list[int]:
    """Of its beginnings, one for each of `_PLACES`."""
    hashed, start = xxhash.xxh3_64(), 0
    keys = []
    for end in _PLACES[: bisect_right(_PLACES, len(view))]:
        hashed.update(view[start:end])
        keys.append(hashed.intdigest())
        start = end
    return keys


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
