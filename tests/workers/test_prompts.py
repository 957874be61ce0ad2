import json
from collections.abc import Callable
from typing import Any

import pytest

from workers.api_error import ApiError
from workers.prompts import chat_fields, completion_prompts, parse_detokenize, parse_tokenize

HELLO = [{"role": "user", "content": "hello"}]


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def refusal(body: bytes, parse: Callable[[bytes], object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    return caught.value


def test_chat_fields_are_the_whole_body() -> None:
    body = chat_body(tools=[{"type": "function", "function": {"name": "get_weather"}}], chat_template_kwargs={"a": 1})

    assert chat_fields(body) == json.loads(body)


@pytest.mark.parametrize("text", [b"\xff", b"\\ud800", b"\\x"])
def test_text_that_is_no_unicode_is_refused(text: bytes) -> None:
    assert refusal(b'{"messages":[{"role":"user","content":"%b"}]}' % text, chat_fields).code == "invalid_json"


def test_every_shape_of_content_is_taken() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "assistant"},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]

    assert chat_fields(json.dumps({"messages": messages}).encode())["messages"] == messages


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([3], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
            "messages[0].content[0]",
        ),
        (HELLO * 2049, "messages"),
    ],
)
def test_a_malformed_message_is_refused_by_place(messages: Any, param: str) -> None:
    error = refusal(json.dumps({"messages": messages}).encode(), chat_fields)

    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "tool",
    [
        3,
        {},
        {"type": "function"},
        {"type": "function", "function": {"name": "has space"}},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": "newline\n"}},
    ],
)
def test_a_malformed_tool_is_refused(tool: Any) -> None:
    assert refusal(chat_body(tools=[tool]), chat_fields).status == 400


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([0], [[0]]),
    ],
)
def test_a_prompt_comes_in_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion_prompts(json.dumps(prompt).encode()) == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        ["a", [1]],
        [1, "a"],
        [[1], 2],
        [-1],
        [1.0],
        [True],
        [2**32],
        {"a": 1},
        3,
        [None],
        ["a"] * 129,
    ],
)
def test_a_malformed_prompt_is_refused(prompt: Any) -> None:
    error = refusal(json.dumps(prompt).encode(), completion_prompts)

    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith("prompt")


def test_tokenize_takes_a_text_or_a_chat_but_not_both() -> None:
    assert parse_tokenize(b'{"prompt":""}').prompt == ""
    assert parse_tokenize(chat_body()).prompt is None
    for body in (b"{}", chat_body(prompt="x")):
        assert refusal(body, parse_tokenize).status == 400


def test_detokenize_takes_ids() -> None:
    assert parse_detokenize(b'{"tokens":[1,2]}').tokens == [1, 2]
    for body in (b"{}", b'{"tokens":[-1]}', b'{"tokens":["a"]}'):
        assert refusal(body, parse_detokenize).status == 400
