"""What of a request is refused before a template sees it, and what a template then sees."""

from __future__ import annotations

from typing import Any

import pytest

from router.chat import Chat
from router.prompt_errors import PromptError

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("messages", [None, [], "hello", {"role": "user"}, ["hello"], [HELLO]])
def test_messages_are_a_list_of_at_least_one_object(messages: Any) -> None:
    with pytest.raises(PromptError, match="messages"):
        Chat.from_body({"messages": messages})


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("value", ["text", [1], {"a": 1}])
def test_tools_and_documents_are_lists_of_objects(name: str, value: Any) -> None:
    with pytest.raises(PromptError, match=name):
        Chat.from_body({"messages": HELLO, name: value})


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
def test_flags_are_booleans(name: str) -> None:
    with pytest.raises(PromptError, match=name):
        Chat.from_body({"messages": HELLO, name: "yes"})


def test_a_generation_prompt_is_the_default_unless_the_final_message_goes_on() -> None:
    assert Chat.from_body({"messages": HELLO}).add_generation_prompt
    assert Chat.from_body({"messages": HELLO, "add_generation_prompt": None}).add_generation_prompt
    assert not Chat.from_body({"messages": HELLO, "continue_final_message": True}).add_generation_prompt


def test_a_new_message_and_the_same_message_exclude_each_other() -> None:
    with pytest.raises(PromptError, match="exclude"):
        Chat.from_body({"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"])
def test_template_variables_cannot_stand_in_for_fields_of_the_body(name: str) -> None:
    with pytest.raises(PromptError, match=name):
        Chat.from_body({"messages": HELLO, "chat_template_kwargs": {name: "x", "enable_thinking": False}})


def test_template_variables_are_an_object() -> None:
    with pytest.raises(PromptError, match="chat_template_kwargs"):
        Chat.from_body({"messages": HELLO, "chat_template_kwargs": ["enable_thinking"]})


def test_reasoning_effort_reaches_the_template_and_the_explicit_variable_wins() -> None:
    assert Chat.from_body({"messages": HELLO, "reasoning_effort": "low"}).variables == {"reasoning_effort": "low"}
    body = {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert Chat.from_body(body).variables == {"reasoning_effort": "high"}


def test_null_keys_are_left_out_and_the_request_stays_as_it_was() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [], "name": None}

    assert Chat([message]).template_messages() == [{"role": "assistant", "tool_calls": []}]
    assert message["content"] is None


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_of_its_names(name: str) -> None:
    (message,) = Chat([{"role": "assistant", "content": "4", name: "two and two"}]).template_messages()

    assert message["reasoning_content"] == message["thinking"] == "two and two"
