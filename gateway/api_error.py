"""What a client is told instead of an answer, in OpenAI's shape. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["ApiError", "error_body", "error_type"]

_TYPE_BY_STATUS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}


class ApiError(Exception):
    """An answer other than success. The one exception that reaches the edge of a request."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        type_: str | None = None,
    ) -> None:
        """`should_retry`: what OpenAI's SDKs are told, whatever they would do by themselves at this status. `type_`: where it
        is not that of the status.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.type = type_ or error_type(status)

    def body(self) -> bytes:
        return error_body(self.message, type_=self.type, code=self.code, param=self.param)


def error_type(status: int) -> str:
    return "server_error" if status >= 500 else _TYPE_BY_STATUS.get(status, "invalid_request_error")


def error_body(message: str, *, type_: str, code: str, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})
