"""A replica as the gateway calls it: one Protocol, its values and its errors.

Knows no transport. `gateway.upstream.http1` is the native one; whatever else speaks to replicas stands behind the same
Protocol and passes the same tests.

Errors, all of which say that this replica gave no whole answer to this request::

    UpstreamError
    ├── ConnectFailed        no connection within connect_s; the request was not sent
    │   └── ConnectRefused   nobody listens there, known at once
    ├── UpstreamTimeout      connected, then silent for first_byte_s or idle_s
    ├── UpstreamClosed       the connection ended before the answer did
    ├── ProtocolViolation    what came is not what was asked for, or is larger than we accept
    ├── ReplicaError         a stream that carries an error of the replica's own
    └── LocalExhaustion      we have no descriptor, port or memory for a connection: no fault of the replica's

What must hold: after any of them, and after a cancellation, the connection is closed and nothing is left to release.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Literal, Protocol, cast
from urllib.parse import urlsplit

import msgspec

__all__ = [
    "ConnectFailed",
    "ConnectRefused",
    "LocalExhaustion",
    "Origin",
    "ProtocolViolation",
    "Ready",
    "ReplicaError",
    "Timeouts",
    "Upstream",
    "UpstreamClosed",
    "UpstreamError",
    "UpstreamRequest",
    "UpstreamResponse",
    "UpstreamTimeout",
    "is_local_exhaustion",
]

Header = tuple[bytes, bytes]

Ready = Literal["head", "body", "whole"]
"""How much of an answer its caller can make use of: its head, the first of its body, all of it."""


class UpstreamError(Exception):
    """The replica gave no whole answer."""


class ConnectFailed(UpstreamError):
    """No connection: refused, unreachable, no valid certificate, or not within `Timeouts.connect_s`."""


class ConnectRefused(ConnectFailed):
    """Nobody listens there. It took no time to find out, and cost nobody any work."""


class UpstreamTimeout(UpstreamError):
    """The replica was silent for too long."""


class UpstreamClosed(UpstreamError):
    """The replica closed the connection before the end of its answer."""


class ProtocolViolation(UpstreamError):
    """The replica's bytes are no answer that we can use."""


class ReplicaError(UpstreamError):
    """The replica put an error of its own into a stream that had begun with 200; `data` is its JSON object."""

    def __init__(self, data: bytes) -> None:
        super().__init__("the replica reported an error inside its stream")
        self.data = data


class LocalExhaustion(UpstreamError):
    """This process or machine has no room for another connection. The replica was not asked, and another one could not be."""


_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""EADDRNOTAVAIL: no local port is left for that address."""


def is_local_exhaustion(error: BaseException) -> bool:
    """Whether a connect failed for want of something here, rather than at the replica."""
    return isinstance(error, OSError) and error.errno in _EXHAUSTED


class Origin(msgspec.Struct, frozen=True, cache_hash=True):
    """Where connections go; those to one origin are interchangeable."""

    scheme: Literal["http", "https"]
    host: str
    port: int

    @staticmethod
    @lru_cache(maxsize=1024)  # asked for every request, and replicas are few
    def parse(url: str) -> tuple[Origin, str]:
        """A replica's URL → its origin and the path prefix, '' or without a slash at its end. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("a replica's URL is http:// or https://, a host and perhaps a port")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("a replica's URL has no user information, query or fragment")
        scheme = cast(Literal["http", "https"], parts.scheme)
        port = parts.port or (443 if scheme == "https" else 80)
        return Origin(scheme, parts.hostname, port), parts.path.rstrip("/")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long each stage of a call may take."""

    connect_s: float
    first_byte_s: float
    """From the request to the first byte of the *body*: servers send the status line of a stream before they prefill."""
    idle_s: float
    """Silence between two pieces of the body, while somebody waits for one."""


class UpstreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    origin: Origin
    path: str
    """With the query; ASCII, percent-encoded where needed."""
    headers: Sequence[Header]
    """Names in lower case. The transport adds host, content-length and accept-encoding."""
    usual_headers: tuple[Header, ...] = ()
    """More of them, the same in each request to this path. They go first, and a transport may keep them encoded."""
    body: bytes = b""
    timeouts: Timeouts
    ready: Ready = "head"
    """What the caller has no use for one without the other: of an answer with status 200 `Upstream.send` may wait for so
    much, within the same `timeouts`, and so wake its caller less often.
    """


class UpstreamResponse(Protocol):
    """An answer whose status and headers are here and whose body is to come. Whoever gets one closes it."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> list[Header]:
        """Names in lower case; trailers are not among them."""

    async def read_chunk(self) -> bytes | None:
        """The bytes that have arrived, at least one, else the next that arrive; None at the body's complete end."""

    async def forward(self, take: Callable[[bytes], bool]) -> None:
        """Give `take` each piece of the body as it comes, until it returns False or the body is over; what it raises comes out
        here. A transport may call it inside the callback that brought the piece, so that no task wakes up for it.
        """

    @property
    def ended(self) -> bool:
        """Whether the body came to its complete end: what was not read of it is in memory, and nothing is waited for."""

    async def read(self, limit: int) -> bytes:
        """The rest of the body. Raises `ProtocolViolation` when it is longer than `limit` bytes."""

    async def aclose(self) -> None:
        """Done with it; may be called again. Before the body's end this closes the connection at once: so the replica
        learns that nobody waits any more.
        """


class Upstream(Protocol):
    """All replicas of a gateway. What it counts may be read in any thread."""

    @property
    def in_use(self) -> int:
        """Connections that carry an exchange."""

    @property
    def idle(self) -> int:
        """Connections kept for the next request."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send the request and wait for the head of its answer, and perhaps for more (`UpstreamRequest.ready`). Raises
        `UpstreamError`.
        """

    async def aclose(self) -> None:
        """Close every connection; whoever still reads from one gets `UpstreamClosed`."""
