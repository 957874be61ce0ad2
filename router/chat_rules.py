"""What must hold of a chat before a template sees it: one definition, for whoever renders. Pure.

Types and bounds only. What a message means, and whether a template takes it, is the template's affair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from router.prompt_errors import PromptError

__all__ = ["MAX_TOOLS", "check_chat"]

MAX_MESSAGES: Final = 2048
MAX_TOOLS: Final = 128
MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_SCHEMA_DEPTH: Final = 32
"""Sixteen objects in one another: each takes two levels of JSON, its properties and itself."""

_TEXT_ROLES: Final = frozenset({"system", "developer", "user", "assistant"})
_ROLES: Final = _TEXT_ROLES | {"tool", "function"}
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_chat(body: Mapping[str, Any]) -> None:
    """`body`: a chat completion request as JSON values. Raises `PromptError` with the place of the first fault."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong_type("messages", "must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise _invalid("messages", f"may hold {MAX_MESSAGES} messages")
    for index, message in enumerate(messages):
        if not _is_plain(message):
            _check_message(message, f"messages[{index}]")
    if (tools := body.get("tools")) is not None:
        _check_tools(tools)


def _is_plain(message: object) -> bool:
    """Nearly every one: a role that needs nothing more, and a string."""
    return (
        type(message) is dict
        and type(role := message.get("role")) is str
        and role in _TEXT_ROLES
        and type(message.get("content")) is str
    )


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, Mapping):
        raise _wrong_type(where, "must be an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}")
    if not isinstance(content, str | list) and not (content is None and role == "assistant"):
        raise _invalid(f"{where}.content", "must be a string or a list of parts")
    if role == "tool" and not (isinstance(call := message.get("tool_call_id"), str) and call):
        raise _invalid(f"{where}.tool_call_id", "is required for role 'tool'")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        _check_part(part, f"{where}.content[{index}]")


def _check_part(part: object, where: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise _wrong_type(where, "must be an object with a type")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise PromptError(f"'{where}': this model reads text only.", code="unsupported_content", param=where)


def _check_tools(tools: object) -> None:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise _invalid("tools", f"must be a list of at most {MAX_TOOLS} tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise _wrong_type(where, "must be an object with a type")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _wrong_type(f"{where}.function", "must be an object")
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise _invalid(f"{where}.function.name", "must be 1 to 64 letters, digits, '_' and '-'")
        if (schema := function.get("parameters")) is not None:
            _check_schema(schema, f"{where}.function.parameters")


def _check_schema(schema: object, where: str) -> None:
    if not isinstance(schema, dict):
        raise _invalid_schema(where, "must be an object")
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise _invalid_schema(where, f"is larger than {MAX_SCHEMA_BYTES} bytes")
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                reference = value.get("$ref")
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise _invalid_schema(where, "refers to another document, and none is fetched")
                below += value.values()
            else:
                below += value
        level = [value for value in below if isinstance(value, dict | list)]
        if not level:
            return
    raise _invalid_schema(where, f"is nested deeper than {MAX_SCHEMA_DEPTH}")


def _wrong_type(param: str, what: str) -> PromptError:
    return PromptError(f"'{param}' {what}.", code="invalid_type", param=param)


def _invalid(param: str, what: str) -> PromptError:
    return PromptError(f"'{param}' {what}.", code="invalid_value", param=param)


def _invalid_schema(param: str, what: str) -> PromptError:
    return PromptError(f"'{param}' {what}.", code="invalid_tool_schema", param=param)
