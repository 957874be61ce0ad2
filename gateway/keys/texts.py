"""What a key looks like: ``wp-<id>-<secret>``. Pure but for the random draws of `new_text`.

The kinds are told apart by their prefix, which is part of what is digested: a client's key is never an admin's.

    wp-   client   the OpenAI API
    wpa-  admin    everything under /admin/v1
    wpj-  join     replicas that register themselves, and nothing else

A secret carries 256 random bits, which is why a fast hash of it is enough.
"""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["PREFIXES", "KeyKind", "KeyText", "new_id", "new_text", "parse_bearer", "parse_text"]

KeyKind = Literal["client", "admin", "join"]

PREFIXES: Final[dict[KeyKind, str]] = {"client": "wp", "admin": "wpa", "join": "wpj"}
_KINDS: Final[dict[bytes, KeyKind]] = {prefix.encode(): kind for kind, prefix in PREFIXES.items()}
_TEXT: Final = re.compile(rb"(wp[aj]?)-([a-z0-9]{4,32})-([A-Za-z0-9_-]{16,128})")
_BEARER: Final = re.compile(rb"(?i:bearer) +([\x21-\x7e]+) *")
_MAX_HEADER_BYTES: Final = 256

_ID_ALPHABET: Final = string.ascii_lowercase + string.digits
_ID_CHARS: Final = 10
_SECRET_ALPHABET: Final = string.ascii_letters + string.digits
"""No punctuation: a double click selects the whole secret."""
_SECRET_CHARS: Final = 43
"""62 ** 43 > 2 ** 256."""


@dataclass(frozen=True, slots=True)
class KeyText:
    """A text of the right shape; nobody has looked whether it opens anything."""

    kind: KeyKind
    id: str
    text: bytes

    def __repr__(self) -> str:
        return f"KeyText({self.kind}, {self.id})"


def parse_text(text: bytes) -> KeyText | None:
    parts = _TEXT.fullmatch(text)
    return None if parts is None else KeyText(_KINDS[parts[1]], parts[2].decode(), text)


def parse_bearer(header: bytes) -> KeyText | None:
    """The key in an Authorization header."""
    if len(header) > _MAX_HEADER_BYTES or (bearer := _BEARER.fullmatch(header)) is None:
        return None
    return parse_text(bearer[1])


def new_id() -> str:
    return _random(_ID_ALPHABET, _ID_CHARS)


def new_text(kind: KeyKind, key_id: str) -> str:
    return f"{PREFIXES[kind]}-{key_id}-{_random(_SECRET_ALPHABET, _SECRET_CHARS)}"


def _random(alphabet: str, length: int) -> str:
    return "".join(secrets.choice(alphabet) for _ in range(length))
