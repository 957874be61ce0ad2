"""A request's line and headers as they arrive: bounded, checked, and made into an ASGI scope. Pure."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from httptools import HttpParserError, parse_url
from starlette.types import Scope

from gateway.api_error import ApiError
from gateway.server.headers import HEADERS_BY_NAME

__all__ = ["RequestHead"]

MAX_HEAD_BYTES: Final = 32 << 10
"""Of all headers and trailers together, names and values. This and the following are above what SDKs and proxies send."""
MAX_HEADER_BYTES: Final = 16 << 10
MAX_HEADERS: Final = 100
MAX_TARGET_BYTES: Final = 8 << 10

MAX_RAW_BYTES: Final = 2 * MAX_HEAD_BYTES + MAX_TARGET_BYTES
"""That come in a row and are neither a whole head nor a body: an unfinished header or trailer, of which the parser would keep
any amount until it is whole, and extensions of chunks."""

_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}


class RequestHead:
    """All methods raise `ApiError` for what no app should see."""

    __slots__ = (
        "_by_name",
        "_num_bytes",
        "_raw_bytes",
        "_target",
        "complete",
        "expects_continue",
        "headers",
        "is_chunked",
    )

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._by_name: dict[bytes, bytes] = {}
        self.complete = False
        """Whether the headers have all arrived; what comes then are trailers."""
        self.expects_continue = False
        self.is_chunked = False
        self._target = b""
        self._num_bytes = 0
        self._raw_bytes = 0

    def add_raw(self, num_bytes: int) -> None:
        """So much has come for it, and it is not complete."""
        self._raw_bytes += num_bytes
        if self._raw_bytes > MAX_RAW_BYTES:
            raise head_too_large()

    def add_target(self, data: bytes) -> None:
        self._target += data
        if len(self._target) > MAX_TARGET_BYTES:
            raise ApiError(414, "target_too_long", "The request's target is too long.")

    def add_header(self, name: bytes, value: bytes) -> None:
        size = len(name) + len(value)
        self._num_bytes += size
        if self._num_bytes > MAX_HEAD_BYTES or size > MAX_HEADER_BYTES:
            raise head_too_large()
        if self.complete:
            return  # trailers are of no use to us
        if len(self.headers) == MAX_HEADERS:
            raise head_too_large()
        self.headers.append((name.lower(), value))

    def scope(self, method: bytes, version: str, peers: Mapping[str, Any]) -> Scope:
        """The whole head, with `peers` for what only the connection knows."""
        if version not in ("1.1", "1.0"):
            raise ApiError(505, "http_version", "HTTP/1.1 is spoken here.")
        self.complete = True
        self._by_name = dict(self.headers)
        self._check_host(version)
        if b"transfer-encoding" in self._by_name:
            self._check_encoding(version)
        if b"expect" in self._by_name:
            self._check_expectation(version)
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": method.decode("ascii"),
            "root_path": "",
            "headers": self.headers,
            HEADERS_BY_NAME: self._by_name,
            "state": {},
            **peers,
            **_split(self._target),
        }

    @property
    def announced_bytes(self) -> int:
        """Of the body of a complete head; 0 where it has none, or its length is not known before."""
        return int(self._by_name.get(b"content-length", 0))

    def _values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def _check_host(self, version: str) -> None:
        if len(self._by_name) == len(self.headers) and (host := self._by_name.get(b"host")) and _is_host(host):
            return  # nearly always
        hosts = self._values(b"host")
        if len(hosts) != 1 and not (version == "1.0" and not hosts):
            raise ApiError(400, "invalid_host", "A request has one Host header.")
        if hosts and not _is_host(hosts[0]):
            raise ApiError(400, "invalid_host", "The Host header is no host.")

    def _check_encoding(self, version: str) -> None:
        """The parser takes any list that ends in chunked, and takes it of HTTP/1.0; a proxy before us may read it otherwise."""
        encodings = [value.lower() for value in self._values(b"transfer-encoding")]
        if encodings != [b"chunked"] or version == "1.0":
            raise ApiError(400, "invalid_http", "Transfer-Encoding is chunked, once, or absent.")
        self.is_chunked = True

    def _check_expectation(self, version: str) -> None:
        if [value.lower() for value in self._values(b"expect")] != [b"100-continue"]:
            raise ApiError(417, "expectation_failed", "Only 'expect: 100-continue' is understood.")
        self.expects_continue = version == "1.1"

    def without_upgrade(self, method: bytes, version: str) -> bytes:
        """The same request without its offer to speak another protocol: a server that ignores the offer answers it as it is."""
        if method == b"CONNECT":
            raise ApiError(405, "method_not_allowed", "This is no proxy.")
        closes = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
        lines = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in (b"connection", b"upgrade")]
        last = b"connection: close\r\n" if closes else b""
        return b"%b %b HTTP/%b\r\n%b%b\r\n" % (method, self._target, version.encode(), b"".join(lines), last)


# The two below are asked for every request, and clients ask for the same few things.


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


@lru_cache(maxsize=256)
def _split(target: bytes) -> Mapping[str, Any]:
    """A request's target → the path and query of its scope."""
    try:
        url = parse_url(target)
        raw_path = url.path or b"/"
        path = urllib.parse.unquote(raw_path.decode("ascii")) if b"%" in raw_path else raw_path.decode("ascii")
    except (HttpParserError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_target", "The request's target is no path.") from error
    return {"path": path, "raw_path": raw_path, "query_string": url.query or b""}


def head_too_large() -> ApiError:
    return ApiError(431, "headers_too_large", "The request's headers are too large.")
