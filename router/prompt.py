"""Chat → text → token ids, the same in gateway and worker: the public face of all that knows about prompts.

    router.chat             what a request says about its prompt
    router.template         the model's chat template, in router.native_template or router.sandbox
    router.tokenizer        text ↔ ids of a Hugging Face tokenizer, by way of router.native_tokenizer or router.segments
    router.escape           special tokens in the texts of messages, when they shall be text
    router.talks            what is remembered of talks that go on, as far as router.resumable finds that it stays the same
    router.token_bytes      tokens → the bytes they stand for
    router.trivial          the same without files, for simulated replicas and tests
    router.tokenizer_files  what all of it is made from
    router.prompt_errors    what it raises

What must hold: ids equal those of `apply_chat_template` in Hugging Face transformers. Two prompters with one digest give the
same ids for the same request; gateway and worker rely on it when they compare block names.

A `Prompter` may be shared by an event loop and its worker threads. All of it is fixed at load but its memories of texts and
talks, where no thread waits for another. What an encoding costs, and so where it is best done, `Prompter.seconds` estimates.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Protocol

from msgspec import Raw

from router.chat import Chat
from router.escape import Escaper
from router.prompt_errors import PromptError, TokenizerError
from router.talks import Sighting, TalkCounts, Talks
from router.template import ChatTemplate
from router.tokenizer_files import TokenizerConfig, TokenizerFiles
from router.trivial import CHAT_TEMPLATE, TrivialTokenizer
from router.wire import unpack_ids

__all__ = [
    "DEFAULT_CACHE_BYTES",
    "PromptError",
    "Prompter",
    "Sighting",
    "TokenizerError",
    "TokenizerFiles",
    "load_prompter",
]

DEFAULT_CACHE_BYTES: Final = 64 << 20
"""About 7 million tokens of English: a thousand talks of 7,000 tokens."""

_TALK_BYTES: Final = 64 << 20
"""For talks that go on, of 12 bytes a token or more."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_id(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def is_native(self) -> bool: ...
    @property
    def added_tokens(self) -> Mapping[str, bool]:
        """Texts that are tokens wherever they stand → whether they are special."""

    @property
    def cuts(self) -> Sequence[str]:
        """Tokens before which a text may be cut in two, each encoded alone."""

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Ids as u32 in the machine's byte order."""

    def encode_escaped(self, rendered: str, escaper: Escaper) -> bytes: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
    def token_bytes(self, id_: int) -> bytes: ...


