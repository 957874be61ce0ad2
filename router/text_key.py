"""The key space of replicas whose tokens are unknown: a canonical text of a request, cut into chunks by `router.blocks`.

The walk is the same for ``prompt``, ``messages`` and ``input``: tools first (templates put them before the talk), then
instructions, then each message's role and content. A longer talk therefore starts with the bytes of the shorter one, whatever
order or spacing the client's JSON had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

__all__ = ["canonical_text"]

_FIELD: Final = b"\x1f"
_MESSAGE: Final = b"\x1e"


def canonical_text(body: Mapping[str, Any]) -> bytes:
    """What of a request decides its prompt, as bytes."""
    return b"".join(_walk(body))


def _walk(body: Mapping[str, Any]) -> Iterator[bytes]:
    tools = body.get("tools")
    if tools:
        yield msgspec.json.encode(tools, order="sorted")
        yield _MESSAGE
    if instructions := body.get("instructions"):
        yield _text(instructions)
        yield _MESSAGE
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list) and not (messages and type(messages[0]) is int):
        for message in messages:
            yield from _message(message)
    else:
        yield _text(body.get("prompt") if messages is None else messages)


def _message(message: object) -> Iterator[bytes]:
    if not isinstance(message, Mapping):
        yield _text(message)
    else:
        yield _text(message.get("role"))
        yield _FIELD
        content = message.get("content")
        if isinstance(content, list):
            yield from map(_part, content)
        else:
            yield _text(content)
        calls = message.get("tool_calls")
        if calls:
            yield _FIELD
            yield msgspec.json.encode(calls, order="sorted")
    yield _MESSAGE


def _part(part: object) -> bytes:
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        return _text(part.get("text"))
    return _text(part)


def _text(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value, order="sorted")
