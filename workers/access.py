"""Who may ask a replica for what. Pure.

A replica knows one secret, its *credential*, and whoever shows it is a gateway: it may follow the cache's events and hand
over token ids. Everybody else may only generate, and only where the replica listens on loopback; elsewhere keys, limits
and tenants are the gateway's business, and a door beside it would make them worthless.
"""

from __future__ import annotations

import hmac

from starlette.types import Scope

from workers.api_error import ApiError
from workers.asgi import headers_named

__all__ = ["Access"]


class Access:
    def __init__(self, credential: str, *, on_loopback: bool) -> None:
        assert credential, "an empty secret opens to everybody"
        self._expected = b"Bearer " + credential.encode()
        self._on_loopback = on_loopback

    def is_gateway(self, scope: Scope) -> bool:
        """Compared as bytes, which may be anything, and in constant time. Two headers are none."""
        shown = headers_named(scope, b"authorization")
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._expected)

    def require_gateway(self, scope: Scope) -> None:
        if not self.is_gateway(scope):
            raise ApiError(401, "invalid_api_key", "This needs the replica's credential.")

    def require_client(self, scope: Scope) -> bool:
        """Whoever may generate. True for a gateway."""
        gateway = self.is_gateway(scope)
        if not gateway and not self._on_loopback:
            raise ApiError(401, "invalid_api_key", "This replica answers its gateway only.")
        return gateway
