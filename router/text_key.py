"""The key space of replicas whose tokens are unknown: a canonical text of a request, cut into chunks by `router.blocks`.

The walk is the same for ``prompt``, ``messages`` and ``input``: tools first (templates put them before the talk), then
instructions, then each message's role and content. A longer talk therefore starts with the bytes of the shorter one, whatever
order or spacing the client's JSON had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["canonical_text"]

_FIELD: Final = b"\x1f"
_MESSAGE: Final = b"\x1e"


def canonical_text(body: Mapping[str, Any]) -> bytes:
    """What of a request decides its prompt, as bytes."""
    pieces: list[bytes] = []
    if tools := body.get("tools"):
        pieces += (msgspec.json.encode(tools, order="sorted"), _MESSAGE)
    if instructions := body.get("instructions"):
        pieces += (_text(instructions), _MESSAGE)
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list) and not (messages and type(messages[0]) is int):
        for message in messages:
            _add_message(pieces, message)
    else:
        pieces.append(_text(body.get("prompt") if messages is None else messages))
    return b"".join(pieces)


def _add_message(pieces: list[bytes], message: object) -> None:
    if not isinstance(message, dict):
        pieces += (_text(message), _MESSAGE)
        return
    content = message.get("content")
    pieces += (_text(message.get("role")), _FIELD)
    if isinstance(content, list):
        pieces += map(_part, content)
    else:
        pieces.append(_text(content))
    if calls := message.get("tool_calls"):
        pieces += (_FIELD, msgspec.json.encode(calls, order="sorted"))
    pieces.append(_MESSAGE)


def _part(part: object) -> bytes:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        return _text(part.get("text"))
    return _text(part)


def _text(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value, order="sorted")
