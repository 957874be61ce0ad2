"""Grammars that no client should send: each is told as its fault, soon, and the process lives on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from workers import grammar_check
from workers.api_error import ApiError
from workers.constraint import content_constraint
from workers.grammar_check import check
from workers.tool_choice import call_constraint


def nested(depth: int, key: str) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {key: [schema] if key == "allOf" else {"a": schema} if key == "properties" else schema}
    return schema


def refs(count: int, how: Any) -> Any:
    """Definitions of which each refers to the next."""
    definitions = {f"d{i}": how({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {"type": "string", "pattern": "a"}}}


def patterns(count: int) -> list[Any]:
    return [{"type": "string", "pattern": f"a{i}"} for i in range(count)]


def ask_for(structured_outputs: Any) -> None:
    constraint = content_constraint(None, structured_outputs)
    assert constraint is not None
    check(constraint)


def fault(structured_outputs: Any) -> str:
    """What the client is told. The time is the processor's, and generous; what is not bounded takes minutes."""
    grammar_check._fault.cache_clear()
    begun = time.process_time()
    with pytest.raises(ApiError) as failure:
        ask_for(structured_outputs)
    assert time.process_time() - begun < 3
    assert failure.value.status == 400
    assert failure.value.param == f"structured_outputs.{next(iter(structured_outputs))}"
    assert len(failure.value.message) <= 300
    assert "\n" not in failure.value.message
    return failure.value.message


SCHEMAS: list[tuple[str, Any, str]] = [
    ("unknown type", {"type": "foo"}, "Invalid type: foo"),
    ("type is a number", {"type": 5}, "type must be"),
    ("unknown keyword value", {"type": "object", "properties": [1]}, "properties must be an object"),
    ("refers to itself", {"$ref": "#"}, "nothing obeys it"),
    ("refers in a circle", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "nothing"),
    ("allOf itself", {"type": "object", "allOf": [{"$ref": "#"}]}, "circular references"),
    ("refers nowhere", {"$ref": "#/$defs/a"}, "does not exist"),
    ("refers far away", {"$ref": "https://example.com/schema"}, "example.com"),
    ("bad pattern", {"type": "string", "pattern": "(a"}, "unclosed group"),
    ("look-ahead", {"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ("empty enum", {"enum": []}, "anyOf is empty"),
    ("contradiction", {"type": "string", "minLength": 5, "maxLength": 3}, "minLength (5) is greater than maxLength (3)"),
    ("two types at once", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ("unsupported keyword", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("unsupported format", {"type": "string", "format": "x"}, "Unknown format: x"),
    ("deep", nested(10_000, "items"), "levels deep"),
    ("deep properties", nested(10_000, "properties"), "levels deep"),
    ("deep allOf", nested(10_000, "allOf"), "levels deep"),
    ("huge", {"enum": [f"value {i}" for i in range(10_000)]}, "65536 bytes"),
    ("long chain", refs(1500, lambda ref: ref), "too long a chain"),
    ("many optional properties", {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}, "row has"),
    ("product of choices", {"allOf": [{"anyOf": [{"properties": {f"{k}{i}": {}}} for k in "ab"]} for i in range(20)]}, "too"),
    ("many patterns", {"allOf": patterns(30)}, "8 patterns"),
    ("many patterns by refs", refs(30, lambda ref: ref | {"pattern": "b"}), "8 patterns"),
    ("many patterns by name", {"allOf": [{"$ref": "#x"}], "$defs": {"a": {"$anchor": "x", "allOf": patterns(20)}}}, "8 patt"),
    ("many patterns by escapes", {"allOf": [{"$ref": "#/%24defs/a"}], "$defs": {"a": {"allOf": patterns(30)}}}, "8 patterns"),
    ("many patterns for a property", {"allOf": [{"properties": {"x": part}} for part in patterns(30)]}, "8 patterns"),
    ("multiple of a large prime", {"type": "integer", "multipleOf": 99_991}, "beyond 10000"),
    ("multiple with many digits", {"type": "number", "multipleOf": 9.9991}, "beyond 10000"),
    ("multiple of several", {"allOf": [{"multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}, "several"),
    ("multiple of several by refs", refs(9, lambda ref: ref | {"multipleOf": 97}), "several"),
    ("many patterns for keys", {"patternProperties": {f"^a{i}$": {} for i in range(300)}}, "8 patterns"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schema", "told"), SCHEMAS, ids=[name for name, *_ in SCHEMAS])
def test_a_schema_that_cannot_be_used_is_told_so(name: str, schema: Any, told: str) -> None:
    assert told in fault({"json": schema})


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "additionalProperties": False},
        {"type": "object", "properties": {f"p{i}": {"format": "date"} for i in range(400)}},
        {"allOf": patterns(4)},
        {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "v": {"pattern": "a"}}}}},
        refs(100, lambda ref: {"type": "object", "properties": {"a": ref}}),
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "pattern": ".*a.{200}"},
        {"properties": {f"p{n}": {"type": "number", "multipleOf": n} for n in (9973, 9967, 100_000, 0.001, 0.25)}},
        nested(30, "properties"),
    ],
)  # fmt: skip
def test_a_schema_that_only_looks_dangerous_is_used(schema: Any) -> None:
    begun = time.process_time()

    ask_for({"json": schema})

    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "(a"},
        {"regex": "(?=a)"},
        {"regex": r"[^\s\S]"},
        {"regex": "(" * 2000 + "a" + ")" * 2000},
        {"regex": "a" + "*" * 4000},
        {"regex": "(a{1000}){1000}"},
        {"grammar": "start: a"},
        {"grammar": 'a: "a"'},
        {"grammar": "start: start"},
        {"grammar": 'start: "a" start'},
        {"grammar": "start: " + "(" * 8000 + '"a"' + ")" * 8000},
        {"grammar": "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'},
        {"grammar": "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(20, 28))},
        {"grammar": "\ud800"},
    ],
    ids=lambda outputs: json.dumps(outputs)[:40],
)
def test_text_that_is_no_grammar_is_told_so(outputs: Any) -> None:
    fault(outputs)


def test_schemas_of_all_tools_together_must_fit() -> None:
    tools = [{"function": {"name": f"f{i}", "parameters": {"title": "a" * 30_000}}} for i in range(3)]
    constraints = [call_constraint(tools[:count], "required", True) for count in (2, 3)]

    assert constraints[0] is not None
    check(constraints[0])
    assert constraints[1] is not None
    with pytest.raises(ApiError, match="'tools' takes more than"):
        check(constraints[1])


def test_a_grammar_is_tried_once() -> None:
    grammar_check._fault.cache_clear()

    ask_for({"json_object": True})
    ask_for({"json_object": True})

    assert grammar_check._fault.cache_info()[:2] == (1, 1)
