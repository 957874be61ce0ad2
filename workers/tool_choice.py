"""Tools that a model must use: ``tools`` and a ``tool_choice`` that forces a call → a grammar of calls. Pure.

A forced call has the same form as one that the model makes of its own accord, so there is one parser (`workers.message`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from workers.api_error import invalid_value
from workers.constraint import Constraint
from workers.json_schema import is_lenient, ready_schema

__all__ = ["call_constraint"]

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def call_constraint(tools: Any, tool_choice: Any, parallel: bool) -> Constraint | None:
    """One call of a named function, or at least one of any; without `parallel` exactly one. Raises `ApiError` 400.

    None when the choice forces nothing.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    functions = _functions(tools)
    if isinstance(tool_choice, dict):
        name = _named(tool_choice)
        if name not in functions:
            raise invalid_value("'tool_choice.function.name' is no tool of this request.", "tool_choice.function.name")
        functions, parallel = {name: functions[name]}, False
    elif tool_choice != "required":
        raise invalid_value("'tool_choice' must be 'none', 'auto', 'required' or name a function.", "tool_choice")
    return Constraint("tools", json.dumps({"lark_grammar": _grammar_of_calls(functions, parallel)}), calls=True)


def _grammar_of_calls(functions: Mapping[str, dict[str, Any]], parallel: bool) -> str:
    """Rules from ``start`` on; those for the tags are not among them."""
    more = r' ("\n" call)*' if parallel else ""
    any_function = " | ".join(f"f{index}" for index in range(len(functions)))
    rules = [f"start: call{more}", rf'call: call_start "\n" ({any_function}) "\n" call_end']
    for index, (name, schema) in enumerate(functions.items()):
        head = f'{{"name": {json.dumps(name)}, "arguments": '
        rules += [f'f{index}: {json.dumps(head)} a{index} "}}"', f"a{index}: %json {json.dumps(schema)}"]
    return "\n".join(rules)


def _named(tool_choice: Mapping[str, Any]) -> str:
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool_choice.get("type") != "function" or not isinstance(name, str):
        raise invalid_value('\'tool_choice\' must be {"type": "function", "function": {"name": …}}.', "tool_choice")
    return name


def _functions(tools: Any) -> dict[str, dict[str, Any]]:
    """Name → schema of the arguments."""
    if not isinstance(tools, list) or not tools:
        raise invalid_value("'tool_choice' forces a call, so 'tools' must not be empty.", "tools")
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function"
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid_value(f"'{param}.name' must be 1 to 64 letters, digits, '_' and '-'.", f"{param}.name")
        if name in functions:
            raise invalid_value(f"'{param}.name' is taken by another tool.", f"{param}.name")
        functions[name] = _arguments_schema(function, param)
    return functions


def _arguments_schema(function: Mapping[str, Any], param: str) -> dict[str, Any]:
    schema = {} if function.get("parameters") is None else function["parameters"]
    lenient = is_lenient(function, param)
    param = f"{param}.parameters"
    if isinstance(schema, dict) and schema.get("type", "object") != "object":
        raise invalid_value(f"'{param}' must describe an object.", param)
    return ready_schema(schema, param, lenient=lenient) | {"type": "object"}
