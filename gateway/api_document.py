"""What there is to call, as an OpenAPI 3.1 document. Pure.

What must hold: a document is made from the types that decode bodies and encode answers wherever there are some, and names every
status that can be answered, so that a test can hold a running gateway to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal

import msgspec

__all__ = ["Error", "Needs", "Operation", "openapi"]

_TOLD_BY_STATUS: Final = {
    "4XX": "Refused.",
    "502": "What replicas gave was no answer.",
    "503": "Cannot be had now; `retry-after` says when to ask again, where that is known.",
    "504": "No replica answered in time.",
}


class Needs(Enum):
    """Which kinds of key an endpoint serves."""

    NO_KEY = frozenset[str]()
    CLIENT = frozenset({"client"})
    JOIN = frozenset({"join", "admin"})
    ADMIN = frozenset({"admin"})


class _ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """Every answer that is no success."""

    error: _ErrorDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path. Bodies and answers are types, or schemas of JSON where there is no type."""

    method: Literal["GET", "PUT", "POST", "PATCH", "DELETE"]
    path: str
    needs: Needs
    summary: str
    answer: Any
    body: Any = None
    status: int = 200
    query: Mapping[str, str] = field(default_factory=dict)
    """What it reads of the query: names, and what they are about."""
    refusal: Any = None
    """Type of its own refusals, where they are not in the shape of `Error`."""
    failures: Sequence[int] = ()
    """Statuses from 500 on that it may answer with."""
    media: str = ""
    """Of the answer, where it is not JSON, or text for one of type str."""
    streams: bool = False
    """Whether the answer may be server-sent events as well."""


def openapi(operations: Sequence[Operation], *, title: str, version: str) -> dict[str, Any]:
    types = [
        Error,
        *(
            kind
            for operation in operations
            for kind in (operation.answer, operation.body, operation.refusal)
            if kind is not None and not isinstance(kind, dict)
        ),
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path.replace(":path}", "}"), {})[operation.method.lower()] = _described(
            operation, schema_of
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _described(operation: Operation, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    def schema(kind: Any) -> Any:
        return kind if isinstance(kind, dict) else schema_of[repr(kind)]

    def content(kind: Any, media: str = "") -> dict[str, Any]:
        return {media or ("text/plain" if kind is str else "application/json"): {"schema": schema(kind)}}

    answers = content(operation.answer, operation.media)
    if operation.streams:
        answers["text/event-stream"] = {}
    refusals = content(Error)
    if operation.refusal is str:
        refusals |= content(str)
    elif operation.refusal is not None:
        refusals["application/json"] = {"schema": {"anyOf": [schema(Error), schema(operation.refusal)]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            str(operation.status): {"description": "Done.", "content": answers},
            **{
                status: {"description": _TOLD_BY_STATUS[status], "content": refusals}
                for status in ("4XX", *map(str, operation.failures))
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::path)?}", operation.path)
    ] + [
        {"name": name, "in": "query", "required": False, "description": about, "schema": {"type": "string"}}
        for name, about in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": content(operation.body)}
    if operation.needs is not Needs.NO_KEY:
        kinds = " or ".join(sorted(operation.needs.value))
        described["security"] = [{"key": []}]
        described["description"] = f"Needs a key of kind {kinds}."
    return described
