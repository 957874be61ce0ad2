"""Special tokens in the texts of messages, when they shall be texts: `special_tokens_in_text: escape`.

As ``sanitize_control_tokens`` of Hugging Face transformers does it, so ids are equal to theirs: what a client wrote is marked
before rendering, with two private-use characters around every control token, and what is marked is then tokenized as if there
were no special tokens. Where a template takes a text apart at such a token (Qwen3's at ``</think>``), half a mark is left: it
is dropped, and still nothing is joined across it.

One thing more than there: a text that ends with the beginning of a control token gets a mark behind it, so that two texts
which a template puts side by side never make up a token between them.

Control tokens are all special tokens, and of the other added ones those that the template writes itself. Pure, of no model:
`router.prompt` says which tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from router.chat import Chat
from router.prompt_errors import PromptError
from router.segments import longest_match

__all__ = ["Escaper"]

_BEGIN: Final = "\U000f0000"
_END: Final = "\U000f0001"
_IN_ASCII_JSON: Final = "\\udb80\\udc0"
"""How both begin when a template asks `tojson` for ASCII."""

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Some templates make tokens out of roles: any other could be the name of a special one."""


class Escaper:
    def __init__(self, control_tokens: Collection[str]) -> None:
        words = set(filter(None, control_tokens))
        token = longest_match(words).pattern if words else "((?!))"
        self._token = re.compile(token)
        self._split = re.compile(f"{_BEGIN}{token}{_END}|[{_BEGIN}{_END}]").split
        self._beginnings = frozenset(word[:length] for word in words for length in range(1, len(word)))
        self._longest = max(map(len, words), default=0) - 1
        self._first = (
            re.compile(f"[{re.escape(''.join({word[0] for word in words}))}]") if words else re.compile("(?!)")
        )

    def mark(self, chat: Chat) -> Chat:
        """The same chat with every control token in it marked. Raises PromptError for a role that is none."""
        for message in chat.messages:
            if message.get("role") not in _ROLES:
                raise PromptError(f"every message needs a role, one of {', '.join(sorted(_ROLES))}")
        return replace(
            chat,
            messages=[self._marked(message) for message in chat.messages],
            tools=self._marked(chat.tools),
            documents=self._marked(chat.documents),
            variables=self._marked(chat.variables),
        )

    def encode(self, rendered: str, encode: Callable[[str], bytes], encode_as_text: Callable[[str], bytes]) -> bytes:
        """Packed ids of what a template wrote over a marked chat. `encode` gets the pieces of it, never an empty one, and
        `encode_as_text` control tokens.
        """
        if _IN_ASCII_JSON in rendered:
            rendered = rendered.replace(_IN_ASCII_JSON + "0", _BEGIN).replace(_IN_ASCII_JSON + "1", _END)
        pieces = self._split(rendered)  # text, token or None, text, ..., text
        packed = [encode(piece) if piece else b"" for piece in pieces[::2]]
        for position, token in enumerate(pieces[1::2]):
            if token is not None:
                packed[position] += encode_as_text(token)
        return b"".join(packed)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item) for item in value]
        return value

    def _marked_text(self, text: str) -> str:
        if _BEGIN in text or _END in text:  # nobody else's marks
            text = text.replace(_BEGIN, "").replace(_END, "")
        text = self._token.sub(f"{_BEGIN}\\1{_END}", text)
        # Templates trim texts, so what comes after white space counts as the end.
        trimmed = text.rstrip()
        tail = trimmed[-self._longest :] if self._longest > 0 else ""
        for found in self._first.finditer(tail):
            if tail[found.start() :] in self._beginnings:
                return trimmed + _END + text[len(trimmed) :]
        return text
