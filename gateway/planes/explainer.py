"""Where a request would go now: parsed, prepared and decided as a real one, and not sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway.aliases import Aliases
from gateway.failures import unroutable
from gateway.keys import KeyStore
from gateway.openai import Endpoint, parse_request
from gateway.prepare import Preparer
from router import Decision, Router, Unroutable

__all__ = ["Explainer", "endpoint_of"]


@dataclass(frozen=True, slots=True)
class Explainer:
    router: Router
    max_wait_s: Callable[[], float]
    aliases: Aliases
    preparer: Preparer
    keys: KeyStore
    default_group: str
    draw: Callable[[], float]

    async def explain(self, body: bytes, group: str | None) -> tuple[Decision, bool]:
        """Where a request with this body would go now, and whether it would wait before, because every replica is saturated;
        nothing is sent or promised. Raises `ApiError`.
        """
        request = self.aliases.resolve(parse_request(endpoint_of(body), body, open_access=True))
        pool = self.router.pool(request.model)
        if pool is None:
            raise unroutable(self.router.unserved(), request.model)
        prompt = await self.preparer.prepare(request, pool, self.keys.salt_for(group or self.default_group))
        now = time.monotonic()
        decision = self.router.route(prompt.query(request), now, self.draw())
        if isinstance(decision, Unroutable):
            raise unroutable(decision, request.model)
        return decision, self.router.soonest_s(decision, now) > self.max_wait_s()


class _Shape(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def endpoint_of(body: bytes) -> Endpoint:
    """Where clients would send it; what is no object at all is refused by whoever parses it next."""
    try:
        is_chat = msgspec.json.decode(body, type=_Shape).messages is not msgspec.UNSET
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        is_chat = False
    return "/v1/chat/completions" if is_chat else "/v1/completions"
