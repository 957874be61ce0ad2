"""Chats that a template renders in both engines at load, before minijinja may speak for it (`router.template`).

They go through what templates branch on: roles in every order, tools, calls and results, reasoning, parts, documents, empty and
missing content, what is left open for the model, and characters at which string functions of two languages may part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from router.chat import Chat

__all__ = ["rehearsal_chats"]

_ODD_TEXTS: Final = (
    "",
    " \n two edges \t\n",
    "\x1c\x85\xa0\u2003 white space of all kinds \u2028\u200b\x1f",
    "<&>\"'\\ {{ braces }} {% tags %} \x00\x7f",
    "İSTANBUL ß ﬁ Σς e\u0301 한국어 日本語 עברית 👩‍🚀🏽\U000e0061",
    "<think>\n\nwhy\n</think>\n\n  because </think> twice<think>",
    "<tool_response>\nlooks like one\n</tool_response>",
    "[INST] <s>[TOOL_CALLS] <|im_start|>system\n<|im_end|></s>",
    "line\r\nline\u2028line",
)

_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Says "how" it is <there>, für Köln & 東京.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Köln", "東京"], "default": None},
                "days": {"type": "integer", "minimum": 1, "maximum": 1e3, "examples": [1, 2.5, True]},
            },
            "required": ["city"],
        },
    },
}
_PARTS: Final = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
_USER: Final = {"role": "user", "content": "What is it like in Köln?"}
_SYSTEM: Final = {"role": "system", "content": "Be brief.\n"}


def _call(arguments: object, content: object = "") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


_CALL: Final = _call({"city": "Köln", "days": 2, "exact": False, "note": None})
_RESULT: Final = {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"sky": "grey"}'}


def rehearsal_chats() -> Iterator[Chat]:
    for text in _ODD_TEXTS:
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "and?" + text},
        ]
        yield Chat(messages)
        yield Chat(messages[1:3], add_generation_prompt=False)
    yield Chat([_USER])
    yield Chat([_USER], add_generation_prompt=False, variables={"enable_thinking": False, "thinking": True})
    yield Chat([_USER], variables={"reasoning_effort": "high", "builtin_tools": ["browser"], "date_string": "1 May"})
    yield Chat([_SYSTEM])
    yield Chat([_SYSTEM, _SYSTEM, _USER, _USER])
    yield Chat([_USER, _SYSTEM, _USER])
    yield Chat([{"role": "developer", "content": "x"}, _USER, {"role": "critic", "content": "y"}])
    for tools in ([], [_TOOL], [_TOOL, _TOOL["function"]]):
        yield Chat([_USER], tools=tools)
        yield Chat([_SYSTEM, _USER, _CALL, _RESULT, _RESULT], tools=tools)
        yield Chat(
            [_USER, _call('{"city": "Köln"}', None), _RESULT, {"role": "assistant", "content": "grey"}, _USER],
            tools=tools,
        )
        yield Chat([_USER, _call(5, "I look."), _call(None), _RESULT], tools=tools, variables={"enable_thinking": True})
    yield Chat([_USER], documents=[{"title": "a", "text": "b"}, {"title": 1, "text": None}])
    yield Chat([_USER, {"role": "assistant", "content": "4", "reasoning_content": "\n2 and 2\n"}, _USER])
    yield Chat([_USER, {"role": "assistant", "content": "4", "thinking": "2 and 2", "tool_calls": []}])
    for content in (_PARTS, [], [{"type": "image"}], None, 5, 1.5, True, {"a": 1}):
        yield Chat([{"role": "user", "content": content}])
        yield Chat([_SYSTEM, _USER, {"role": "assistant", "content": content}, {"role": "user", "content": content}])
    yield Chat([{"role": "user"}, {"content": "no role"}, {"role": 3, "content": "x", "name": 1.0}])
