"""Calls for a response that is there already: ``/v1/responses/{id}``, its items, its end. Pure.

An id is what servers make: anything else is no path of ours, and what goes upstream is put together here, never the client's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from gateway.openai import Endpoint, GenerationRequest

__all__ = ["StoredCall", "parse_stored_call"]

_ENDPOINT: Final[Endpoint] = "/v1/responses"
_PATH: Final = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(|/cancel|/input_items)")
_QUERY: Final = re.compile(rb"[A-Za-z0-9_.=&%\[\]-]{0,1024}")
_METHODS: Final[Mapping[tuple[str, str], Literal["GET", "POST", "DELETE"]]] = {
    ("GET", ""): "GET",
    ("DELETE", ""): "DELETE",
    ("POST", "/cancel"): "POST",
    ("GET", "/input_items"): "GET",
}


@dataclass(frozen=True, slots=True)
class StoredCall:
    method: Literal["GET", "POST", "DELETE"]
    response_id: str
    subpath: str
    """With the query."""
    stream: bool
    endpoint: Endpoint = _ENDPOINT

    def request(self, model: str) -> GenerationRequest:
        """`model`: of the replicas to ask."""
        return GenerationRequest(
            endpoint=self.endpoint, model=model, method=self.method, subpath=self.subpath, stream=self.stream
        )


def parse_stored_call(method: str, path: str, query: bytes) -> StoredCall | None:
    """None for what is no such call."""
    if not path.startswith(_ENDPOINT):
        return None
    found = _PATH.fullmatch(path)
    if found is None or (wanted := _METHODS.get((method, found[2]))) is None or not _QUERY.fullmatch(query):
        return None
    subpath = f"/{found[1]}{found[2]}"
    if query:
        subpath += f"?{query.decode('ascii')}"
    return StoredCall(wanted, found[1], subpath, stream=wanted == "GET" and b"stream=true" in query.split(b"&"))