class Prompter:
    def __init__(self, digest: str, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.digest = digest
        self.vocab_size = tokenizer.vocab_size
        """How many ids mean something. The highest of them, `max_id`, may lie above it."""
        self.max_id = tokenizer.max_id
        self.bos_id = tokenizer.bos_id
        self.eos_ids = tokenizer.eos_ids
        """As the tokenizer's configuration says; a model's generation configuration may add to them."""
        self.special_ids = tokenizer.special_ids
        """What `decode` leaves out unless told otherwise."""
        self._talks = Talks(template, self._encode_rendered, tokenizer.cuts, _TALK_BYTES)
        self._s_per_byte = 1.5e-8 if tokenizer.is_native else 3e-7
        self._s_per_message = 4e-6 if template.is_native else 2e-5

    @property
    def is_native(self) -> bool:
        """Whether fastokens and minijinja do its work."""
        return self._template.is_native and self._tokenizer.is_native

    @property
    def talks(self) -> TalkCounts:
        return self._talks.counts

    def seconds(self, num_bytes: int, num_messages: int) -> float:
        """What a never-seen request of this size costs, on the careful side (docs/tokens.md)."""
        return num_bytes * self._s_per_byte + num_messages * self._s_per_message

    def render_chat(self, body: Mapping[str, Any], now: datetime) -> str:
        """The text of a chat completion request, given as JSON values. Raises PromptError.

        `now` is the wall clock, for templates that write the date into the prompt.
        """
        return self._template.render(self._chat(body), now)

    def pack_chat(self, body: Mapping[str, Any], now: datetime, *, escape: bool = False) -> bytes:
        """The ids of a chat completion request as u32le bytes, the form that is hashed and sent. Raises PromptError.

        Nothing is added to what its template wrote. `escape`: a special token in the text of a message is text, and gives the
        ids of text.
        """
        if not escape:
            return _little_endian(self._encode_rendered(self.render_chat(body, now)))
        marked = self._escaper.mark(self._chat(body))
        return _little_endian(self._tokenizer.encode_escaped(self._template.render(marked, now), self._escaper))

    def sight_talk(self, messages: bytes | Raw) -> Sighting:
        """Look at the messages of a request, valid JSON of a list: are they a known talk that goes on?"""
        return self._talks.sight(messages)

    def begin_talk(self, sighting: Sighting, body: Mapping[str, Any], now: datetime) -> bytes:
        """`pack_chat` of the body whose messages were sighted. They will be known, if they had been seen before."""
        packed = self._talks.begin(sighting, Chat.from_body(body), now) if sighting.is_again else None
        return self.pack_chat(body, now) if packed is None else _little_endian(packed)

    def continue_talk(self, sighting: Sighting, body: Mapping[str, Any], now: datetime) -> bytes | None:
        """`pack_chat` of the body whose messages were sighted; `body` has only those of them that come behind the known talk.

        None if that cannot be told, or if they might be too many. Raises PromptError.
        """
        packed = self._talks.go_on(sighting, Chat.from_body(body), now)
        return None if packed is None else _little_endian(packed)

    def pack_text(self, text: str, add_special_tokens: bool = True) -> bytes:
        """The ids of a plain prompt as u32le bytes, with what the model wants around one unless told otherwise.

        Raises PromptError.
        """
        return _little_endian(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, body: Mapping[str, Any], now: datetime, *, escape: bool = False) -> array[int]:
        """`pack_chat` as numbers."""
        return unpack_ids(self.pack_chat(body, now, escape=escape))

    def encode_text(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """`pack_text` as numbers."""
        return unpack_ids(self.pack_text(text, add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids. Bytes that are no whole character come out as U+FFFD, ids without a meaning as nothing.

        Raises PromptError for what is no u32.
        """
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id_: int) -> bytes:
        """The UTF-8 of one token, special ones included; perhaps not of whole characters. b'' for a u32 without a meaning."""
        return self._tokenizer.token_bytes(id_)

    def _encode_rendered(self, text: str) -> bytes:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _chat(self, body: Mapping[str, Any]) -> Chat:
        return Chat.from_body(body).in_servers_form(join_parts=not self._template.reads_parts)

    @cached_property
    def _escaper(self) -> Escaper:
        literals = self._template.literals
        return Escaper(
            [
                text
                for text, special in self._tokenizer.added_tokens.items()
                # Runs of line ends, which Gemma has as tokens, are in templates as plain text.
                if special or (text in literals and not text.isspace())
            ]
        )


def _little_endian(packed: bytes) -> bytes:
    if sys.byteorder == "little":
        return packed
    ids = array("I", packed)
    ids.byteswap()
    return ids.tobytes()


def load_prompter(files: TokenizerFiles, cache_bytes: int = DEFAULT_CACHE_BYTES, *, native: bool = True) -> Prompter:
    """May take seconds: for a thread, not for an event loop. `native`: with fastokens and minijinja where they are there and
    give the same ids. Raises TokenizerError.
    """
    if files.kind == "trivial":
        return Prompter(files.digest, ChatTemplate({"default": CHAT_TEMPLATE}, {}, native=native), TrivialTokenizer())
    from router.tokenizer import HFTokenizer  # only where needed: simulated fleets run without the library

    config = TokenizerConfig.parse(files.config_json)
    template = ChatTemplate(config.chat_templates, config.special_tokens, native=native)
    return Prompter(files.digest, template, HFTokenizer(files.tokenizer_json, config, cache_bytes, native=native))
