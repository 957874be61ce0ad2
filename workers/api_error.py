"""What a client is told instead of an answer, and the decoding whose failures become exactly that. Pure."""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

__all__ = ["ApiError", "decode_json", "invalid_value"]

_TYPE_BY_STATUS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """An answer other than success, in OpenAI's shape. The one exception that reaches the edge of a request."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else _TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


_T = TypeVar("_T")


def invalid_value(message: str, param: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)


def decode_json(decoder: msgspec.json.Decoder[_T], body: bytes, root: str = "") -> _T:
    """Decode, with every failure as 400. `root` is the field that `body` is the value of, when it is not the whole body."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        param, reason = _place(str(error), root)
        raise ApiError(400, "invalid_type", f"Invalid request: {reason}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"The request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "The request body is nested too deeply.") from error


_AT: Final = re.compile(r"(?P<reason>.*) - at (`key` in )?`\$(?P<path>.*)`", re.DOTALL)


def _place(text: str, root: str) -> tuple[str | None, str]:
    """msgspec writes "Expected `int`, got `str` - at `$.stop[1]`": the field's path, and the sentence with that path."""
    match = _AT.fullmatch(text)
    reason, path = (match["reason"], match["path"]) if match else (text, "")
    missing = re.search(r"missing required field `(\w+)`", reason)
    param = (root + path.replace("[...]", "") + (f".{missing[1]}" if missing else "")).lstrip(".")
    return (param or None), f"{reason} at '{param}'" if param else reason
