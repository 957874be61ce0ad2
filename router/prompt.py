"""Chat → text → token ids, the same in gateway and worker: the public face of all that knows about prompts.

    router.chat             what a request says about its prompt
    router.template         the model's chat template, in router.sandbox
    router.tokenizer        text ↔ ids of a Hugging Face tokenizer, by way of router.segments
    router.token_bytes      tokens → the bytes they stand for
    router.trivial          the same without files, for simulated replicas and tests
    router.tokenizer_files  what all of it is made from
    router.prompt_errors    what it raises

What must hold: ids equal those of `apply_chat_template` in Hugging Face transformers. Two prompters with one digest give the
same ids for the same request; gateway and worker rely on it when they compare block names.

A `Prompter` may be shared by an event loop and its worker threads. All of it is fixed at load but the segment cache, where
no thread waits for another (`router.segments.SegmentCache`). What an encoding costs is its new text: 0.3 ms a KB, during which
the interpreter's lock is free. Known text costs 1 to 8 us a KB, the template 4 to 15 us a message. So a short body is best
encoded where it is, and one of more than some ten KB in a thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

from router.chat import Chat
from router.prompt_errors import PromptError, TokenizerError
from router.template import ChatTemplate
from router.tokenizer_files import TokenizerConfig, TokenizerFiles
from router.trivial import CHAT_TEMPLATE, TrivialTokenizer

__all__ = ["DEFAULT_CACHE_BYTES", "PromptError", "Prompter", "TokenizerError", "TokenizerFiles", "load_prompter"]

DEFAULT_CACHE_BYTES: Final = 64 << 20
"""About 7 million tokens of English: a thousand talks of 7,000 tokens."""


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
    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]: ...
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

    def render_chat(self, body: Mapping[str, Any], now: datetime) -> str:
        """The text of a chat completion request, given as JSON values. Raises PromptError.

        `now` is the wall clock, for templates that write the date into the prompt.
        """
        chat = Chat.from_body(body).in_servers_form(join_parts=not self._template.reads_parts)
        return self._template.render(chat, now)

    def encode_chat(self, body: Mapping[str, Any], now: datetime) -> array[int]:
        """The ids of a chat completion request: nothing is added to what its template wrote. Raises PromptError."""
        return self._tokenizer.encode(self.render_chat(body, now), add_special_tokens=False)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """The ids of a plain prompt, with what the model wants around one unless told otherwise. Raises PromptError."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids. Bytes that are no whole character come out as U+FFFD, ids without a meaning as nothing.

        Raises PromptError for what is no u32.
        """
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id_: int) -> bytes:
        """The UTF-8 of one token, special ones included; perhaps not of whole characters. b'' for a u32 without a meaning."""
        return self._tokenizer.token_bytes(id_)


def load_prompter(files: TokenizerFiles, cache_bytes: int = DEFAULT_CACHE_BYTES) -> Prompter:
    """May take seconds: for a thread, not for an event loop. Raises TokenizerError."""
    if files.kind == "trivial":
        return Prompter(files.digest, ChatTemplate({"default": CHAT_TEMPLATE}, {}), TrivialTokenizer())
    from router.tokenizer import HFTokenizer  # only where needed: simulated fleets run without the library

    config = TokenizerConfig.parse(files.config_json)
    template = ChatTemplate(config.chat_templates, config.special_tokens)
    return Prompter(files.digest, template, HFTokenizer(files.tokenizer_json, config, cache_bytes))
