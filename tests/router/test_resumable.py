"""What is made of a template so that its loop can begin in its middle, piece by piece. The whole: test_talks.py."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from jinja2 import nodes

from router.resumable import MARK, make_resumable
from router.sandbox import compile_template, parse_template
from router.settled_loops import end_settled_loops
from router.template_source import template_source
from tests.router.test_talks import RESUMABLE

MESSAGES = [
    {"role": "system", "content": 'say "no\\t"\n'},
    {"role": "user", "content": "é\x01"},
    {"role": "assistant", "content": " b "},
]

SOURCES = [
    *RESUMABLE.values(),
    "{{ 1 - 2 - 3 }} {{ 1 - (2 - 3) }} {{ -(1 + 2) % 4 }} {{ (not a or b) and not (a and b) }} {{ not a == b }}",
    "{{ [1, 'x', none, true][-1] }} {{ (1,)[0] }} {{ 'abcdef'[1:4] }} {{ 'abcdef'[::-1] }} {{ messages[:2] | length }}",
    "{{ 'x' if b else 'y' }}{{ 'x' if a is defined and a is not none }} {{ 1 < 2 <= 2 }} {{ 'a' not in 'b' in 'bc' }}",
    "{{ '\\\\ \\' \" \\n \\u00e9 {{ {% #}' }}\n \n{{- ' a' | trim | upper }} {{ ['a', 'b'] | join(', ') }} {# no #}",
    "{% macro m(x, y='-', z=1) %}{{ x }}{{ y }}{{ z }}{% endmacro %}{{ m('a', z=3) }}{{ m('b', '+') }}",
    "{% for a, b in messages[1].items() if b %}{{ a }}{{ b }}{% else %}none{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% elif loop.last %}{% break %}{% else %}x{% endif %}{% endfor %}",
    "{% set x, y = 1, 2 %}{{ x }}{{ y }}{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}",
    "{{ messages | tojson(indent=2) }}{{ missing | default('d', true) }}",
]


def rendered(source: str) -> str:
    variables: dict[str, Any] = {"messages": MESSAGES, "a": 1, "b": 0, "bos_token": "<s>"}
    return compile_template(source).render(variables)


@pytest.mark.parametrize("source", SOURCES)
def test_source_of_a_tree_means_what_the_tree_was_made_of(source: str) -> None:
    written = template_source(parse_template(source))

    assert rendered(written) == rendered(source)
    assert template_source(parse_template(written)) == written


@pytest.mark.parametrize(
    "source", ["{{ 1 * 2 }}", "{{ 'a' ~ 1 }}", "{{ {'a': 1} }}", "{{ 1.5 }}", "{% include 'x' %}", "{{ f(*x) }}"]
)
def test_what_has_no_source_says_so(source: str) -> None:
    with pytest.raises(ValueError, match="no source"):
        template_source(parse_template(source))


def test_what_is_compared_with_places_counts_as_the_same_when_each_comparison_comes_out_the_same() -> None:
    made = make_resumable(RESUMABLE["last question"])
    assert made is not None

    def key(last: object, iterations: int = 5) -> bytes | None:
        return made.key([True, last], {}, iterations)

    assert key(5) == key(6) == key(99)
    assert len({key(value) for value in (0, 4, 5, -1, None, "5", True, 5.5)}) == 8
    assert key(5, 6) != key(6, 6) == key(7, 6)


def test_other_values_count_as_they_are() -> None:
    made = make_resumable(RESUMABLE["variables"])
    assert made is not None

    keys = [
        made.key([True, tone], {**given, "messages": MESSAGES}, 3)
        for tone in (1, True, "1", None)
        for given in ({}, {"shout": None}, {"shout": 1}, {"shout": True}, {"shout": 1.0})
    ]

    assert len(set(keys)) == 20
    assert made.key([True, object()], {}, 3) is None


@pytest.mark.parametrize("source", [MARK + RESUMABLE["last"], "{{ warmpath_skip }}" + RESUMABLE["last"]])
def test_who_writes_what_is_ours_is_not_resumable(source: str) -> None:
    assert make_resumable(source) is None


FLAGGED = "{% set ns = namespace(on=true, n=0) %}{% for message in messages[::-1] %}"
SETTLED = [
    "{% if ns.on and message.role == 'user' %}{{ loop.index }}{% set ns.on = false %}{% endif %}",
    "{% set index = messages | length - 1 - loop.index0 %}{% if ns.on and index == 1 %}{% set ns.on = false %}{% endif %}",
    "{% if ns.on %}{{ message.role }}{% endif %}{% if ns.on and loop.index0 == 1 %}{% set ns.on = false %}{% endif %}",
]
UNSETTLED = [
    "{% if message.role == 'user' and ns.on %}{% set ns.on = false %}{% endif %}",
    "{% if ns.on or message.role == 'user' %}{% set ns.on = false %}{% endif %}",
    "{% if ns.on %}{% set ns.on = false %}{% else %}{% set ns.on = true %}{% endif %}",
    "{% if ns.on %}{% set ns.on = false %}{% endif %}{{ message.role }}",
    "{% if ns.on %}{% set ns.on = false %}{% endif %}{% set ns.n = 1 %}",
    "{% if ns.on %}{% set ns.on = false %}{% endif %}{% if ns.n == 0 %}{% set ns.on = true %}{% endif %}",
    "{% set x = message.content.nothing.more %}{% if ns.on %}{% set ns.on = false %}{% endif %}",
    "{% set ns = namespace(on=loop.last) %}{% if ns.on %}{{ message.role }}{% endif %}",
]


@pytest.mark.parametrize("body", [*SETTLED, *UNSETTLED])
def test_a_loop_ends_when_nothing_more_can_come_of_it(body: str) -> None:
    source = FLAGGED + body + "{% endfor %}{{ ns.on }}{{ ns.n }}"
    tree = parse_template(source)

    end_settled_loops(tree)

    assert (tree.find(nodes.Break) is not None) == (body in SETTLED)
    if "nothing" in body:
        with pytest.raises(jinja2.UndefinedError):
            rendered(template_source(tree))
    else:
        assert rendered(template_source(tree)) == rendered(source)
