"""Places and bounds; what the worker says of the same bodies is in tests/workers/test_prompts.py."""

from __future__ import annotations

from typing import Any

import pytest

from router.chat_rules import check_chat
from router.prompt_errors import PromptError

HELLO = {"role": "user", "content": "hello"}


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [HELLO] * 2048},
        {"messages": [{"role": "assistant"}, {"role": "tool", "content": "1", "tool_call_id": "c"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
        {"tools": [tool(**nested_schema(15))] * 128},
        {"tools": [tool(**{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})]},
        {"tools": [tool()], "messages": [HELLO]},
        {"tools": None},
    ],
)
def test_what_a_template_may_see(fields: dict[str, Any]) -> None:
    check_chat({"messages": [HELLO], **fields})


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": None}, "invalid_type", "messages"),
        ({"messages": [HELLO] * 2049}, "invalid_value", "messages"),
        ({"messages": [HELLO, {"role": ["user"], "content": "x"}]}, "invalid_value", "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "unsupported_content",
            "messages[0].content[0]",
        ),
        ({"tools": [tool()] * 129}, "invalid_value", "tools"),
        ({"tools": [tool(**nested_schema(16))]}, "invalid_tool_schema", "tools[0].function.parameters"),
        ({"tools": [tool(enum=["x" * 70_000])]}, "invalid_tool_schema", "tools[0].function.parameters"),
        (
            {"tools": [tool(properties={"a": {"$ref": "http://169.254.169.254/"}})]},
            "invalid_tool_schema",
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "invalid_tool_schema",
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_it_may_not_see_is_refused_by_place(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(PromptError) as caught:
        check_chat({"messages": [HELLO], **fields})

    assert (caught.value.code, caught.value.param) == (code, param)
