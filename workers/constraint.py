"""What a client wants the content to be a sentence of → a grammar for the engine. Pure; the values are JSON, already decoded.

``response_format`` and ``structured_outputs`` say it, for calls ``tool_choice`` (`workers.tool_choice`). Here types are
checked, and sizes as far as they make a grammar slow to compile; whether it is one, llguidance says (`workers.grammar_check`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from workers.api_error import invalid_value
from workers.json_schema import is_lenient, ready_schema
from workers.protocol import Grammar
from workers.tags import ModelTags, ReasoningState

__all__ = ["Constraint", "content_constraint"]

MAX_REGEX_CHARS: Final = 4096
MAX_GRAMMAR_CHARS: Final = 16_384
MAX_CHOICES: Final = 1024
MAX_CHOICE_CHARS: Final = 16_384
"""Of all choices together."""


@dataclass(frozen=True, slots=True)
class Constraint:
    param: str
    """The field that asks for it."""
    answer: str
    """The grammar in llguidance's form, one JSON object. That of calls leaves open how their tags are written."""
    calls: bool = False

    def grammar(self, tags: ModelTags, state: ReasoningState) -> Grammar:
        """For one model and one prompt.

        Where the prompt has opened the thoughts, the grammar holds behind them. Where the model may think or not, it says so
        itself: there is no token then by which the engine could know.
        """
        answer = self._with_tags(tags)
        reasoning = tags.reasoning
        if reasoning is None or state == "closed":
            return Grammar(_grammars(answer))
        if state == "open":
            return Grammar(_grammars(_lark(f"start: {_GAP} @answer"), answer), after=reasoning.end)
        thoughts = f"thoughts: <[{reasoning.start}]> /(.|\\n)*/ <[{reasoning.end}]> {_GAP}"
        return Grammar(_grammars(_lark(f"start: thoughts? @answer\n{thoughts}"), answer))

    def text_grammar(self) -> str:
        """The same for a model that writes tags as text and does not think."""
        return _grammars(self._with_tags(ModelTags()))

    def _with_tags(self, tags: ModelTags) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.answer)
        if self.calls:
            start, end = (f"<[{id_}]>" for id_ in tags.call) if tags.call else ('"<tool_call>"', '"</tool_call>"')
            answer["lark_grammar"] += f"\ncall_start: {start}\ncall_end: {end}"
        return answer


_GAP: Final = '"\\n\\n"?'
"""Between thoughts and answer, where Qwen3 puts an empty line. It is no part of the content."""


def _grammars(*grammars: dict[str, Any]) -> str:
    """The first one is where a sentence begins; it may refer to the other."""
    *first, answer = grammars
    return json.dumps({"grammars": [*first, answer | {"name": "answer"}]})


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def content_constraint(response_format: Any, structured_outputs: Any) -> Constraint | None:
    """Of at most one of the two fields. Raises `ApiError` 400."""
    by_format = _of_response_format(response_format)
    by_outputs = _of_structured_outputs(structured_outputs)
    if by_format and by_outputs:
        raise invalid_value("Give either 'response_format' or 'structured_outputs'.", "structured_outputs")
    return by_format or by_outputs


def _of_response_format(value: Any) -> Constraint | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return _json({"type": "object"}, "response_format")
        case "json_schema":
            param = "response_format.json_schema"
            wrapper = value.get("json_schema")
            if not isinstance(wrapper, dict):
                raise invalid_value(f"'{param}' must be an object.", param)
            return _json(wrapper.get("schema"), f"{param}.schema", lenient=is_lenient(wrapper, param))
        case _:
            raise invalid_value(
                "'response_format.type' must be 'text', 'json_object' or 'json_schema'.", "response_format.type"
            )


def _of_structured_outputs(value: Any) -> Constraint | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid_value("'structured_outputs' must be an object.", "structured_outputs")
    kinds = {kind: asked for kind, asked in value.items() if asked is not None}
    if not kinds:
        return None
    if len(kinds) > 1 or not kinds.keys() <= _KINDS.keys():
        names = ", ".join(f"'{name}'" for name in _KINDS)
        raise invalid_value(f"'structured_outputs' takes one of {names}.", "structured_outputs")
    (kind, asked), *_ = kinds.items()
    return _KINDS[kind](asked, f"structured_outputs.{kind}")


def _json(value: Any, param: str, *, lenient: bool = False) -> Constraint:
    return Constraint(param, json.dumps({"json_schema": ready_schema(value, param, lenient=lenient)}))


def _json_or_text(value: Any, param: str) -> Constraint:
    """A schema, or its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid_value(f"'{param}' is not valid JSON.", param) from error
    return _json(value, param)


def _json_object(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise invalid_value(f"'{param}' must be a boolean.", param)
    return _json({"type": "object"}, param) if value else None


def _regex(value: Any, param: str) -> Constraint:
    from llguidance import LLMatcher  # not installed where replicas are simulated

    regex = _text(value, param, MAX_REGEX_CHARS)
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return Constraint(param, json.dumps(_lark(grammar["lark_grammar"])))


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise invalid_value(f"'{param}' must be a list of strings, none of them empty.", param)
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_CHOICE_CHARS:
        raise invalid_value(f"'{param}' takes {MAX_CHOICES} choices, {MAX_CHOICE_CHARS} characters in all.", param)
    choices = " | ".join(map(json.dumps, value))
    return Constraint(param, json.dumps(_lark(f"start: CHOICE\nCHOICE: {choices}")))


_LARK_TEXT: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
"""Strings, regular expressions and comments."""

_DIRECTIVES: Final = frozenset({"%ignore", "%import"})
"""The others change how the whole grammar is read, or hold schemas and tables whose cost we would have to bound again."""

_MAX_INTERSECTIONS: Final = 8
"""``&`` in a grammar: the time to compile doubles with each."""


def _lark_grammar(value: Any, param: str) -> Constraint:
    text = _text(value, param, MAX_GRAMMAR_CHARS)
    structure = _LARK_TEXT.sub(" ", text)
    if structure.count("&") > _MAX_INTERSECTIONS:
        raise invalid_value(f"'{param}' takes at most {_MAX_INTERSECTIONS} intersections.", param)
    if not _DIRECTIVES.issuperset(re.findall(r"%\w*", structure)):
        raise invalid_value(f"'{param}' takes no directives but {' and '.join(sorted(_DIRECTIVES))}.", param)
    if "<" in structure or "@" in structure:
        raise invalid_value(f"'{param}' takes no special tokens and no references to other grammars.", param)
    return Constraint(param, json.dumps(_lark(text)))


def _text(value: Any, param: str, max_chars: int) -> str:
    if not isinstance(value, str) or not value:
        raise invalid_value(f"'{param}' must be a string that is not empty.", param)
    if len(value) > max_chars:
        raise invalid_value(f"'{param}' takes at most {max_chars} characters.", param)
    return value


_KINDS: Final[Mapping[str, Callable[[Any, str], Constraint | None]]] = {
    "json": _json_or_text,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark_grammar,
}
