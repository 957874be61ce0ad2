"""A request's JSON → its values, or why it is refused. Pure.

What passes means the same to every reader behind us and costs each of them a bounded time. JSON leaves open what a repeated
name means, how deep values may nest and how long numbers may be; readers differ, and a request must not be one thing here and
another at its replica.

jiter reads at msgspec's speed and finds repeated names on the way, which msgspec cannot: it keeps the last one. What else there
is to see is in the values, of which a long prompt has few, so looking at them costs 1 us at 1 KB and 15 us at 256 KB.
"""

from __future__ import annotations

import math
from typing import Any, Final

import jiter

from gateway.api_error import ApiError

__all__ = ["MAX_DEPTH", "MAX_INTEGER", "MAX_VALUES", "decode_object", "invalid_json"]

MAX_DEPTH: Final = 64
MAX_VALUES: Final = 100_000
"""More is no talk. Decoding so many takes 10 ms; a long list of token ids stays below."""
MAX_INTEGER: Final = 1 << 53
"""What a double holds exactly. Beyond, JavaScript and its kin read another number."""

_WIDE_INTEGERS: Final = "seed"
"""The one field where clients send 64 bits, and every engine takes them."""
_SAFE_BYTES: Final = 512 << 10
"""Up to here even the worst, lists of nothing, are decoded in 0.05 s, and are counted then."""
_SLICE_BYTES: Final = 64 << 10
_MAX_TOLD_CHARS: Final = 200


def decode_object(body: bytes) -> dict[str, Any]:
    """`body` must be known to be an object on its outside. Raises `ApiError` 400."""
    if len(body) > _SAFE_BYTES:
        _require_few_values(body)
    try:
        fields: dict[str, Any] = jiter.from_json(
            body, catch_duplicate_keys=True, allow_inf_nan=False, cache_mode="keys"
        )
    except ValueError as error:
        told = str(error)[:_MAX_TOLD_CHARS]
        if told.startswith("Detected duplicate key"):
            raise ApiError(400, "duplicate_key", f"The request body repeats a name: {told}") from error
        raise invalid_json(told) from error
    _require_plain_values(fields)
    return fields


def invalid_json(why: str) -> ApiError:
    return ApiError(400, "invalid_json", f"The request body is not valid JSON: {why}")


def _require_plain_values(fields: dict[str, Any]) -> None:
    outer = fields.copy()
    outer.pop(_WIDE_INTEGERS, None)
    level: list[Any] = [outer]
    num_values = 0
    for _ in range(MAX_DEPTH):
        below = []
        for container in level:
            num_values += len(container)
            if num_values > MAX_VALUES:
                raise _too_many_values()
            for value in container.values() if type(container) is dict else container:
                kind = type(value)
                if kind is str:
                    continue
                if kind is dict or kind is list:
                    below.append(value)
                elif kind is int:
                    if not -MAX_INTEGER <= value <= MAX_INTEGER:
                        raise invalid_json(f"an integer is beyond {MAX_INTEGER}")
                elif kind is float and math.isinf(value):
                    raise invalid_json("a number is out of range")
        if not below:
            return
        level = below
    raise invalid_json(f"it is nested deeper than {MAX_DEPTH}")


def _require_few_values(body: bytes) -> None:
    """Count before decoding, for a million empty lists take 0.3 s. An empty one counts twice.

    Slice by slice, so that other threads get their turn.
    """
    if _most_values(body) <= MAX_VALUES:
        return
    num_values = 1
    in_string = False
    start = 0
    while start < len(body):
        end = start + _SLICE_BYTES
        while body[end - 1 : end] == b"\\":  # what it escapes belongs to it
            end += 1
        pieces = body[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[in_string::2])
        num_values += _most_values(outside)
        if num_values > MAX_VALUES:
            raise _too_many_values()
        in_string ^= len(pieces) % 2 == 0
        start = end


def _most_values(text: bytes) -> int:
    """A value follows a comma or opens a list or an object, where these are no part of a string."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _too_many_values() -> ApiError:
    return invalid_json(f"it has more than {MAX_VALUES} values")
