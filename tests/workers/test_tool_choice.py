"""Forced calls: whatever the grammar lets a model say, the message parser takes for calls that obey the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.workers.walks import default_walker, tagged_walker
from workers.api_error import ApiError
from workers.constraint import Constraint
from workers.grammar_check import check
from workers.message import CallArguments, CallStart, MessageParser, Reasoning
from workers.tool_choice import call_constraint

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "</tool_call>"]}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop-it"}},
    {"type": "function", "function": {"name": "no_parameters", "parameters": None, "strict": None}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def constraint_of(tool_choice: Any, parallel: bool = True) -> Constraint:
    constraint = call_constraint(TOOLS, tool_choice, parallel)
    assert constraint is not None
    check(constraint)
    return constraint


def calls_in(text: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments; there must be nothing else in the text but thoughts."""
    message = MessageParser(tools=True, call_id=str, **options)
    names: list[str] = []
    arguments: list[str] = []
    for piece in [*message.push(text), *message.finish()]:
        match piece:
            case CallStart(_, _, name):
                names.append(name)
                arguments.append("")
            case CallArguments(index, more):
                arguments[index] += more
            case _:
                assert isinstance(piece, Reasoning), text
    return list(zip(names, map(json.loads, arguments), strict=True))


def obeys(name: str, arguments: dict[str, Any]) -> bool:
    if name != "get_weather":
        return name in ("stop-it", "no_parameters")
    days = arguments.get("days", 0)
    return arguments.keys() <= {"city", "days"} and arguments["city"] in ("Oslo", "</tool_call>") and type(days) is int


@pytest.mark.parametrize("seed", range(8))
def test_required_gives_calls_and_nothing_but_calls(seed: int) -> None:
    model = tagged_walker()
    grammar = constraint_of("required").grammar(model.tags, "closed")

    text = model.answer(grammar, seed)
    calls = calls_in(text)

    assert calls
    assert all(obeys(*call) for call in calls), text
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    assert model.tags.call is not None
    assert ids[0] == model.tags.call[0]


def test_there_may_be_several_calls_unless_the_client_wants_one() -> None:
    model = tagged_walker()

    def numbers(tool_choice: Any, parallel: bool) -> set[int]:
        grammar = constraint_of(tool_choice, parallel).grammar(model.tags, "closed")
        return {len(calls_in(model.answer(grammar, seed))) for seed in range(12)}

    assert max(numbers("required", True)) > 1
    assert numbers("required", False) == {1}
    assert numbers(NAMED, True) == {1}


@pytest.mark.parametrize("seed", range(4))
def test_a_named_function_is_the_one_that_is_called(seed: int) -> None:
    model = tagged_walker()

    ((name, arguments),) = calls_in(model.answer(constraint_of(NAMED).grammar(model.tags, "closed"), seed))

    assert name == "get_weather"
    assert obeys(name, arguments)


@pytest.mark.parametrize("state", ["none", "open"])
@pytest.mark.parametrize("seed", range(4))
def test_calls_come_behind_thoughts(state: Any, seed: int) -> None:
    model = tagged_walker()
    grammar = constraint_of("required").grammar(model.tags, state)
    thoughts = "<think>hm <tool_call></think>" if state == "none" else ""
    start = [] if state == "open" else model.tokenizer.encode("<think>a b</think>", add_special_tokens=False).ids

    text = model.answer(grammar, seed, start)

    assert thoughts == "" or text.startswith("<think>")
    assert all(obeys(*call) for call in calls_in(text.lstrip("\n"), reasoning=True))


@pytest.mark.model
@pytest.mark.parametrize("seed", range(3))
def test_a_model_whose_tokenizer_has_no_tags_writes_them_as_text(seed: int) -> None:
    model = default_walker()
    assert model.tags.call is None

    calls = calls_in(model.answer(constraint_of("required").grammar(model.tags, "none"), seed))

    assert calls
    assert all(obeys(*call) for call in calls)


@pytest.mark.parametrize("tool_choice", [None, "none", "auto"])
def test_a_choice_that_leaves_it_to_the_model_is_no_constraint(tool_choice: Any) -> None:
    assert call_constraint(TOOLS, tool_choice, True) is None


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


@pytest.mark.parametrize(
    ("tools", "tool_choice", "param"),
    [
        (None, "required", "tools"),
        ([], "required", "tools"),
        (["f"], "required", "tools[0].function.name"),
        ([{"function": {}}], "required", "tools[0].function.name"),
        ([tool(name='a"')], "required", "tools[0].function.name"),
        ([tool(), tool()], "required", "tools[1].function.name"),
        ([tool(parameters=[])], "required", "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "required", "tools[0].function.parameters"),
        ([tool(parameters={"enum": ["a" * 70_000]})], "required", "tools[0].function.parameters"),
        ([tool(strict="yes")], "required", "tools[0].function.strict"),
        (TOOLS, "any", "tool_choice"),
        (TOOLS, 1, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "allowed_tools", "function": {"name": "stop-it"}}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "stop_it"}}, "tool_choice.function.name"),
    ],
)
def test_what_is_wrong_with_tools_and_choice_is_told_by_name(tools: Any, tool_choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as failure:
        call_constraint(tools, tool_choice, True)

    assert (failure.value.status, failure.value.param) == (400, param)


def test_a_schema_that_cannot_be_had_is_an_error_unless_the_tool_is_not_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    exact = call_constraint([tool(parameters=schema)], "required", True)
    lenient = call_constraint([tool(parameters=schema, strict=False)], "required", True)
    assert exact is not None
    assert lenient is not None

    with pytest.raises(ApiError, match=r"Unimplemented keys: \[.?.not.?.\]"):
        check(exact)
    check(lenient)
