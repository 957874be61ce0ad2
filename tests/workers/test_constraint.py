"""Grammars of contents: whatever they let a model say obeys what was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.walks import default_walker, tagged_walker
from workers.api_error import ApiError
from workers.constraint import Constraint, content_constraint
from workers.grammar_check import check
from workers.message import Content, MessageParser, Reasoning
from workers.tags import ModelTags

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "<tool_call>", "é"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
        and 1 <= len(value["name"]) <= 5
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value.get("tags", [])) <= 2
        and set(value.get("tags", [])) <= {"a", "<tool_call>", "é"}
    )


def is_list_of_lists(text: str) -> bool:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and all(map(holds, value))

    return holds(json.loads(text))


CHOICES = ["yes", 'no "\\\n', "émoji 😀", "yes, and", "/"]

CASES: dict[str, tuple[Any, Any, Callable[[str], object]]] = {
    "json_object": ({"type": "json_object"}, None, lambda text: isinstance(json.loads(text), dict)),
    "json_schema": ({"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}, None, is_person),
    "json as text": (None, {"json": json.dumps(PERSON), "regex": None}, is_person),
    "recursive": (None, {"json": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}, is_list_of_lists),
    "lenient": (
        {"type": "json_schema", "json_schema": {"strict": False, "schema": {"type": "array", "uniqueItems": True}}},
        None,
        lambda text: isinstance(json.loads(text), list),
    ),
    "regex": (None, {"regex": r"[a-c]{2,4}/[0-9]"}, re.compile(r"[a-c]{2,4}/[0-9]").fullmatch),
    "choice": (None, {"choice": CHOICES}, CHOICES.__contains__),
    "grammar": (None, {"grammar": 'start: "<" (start | "x") ">" // & %json'}, re.compile("<+x>+").fullmatch),
    "any object": (None, {"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
}


def constraint_of(case: str) -> Constraint:
    response_format, structured_outputs, _ = CASES[case]
    constraint = content_constraint(response_format, structured_outputs)
    assert constraint is not None
    check(constraint)
    return constraint


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_grammar_allows_obeys_it(case: str, seed: int) -> None:
    model = tagged_walker()

    text = model.answer(constraint_of(case).grammar(model.tags, "closed"), seed)

    assert CASES[case][2](text), text


@pytest.mark.model
@pytest.mark.parametrize("case", CASES)
def test_the_default_model_obeys_too(case: str) -> None:
    model = default_walker()
    assert model.tags == ModelTags()

    text = model.answer(constraint_of(case).grammar(model.tags, "none"), 1)

    assert CASES[case][2](text), text


@pytest.mark.parametrize("seed", range(8))
def test_behind_thoughts_that_the_prompt_has_opened_the_engine_begins_to_hold_it(seed: int) -> None:
    model = tagged_walker()
    grammar = constraint_of("json_schema").grammar(model.tags, "open")

    text = model.answer(grammar, seed)

    assert grammar.after == model.tokenizer.token_to_id("</think>")
    assert text[:1] == "{" or text[:3] == "\n\n{"
    assert is_person(text)


@pytest.mark.parametrize("thinks", [False, True])
def test_where_the_model_may_think_or_not_the_grammar_allows_both(thinks: bool) -> None:
    model = tagged_walker()
    grammar = constraint_of("json_schema").grammar(model.tags, "none")
    thoughts = model.tokenizer.encode("<think>\nhm {é\n</think>", add_special_tokens=False).ids
    starts = set()

    for seed in range(4):
        text = model.answer(grammar, seed, thoughts if thinks else model.tokenizer.encode("{").ids)
        message = MessageParser(tools=False, reasoning=True, call_id=str)
        pieces = [*message.push(text), *message.finish()]
        starts.add(text[:1])
        assert [piece for piece in pieces if isinstance(piece, Reasoning)] == [Reasoning("hm {é")] * thinks
        assert is_person("".join(piece.text for piece in pieces if isinstance(piece, Content)))

    assert grammar.after is None
    assert starts == ({"<"} if thinks else {"{"})


@pytest.mark.parametrize("value", [None, {"type": "text"}, {"type": "text", "x": 1}])
@pytest.mark.parametrize("outputs", [None, {}, {"regex": None}, {"json_object": False}])
def test_nothing_asked_for_is_no_constraint(value: Any, outputs: Any) -> None:
    assert content_constraint(value, outputs) is None


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "param"),
    [
        ("text", None, "response_format.type"),
        ({}, None, "response_format.type"),
        ({"type": ["text"]}, None, "response_format.type"),
        ({"type": "structural_tag"}, None, "response_format.type"),
        ({"type": "json_schema"}, None, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, None, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, None, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, None, "response_format.json_schema.strict"),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs"),
        (None, [1], "structured_outputs"),
        (None, {"regex": "a", "choice": ["a"]}, "structured_outputs"),
        (None, {"structural_tag": {}}, "structured_outputs"),
        (None, {"json": "{"}, "structured_outputs.json"),
        (None, {"json": "[" * 100_000}, "structured_outputs.json"),
        (None, {"json": 1}, "structured_outputs.json"),
        (None, {"json_object": 1}, "structured_outputs.json_object"),
        (None, {"regex": ""}, "structured_outputs.regex"),
        (None, {"regex": "a" * 5000}, "structured_outputs.regex"),
        (None, {"choice": []}, "structured_outputs.choice"),
        (None, {"choice": ["a", ""]}, "structured_outputs.choice"),
        (None, {"choice": ["a", 1]}, "structured_outputs.choice"),
        (None, {"choice": ["a"] * 2000}, "structured_outputs.choice"),
        (None, {"choice": ["a" * 20_000]}, "structured_outputs.choice"),
        (None, {"grammar": 1}, "structured_outputs.grammar"),
        (None, {"grammar": 'start: "a"' + " " * 20_000}, "structured_outputs.grammar"),
        (None, {"grammar": "start: A\nA: " + " & ".join(["/a/"] * 20)}, "structured_outputs.grammar"),
        (None, {"grammar": "start: a\na: %json {}"}, "structured_outputs.grammar"),
        (None, {"grammar": '%llguidance {"allow_invalid_utf8": true}\nstart: "a"'}, "structured_outputs.grammar"),
        (None, {"grammar": "start: <[5]>"}, "structured_outputs.grammar"),
        (None, {"grammar": "start: @answer"}, "structured_outputs.grammar"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_or_size_are_told_by_name(
    response_format: Any, structured_outputs: Any, param: str
) -> None:
    with pytest.raises(ApiError) as failure:
        content_constraint(response_format, structured_outputs)

    assert (failure.value.status, failure.value.param) == (400, param)
    assert len(failure.value.message) <= 300
