"""jinja2 as chat templates expect it: the environment of Hugging Face transformers, in our words.

Blocks are trimmed, loops can be left, and templates can call `tojson`, `raise_exception`, `namespace`, `dict` and, given per
rendering, `strftime_now`.

A template comes with a model, which means from a file or from a replica: it is foreign code. It runs in jinja2's immutable
sandbox. That keeps it from reaching out and from changing the request; it does not bound its time or memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, Never

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["compile_template", "parse_template", "template_literals", "tojson"]


def compile_template(source: str) -> jinja2.Template:
    """Milliseconds to tens of them, so once per model. What jinja2 or Python's compiler raises passes through."""
    return _ENVIRONMENT.from_string(source)


def parse_template(source: str) -> nodes.Template:
    """The source as a syntax tree. What jinja2 raises passes through."""
    return _ENVIRONMENT.parse(source)


def template_literals(source: str) -> Iterator[str]:
    """Every text that stands in a template as it is, or is quoted there."""
    tree = parse_template(source)
    yield from (node.data for node in tree.find_all(nodes.TemplateData))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training. Here it is a scope and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - how jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """jinja2's `namespace` without names that could stand in for Python's own attributes of the object."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace has no attribute {name!r}")


class _DictMaker:
    """`dict` for templates: makes new ones, and lends no method by which to change those of the request."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, leaves HTML characters alone: prompts are no web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=_raise_exception, namespace=_PlainNamespace, dict=_DictMaker())
    return environment


_ENVIRONMENT: Final = _environment()
