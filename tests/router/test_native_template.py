"""minijinja against jinja2: every construct that is let through, on values of every kind, and what must not be let through."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import native_template, template
from router.chat import Chat
from router.native_template import compile_native
from router.prompt_errors import PromptError
from router.sandbox import compile_template
from router.template import ChatTemplate
from router.trivial import CHAT_TEMPLATE

GOLDEN = Path(__file__).parents[1] / "data" / "chat_golden"
NOW = datetime(2026, 3, 1)  # noqa: DTZ001 - templates print wall clocks

VALUES: dict[str, Any] = {
    "text": " \x1ca b\u2003",
    "empty": "",
    "nothing": None,
    "yes": True,
    "no": False,
    "one": 1,
    "big": 10**30,
    "half": 1.5,
    "list": ["a", 1],
    "none_in": [],
    "dict": {"a": "b", "k": [1.0]},
    "bare": {},
    "tuple": "(1, 'a')",
}
NAMES = [*VALUES, "undefined_name"]
PRINTED = [
    *[
        "{{ X }}",
        "{{ X.a }}",
        "{{ X['a'] }}",
        "{{ X[0] }}",
        "{{ X[-1] }}",
        "{{ X[1:] | tojson }}",
        "{{ X[::-1] | join }}",
    ],
    *[
        "{{ X | trim }}",
        "{{ X | upper }}",
        "{{ X | lower }}",
        "{{ X | join('-') }}",
        "{{ X | first }}",
        "{{ X | last }}",
    ],
    *["{{ X | tojson }}", "{{ X | tojson(indent=2) }}", "{{ X | default('q') }}", "{{ X | default('q', true) }}"],
    *[
        "{{ X.strip() }}",
        "{{ X.strip(' a') }}",
        "{{ X.lstrip('\n') }}",
        "{{ X.rstrip('b ') }}",
        "{{ X.split('a')[-1] }}",
    ],
    *["{{ X.get('a') }}", "{{ X.get('z', 'q') }}", "{% for k, v in X.items() %}[{{ k }}]{% endfor %}"],
    *["{% for x in X %}[{{ x }}]{{ loop.index }}{% else %}-{% endfor %}", "{{ 'y' if X else 'n' }}"],
    *[
        "{{ 'y' if X.startswith('a') else 'n' }}",
        "{{ 'y' if X.endswith('b') else 'n' }}",
        "{{ 'y' if (X | length) > 1 else 'n' }}",
    ],
    *[f"{{{{ 'y' if X is {test} else 'n' }}}}" for test in sorted(native_template._TESTS)],
]
PAIRED = ["==", "!=", "and", "or", "in", "not in", "+", "-", "%"]


def by_jinja(source: str) -> str | None:
    try:
        return compile_template(source).render(VALUES)
    except Exception:  # whatever it refuses
        return None


@pytest.mark.parametrize("only_text", [True, False])
def test_what_is_let_through_means_the_same_on_values_of_every_kind(only_text: bool) -> None:
    different, said = [], 0
    names = [name for name in NAMES if not only_text or isinstance(VALUES.get(name, ""), str)]
    sources = [source.replace("X", name) for source in PRINTED for name in names]
    some = [] if only_text else ["text", "empty", "nothing", "yes", "one", "list", "dict", "undefined_name"]
    for operator, left, right in itertools.product(PAIRED, some, some):
        sources.append(f"{{{{ 'y' if ({left} {operator} {right}) else 'n' }}}}")

    for source in sources:
        native = compile_native(source)
        assert native is not None, source
        text = native.render(VALUES, only_text=only_text)
        expected = by_jinja(source)
        said += text is not None
        answered_alone = expected is None and (" in " in source or ":]" in source or ":-1]" in source)
        if text is not None and text != expected and not answered_alone:
            different.append((source, expected, text))

    assert not different
    assert said > len(sources) // 3


@pytest.mark.parametrize(
    "source",
    [
        *[
            "{{ messages.append(1) }}",
            "{{ messages[0].update(content='x') }}",
            "{% set f = messages.append %}{{ f(1) }}",
        ],
        *[
            "{{ ''.__class__ }}",
            "{{ ''['__class__'] }}",
            "{{ strftime_now.__self__ }}",
            "{{ _private }}",
            "{{ x | attr('y') }}",
        ],
        *[
            "{{ messages['append'](1) }}",
            "{{ messages | map('upper') }}",
            "{{ messages.items }}",
            "{{ tool['format'] }}",
        ],
        *[
            "{{ 'a' * 10 }}",
            "{{ 10 ** 10 }}",
            "{{ 'a' ~ 1 }}",
            "{{ 1.5 }}",
            "{{ 7 / 2 }}",
            "{{ {'a': 1} }}",
            "{{ '%s'.format(1) }}",
        ],
        *["{{ x is sameas y }}", "{{ lipsum() }}", "{{ raise_exception(*x) }}", "{{ x.split() }}", "{{ x.upper() }}"],
        *[
            "{% generation %}a{% endgeneration %}",
            "{% set loop = 1 %}",
            "{% macro range() %}{% endmacro %}{{ cycler() }}",
        ],
        *[
            "{% include 'x' %}",
            "{% set x %}a{% endset %}",
            "{% filter upper %}a{% endfilter %}",
            "{% import 'x' as y %}",
        ],
    ],
)
def test_what_could_mean_something_else_is_left_to_jinja2(source: str) -> None:
    try:
        compile_template(source)
    except Exception:  # not even a template
        return

    assert compile_native(source) is None


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_template, "FUEL", 200_000)
    of = ChatTemplate({"default": "{% if messages[0].content == 'loop' %}" + source + "{% endif %}"}, {})
    assert of.is_native

    with pytest.raises(PromptError, match="does not come to an end"):
        of.render(Chat([{"role": "user", "content": "loop"}]), NOW)


@pytest.mark.parametrize(
    "source", ["{% for i in range(10000000000) %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_ranges_and_recursion_are_bounded(source: str) -> None:
    native = compile_native(source)

    assert native is not None
    assert native.render({}, only_text=True) is None


def test_a_value_is_not_changed_by_assigning_to_it() -> None:
    message = {"role": "user", "content": "x"}
    native = compile_native("{% set message.content = 'y' %}")

    assert native is None or native.render({"message": message}, only_text=True) is None
    assert message == {"role": "user", "content": "x"}


def test_half_a_surrogate_pair_is_for_jinja2_to_render() -> None:
    native = compile_native("{{ messages[0].content }}")

    assert native is not None
    assert native.render({"messages": [{"content": "\ud800"}]}, only_text=True) is None


def golden_template(model: str) -> str:
    return str(json.loads((GOLDEN / f"{model}.json").read_text())["chat_template"])


SOURCES = {"qwen3": golden_template("qwen3"), "smollm2": golden_template("smollm2"), "trivial": CHAT_TEMPLATE}


@cache
def both(name: str) -> tuple[ChatTemplate, ChatTemplate]:
    return ChatTemplate({"default": SOURCES[name]}, {}), ChatTemplate({"default": SOURCES[name]}, {}, native=False)


def rendered(of: ChatTemplate, chat: Chat) -> str:
    try:
        return of.render(chat, NOW)
    except PromptError as error:
        return f"refused: {error}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.text(max_size=6) | st.sampled_from(
    ["<think>a</think>\n\nb", "<tool_response>x</tool_response>", "\x1c a \n", "\ufffd"]
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXTS, "arguments": JSON})}), max_size=2
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS | TEXTS | JSON},
        optional={"tool_calls": CALLS, "reasoning_content": TEXTS, "name": JSON},
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=80)
@given(
    messages=MESSAGES,
    tools=st.none() | st.lists(st.dictionaries(TEXTS, JSON, max_size=2), max_size=2),
    flags=st.booleans(),
)
def test_real_templates_render_any_chat_alike_refusals_included(
    name: str, messages: Any, tools: Any, flags: bool
) -> None:
    native, plain = both(name)
    chat = Chat(
        messages, tools=tools, add_generation_prompt=flags, variables={"enable_thinking": False} if flags else {}
    )

    assert native.is_native
    assert not plain.is_native
    assert rendered(native, chat) == rendered(plain, chat)


def test_one_difference_in_the_rehearsal_leaves_a_template_to_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def render(self, variables: object, *, only_text: bool) -> str:
            return "something else"

    monkeypatch.setattr(template, "compile_native", lambda source: Wrong())
    of = ChatTemplate({"default": SOURCES["smollm2"]}, {})

    assert not of.is_native
    assert of.render(Chat([{"role": "user", "content": "x"}]), NOW) != "something else"


def test_without_minijinja_all_is_left_to_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_template, "_INSTALLED", False)

    assert not ChatTemplate({"default": SOURCES["smollm2"]}, {}).is_native
