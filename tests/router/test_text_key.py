"""The text that a prompt is known by where its tokens are unknown."""

from __future__ import annotations

from typing import Any

import pytest

from router.text_key import canonical_text

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "once"}, b"once"),
        ({"prompt": [1, 2]}, b"[1,2]"),
        ({"prompt": None}, b"null"),
        ({}, b"null"),
        ({"input": "once", "instructions": "be brief"}, b"be brief\x1eonce"),
        ({"input": [1, 2]}, b"[1,2]"),
        ({"input": ["one", "two"]}, b"one\x1etwo\x1e"),
        ({"messages": []}, b""),
        ({"messages": [{"role": "user", "content": "hé"}]}, "user\x1fhé\x1e".encode()),
        (
            {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
            b'[{"function":{"name":"f"},"type":"function"}]\x1euser\x1fhi\x1e',
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}
                ]
            },
            b"user\x1fab\x1e",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "x", "b": 1, "a": 2}]}]},
            b'user\x1f{"a":2,"b":1,"type":"x"}\x1e',
        ),
        ({"messages": [{"role": "user", "content": 3}, 4, None]}, b"user\x1f3\x1e4\x1enull\x1e"),
    ],
)
def test_what_is_in_it(body: dict[str, Any], text: bytes) -> None:
    assert canonical_text(body) == text


def test_a_longer_talk_starts_with_the_shorter_one() -> None:
    asked = {"role": "user", "content": "hi"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    told = {"role": "tool", "content": "4"}

    turns = [canonical_text({"messages": [asked, called, told][:count]}) for count in (1, 2, 3)]

    assert turns[1].startswith(turns[0])
    assert turns[2].startswith(turns[1])
    assert b'\x1f[{"function"' in turns[1]
