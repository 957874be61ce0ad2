"""What a tenant may have of a saturated fleet: a share against others, and how urgent its requests may be. Pure.

A request may say that it can wait, in the header ``x-warmpath-priority`` (interactive, default, batch) or, where that comes
from a Kubernetes route, ``x-gateway-inference-objective``. It cannot ask for more than its tenant has: who asks for more gets
what there is, since proxies and SDKs set such headers for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.api_error import ApiError
from router import Priority

__all__ = ["PRIORITIES", "Standing", "priority_asked"]

PRIORITIES: Final[Mapping[str, Priority]] = {priority.name.lower(): priority for priority in Priority}
_BY_HEADER: Final[Mapping[bytes, Priority]] = {name.encode(): priority for name, priority in PRIORITIES.items()}


@dataclass(frozen=True, slots=True)
class Standing:
    weight: float = 1.0
    """Its share of a saturated fleet against others of 1."""
    priority: Priority = Priority.DEFAULT
    """Of requests that ask for none, and the highest that one may ask for."""


def priority_asked(headers: Iterable[tuple[bytes, bytes]], highest: Priority) -> Priority:
    """Raises `ApiError` 400 for a priority that is none. An objective may have any name; one that is not ours says nothing."""
    asked = highest
    for name, value in headers:
        if name == b"x-warmpath-priority":
            found = _BY_HEADER.get(value.lower())
            if found is None:
                known = ", ".join(PRIORITIES)
                raise ApiError(400, "invalid_value", f"'x-warmpath-priority' is one of {known}.")
            asked = max(asked, found)
        elif name == b"x-gateway-inference-objective":
            asked = max(asked, _BY_HEADER.get(value.lower(), asked))
    return asked
