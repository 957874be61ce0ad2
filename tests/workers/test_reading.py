import json
from typing import Any

import pytest

from workers.api_error import ApiError
from workers.message import CallStart, Content, Reasoning
from workers.openai import GenerationRequest, parse_chat
from workers.reading import asks_for_constraint, constraint_of, parser_of
from workers.tags import ReasoningState

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def request(**fields: Any) -> GenerationRequest:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def test_without_tools_and_thoughts_there_is_nothing_to_look_for() -> None:
    assert parser_of(request(), None, index=0, response_id="r") is None
    assert parser_of(request(), "closed", index=0, response_id="r") is None
    assert parser_of(request(tools=[TOOL], tool_choice="none"), None, index=0, response_id="r") is None


@pytest.mark.parametrize(
    ("state", "text"), [("none", "<think>\nhm\n</think>\n\nyes"), ("open", "hm\n</think>\n\nyes"), ("none", "yes")]
)
def test_thoughts_are_looked_for_where_the_prompt_allows_them(state: ReasoningState, text: str) -> None:
    parser = parser_of(request(), state, index=0, response_id="r")

    assert parser is not None
    pieces = [*parser.push(text), *parser.finish()]
    assert pieces == ([Reasoning("hm")] if "hm" in text else []) + [Content("yes")]


def test_ids_of_calls_follow_from_the_answers_id_and_are_no_two_the_same() -> None:
    def ids(response_id: str, index: int) -> list[str]:
        parser = parser_of(request(tools=[TOOL]), None, index=index, response_id=response_id)
        assert parser is not None
        return [piece.id for piece in parser.push(CALL + "\n" + CALL) if isinstance(piece, CallStart)]

    assert ids("r", 0) == ids("r", 0)
    assert len({*ids("r", 0), *ids("r", 1), *ids("s", 0)}) == 6


@pytest.mark.parametrize(
    ("fields", "asks"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"structured_outputs": {}}, False),
        ({"tools": [TOOL]}, False),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"regex": "a+"}}, True),
    ],
)
def test_what_the_answer_must_be_is_a_grammar(fields: dict[str, Any], asks: bool) -> None:
    assert asks_for_constraint(request(**fields)) == asks
    assert (constraint_of(request(**fields)) is not None) == asks


def test_an_answer_cannot_be_two_things() -> None:
    both = request(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})

    with pytest.raises(ApiError) as caught:
        constraint_of(both)

    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_a_function_that_is_named_is_the_only_one() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("call_this", "not_that")]
    named = request(tools=tools, tool_choice={"type": "function", "function": {"name": "call_this"}})

    constraint = constraint_of(named)

    assert constraint is not None
    assert "call_this" in constraint.text_grammar()
    assert "not_that" not in constraint.text_grammar()
