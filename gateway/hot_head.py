"""What a request's head says to the hot path, read once for all requests that come with the same one.

Nothing here is remembered of a request, and nothing of the gateway's state but who the client was found to be, with what that
was found by: a key that is revoked meanwhile, or rules that are loaded anew, count from the very next request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from weakref import ReferenceType

from starlette.types import Scope

from gateway.keys import KeyRecord, KeyRing
from gateway.limits import Caller
from gateway.openai import ENDPOINTS
from gateway.server.headers import given_request_id, last_header, require_json
from gateway.stored import StoredCall, parse_stored_call
from gateway.tenants import Standing, priority_asked
from gateway.tracing import TRACE_HEADERS
from router import Priority

__all__ = ["Client", "HotHead", "hot_head"]

_MAX_RETRY_DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks."""

    key: KeyRecord | None
    """None where the gateway is open."""
    tenant: str
    group: str
    """The sharing group: whose caches it may hit."""
    standing: Standing
    caller: Caller
    ring: ReferenceType[KeyRing] | None
    """Weak: an idle connection must not keep all keys that there once were."""
    access: object
    """That (a `gateway.hotpath.Access`) and the ring are what all of this was found by."""


class HotHead:
    __slots__ = (
        "_highest_priority",
        "_is_json",
        "client",
        "client_retries",
        "endpoint",
        "given_id",
        "method",
        "scope",
        "stored",
        "trace_headers",
    )

    def __init__(self, scope: Scope, stored: StoredCall | None) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.stored = stored
        """What it asks about a response that is there already; None for a request with a body."""
        self.endpoint: str = stored.endpoint if stored is not None else scope["path"]
        self.given_id = given_request_id(scope)
        self.client_retries = _client_retries(scope)
        self.trace_headers = [pair for pair in scope["headers"] if pair[0] in TRACE_HEADERS]
        self.client: Client | None = None
        """As it was found the last time."""
        self._is_json = False
        self._highest_priority: Priority | None = None

    def require_json(self) -> None:
        """See `gateway.server.headers.require_json`."""
        if not self._is_json:
            require_json(self.scope)
            self._is_json = True

    def priority(self, highest: Priority) -> Priority:
        """See `gateway.tenants.priority_asked`."""
        if self._highest_priority is None:
            self._highest_priority = priority_asked(self.scope["headers"], min(Priority))
        return max(highest, self._highest_priority)


def hot_head(scope: Scope) -> HotHead | None:
    """None for what the hot path has no route for."""
    path, method = scope["path"], scope["method"]
    if path in ENDPOINTS and method == "POST":
        return HotHead(scope, None)
    stored = parse_stored_call(method, path, scope["query_string"])
    return HotHead(scope, stored) if stored is not None else None


def _client_retries(scope: Scope) -> int:
    """What OpenAI's SDKs say when they try again; 0 for anything else."""
    value = last_header(scope, b"x-stainless-retry-count")
    return int(value) if value is not None and value.isdigit() and len(value) <= _MAX_RETRY_DIGITS else 0
