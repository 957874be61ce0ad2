"""What the headers of a request say, read from its ASGI scope; and the id that it has or gets."""

from __future__ import annotations

import os
import re
from typing import Final

from starlette.types import Scope

from gateway.api_error import ApiError

__all__ = [
    "HEADERS_BY_NAME",
    "given_request_id",
    "header",
    "last_header",
    "new_request_id",
    "request_id",
    "require_json",
]

HEADERS_BY_NAME: Final = "warmpath.headers"
"""In a scope: a dict of its headers, of repeated ones the last. Made where it is missing."""

_SANE_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,128}")
_ID_BYTES: Final = 12
_IDS_PER_DRAW: Final = 256
_spare_ids: list[str] = []


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header that may appear once; None when absent. A repeated one is refused as 400."""
    headers = scope["headers"]
    by_name = _by_name(scope)
    if len(by_name) < len(headers) and sum(key == name for key, _ in headers) > 1:
        raise ApiError(400, "duplicate_header", f"The header '{name.decode('latin-1')}' appears more than once.")
    return by_name.get(name)


def _by_name(scope: Scope) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] | None = scope.get(HEADERS_BY_NAME)
    if found is None:
        found = scope[HEADERS_BY_NAME] = dict(scope["headers"])
    return found


def last_header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header that only informs: of a repeated one the last, None when absent."""
    return _by_name(scope).get(name)


def request_id(scope: Scope) -> str:
    """The caller's x-request-id if it is sane, else a new one."""
    return given_request_id(scope) or new_request_id()


def given_request_id(scope: Scope) -> str | None:
    """The caller's x-request-id if it is sane."""
    value = last_header(scope, b"x-request-id")
    return value.decode() if value is not None and _SANE_ID.fullmatch(value) else None


def new_request_id() -> str:
    """With 96 random bits. They are drawn for many at once, for each draw is a system call of some microseconds."""
    try:
        return _spare_ids.pop()
    except IndexError:
        drawn = os.urandom(_ID_BYTES * _IDS_PER_DRAW).hex()
        step = 2 * _ID_BYTES
        _spare_ids.extend(f"req-{drawn[start : start + step]}" for start in range(0, len(drawn), step))
        return _spare_ids.pop()


def require_json(scope: Scope) -> None:
    """Raises `ApiError` 415 for a body that is announced as anything else, or compressed: nothing is guessed or inflated."""
    kind = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "unsupported_media_type", "The body must be sent as 'content-type: application/json'.")
    if header(scope, b"content-encoding") not in (None, b"identity"):
        raise ApiError(415, "unsupported_encoding", "A compressed request body is not supported.")
