"""Who calls: the key of a request, or the answer of somebody who has none.

What must hold: whatever goes wrong on the way is a 401, the same for every wrong key and every reason, given before the body is
read. Only the Authorization header counts, never a query, a cookie or a path.

Addresses that fail again and again are told 429 instead, and only while they fail: a valid key is let in from the same address,
so nobody behind a proxy or a NAT is locked out by a neighbour. That bounds what guessing costs in logs and answers; it is no
defence of the keys themselves, whose 256 bits need none. It is counted by each process for itself.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.types import Scope

from gateway.api_error import ApiError
from gateway.keys import KeyKind, KeyRecord, KeyRing, RingSource
from gateway.server.headers import header

__all__ = ["Authenticator", "FailureCounter"]

_log = logging.getLogger("warmpath.keys")

_WINDOW_S: Final = 60.0
_FREE_FAILURES: Final = 100
"""An address may fail so often a minute: a fleet of clients behind one proxy whose key has just expired is not an attack."""
_MAX_ADDRESSES: Final = 4096


class FailureCounter:
    """Failures of each address in windows of a minute. Remembers a bounded number of addresses, forgetting the stalest."""

    def __init__(self, free: int = _FREE_FAILURES, max_addresses: int = _MAX_ADDRESSES) -> None:
        self._free = free
        self._max_addresses = max_addresses
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def failed(self, address: str, now: float) -> float | None:
        """Count one. Seconds until the next window if there were too many in this one. `now`: monotonic seconds."""
        place = _network_of(address)
        began, count = self._windows.pop(place, (now, 0))
        if now - began >= _WINDOW_S:
            began, count = now, 0
        self._windows[place] = began, count + 1
        if len(self._windows) > self._max_addresses:
            self._windows.popitem(last=False)
        return began + _WINDOW_S - now if count >= self._free else None


class Authenticator:
    """Finds out whose key a request carries. `clock`: monotonic seconds; `wall_clock`: Unix seconds."""

    def __init__(
        self,
        keys: RingSource,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        failures: FailureCounter | None = None,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._wall_clock = wall_clock
        self._failures = failures if failures is not None else FailureCounter()

    @property
    def ring(self) -> KeyRing:
        """The one that counts now."""
        return self._keys.ring

    def is_current(self, key: KeyRecord, ring: KeyRing) -> bool:
        """Whether what `ring` said of a key is still so. A change makes a new ring; keys expire by themselves."""
        try:
            return ring is self._keys.ring and key.is_live(self._wall_clock())
        except Exception:  # `client` tells
            return False

    def client(self, scope: Scope) -> KeyRecord:
        """The client key of a request. Raises `ApiError`: 401 for everything else, 429 where there is too much of that."""
        return self._found(scope, "client", "Incorrect API key provided.")

    def any(self, scope: Scope) -> KeyRecord:
        """The same of any kind."""
        return self._found(scope, None, "This needs a valid key of this gateway, sent as a bearer token.")

    def _found(self, scope: Scope, kind: KeyKind | None, message: str) -> KeyRecord:
        try:
            key = self._keys.ring.identify(header(scope, b"authorization") or b"", self._wall_clock())
        except ApiError:  # two of them
            key = None
        except Exception as error:  # nobody is let in by a bug
            _log.error("authentication failed: %s", type(error).__name__)
            key = None
        if key is None or kind not in (None, key.kind):
            raise self._refusal(scope, message)
        return key

    def _refusal(self, scope: Scope, message: str) -> ApiError:
        client = scope.get("client")
        wait_s = self._failures.failed(client[0] if client else "", self._clock())
        if wait_s is None:
            return ApiError(401, "invalid_api_key", message)
        return ApiError(
            429,
            "too_many_invalid_keys",
            "Too many requests without a valid key came from this address.",
            retry_after_s=wait_s,
            should_retry=False,
        )


def _network_of(address: str) -> str:
    """Of IPv6 the first half: who has one address has all of them."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return ""
