"""A template's syntax tree → source that means the same, in jinja2 and in minijinja.

For templates that we change (`router.resumable`). Every expression stands in parentheses and every text in a literal, so that
neither white space nor precedence is left to say anything. Knows only the nodes of `router.native_template`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from jinja2 import nodes

__all__ = ["expression_source", "template_source"]

_COMPARISONS: Final = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


def template_source(tree: nodes.Template) -> str:
    """Raises `ValueError` for a node that it does not know."""
    return _statements(tree.body)


def _statements(body: Iterable[nodes.Node]) -> str:
    return "".join(map(_statement, body))


def _statement(node: nodes.Node) -> str:
    match node:
        case nodes.Output():
            return "".join(f"{{{{ {expression_source(each)} }}}}" for each in node.nodes)
        case nodes.Assign():
            return f"{{% set {_target(node.target)} = {expression_source(node.node)} %}}"
        case nodes.If():
            clauses = [f"{{% if {expression_source(node.test)} %}}{_statements(node.body)}"]
            clauses += [f"{{% elif {expression_source(each.test)} %}}{_statements(each.body)}" for each in node.elif_]
            if node.else_:
                clauses.append(f"{{% else %}}{_statements(node.else_)}")
            return "".join(clauses) + "{% endif %}"
        case nodes.For(recursive=False):
            test = f" if {expression_source(node.test)}" if node.test is not None else ""
            otherwise = f"{{% else %}}{_statements(node.else_)}" if node.else_ else ""
            head = f"{{% for {_target(node.target)} in {expression_source(node.iter)}{test} %}}"
            return f"{head}{_statements(node.body)}{otherwise}{{% endfor %}}"
        case nodes.Macro():
            first_default = len(node.args) - len(node.defaults)
            names = [name.name for name in node.args]
            arguments = [
                *names[:first_default],
                *(
                    f"{name}={expression_source(default)}"
                    for name, default in zip(names[first_default:], node.defaults, strict=True)
                ),
            ]
            return f"{{% macro {node.name}({', '.join(arguments)}) %}}{_statements(node.body)}{{% endmacro %}}"
        case nodes.Break():
            return "{% break %}"
        case nodes.Continue():
            return "{% continue %}"
    raise ValueError(f"no source for {type(node).__name__}")


def _target(node: nodes.Node) -> str:
    match node:
        case nodes.Tuple():
            return ", ".join(map(_target, node.items))
        case nodes.Name():
            return node.name
        case nodes.NSRef():
            return f"{node.name}.{node.attr}"
    raise ValueError(f"no source for {type(node).__name__} as a target")


def expression_source(node: nodes.Node) -> str:
    """Raises `ValueError` for a node that it does not know."""
    of = expression_source
    match node:
        case nodes.TemplateData(data=value) | nodes.Const(value=value):
            return _literal(value)
        case nodes.Name(name=name):
            return name
        case nodes.List(items=items):
            return f"[{', '.join(map(of, items))}]"
        case nodes.Tuple(items=items):
            return f"({', '.join(map(of, items))}{',' if len(items) == 1 else ''})"
        case nodes.Getattr():
            return f"{of(node.node)}.{node.attr}"
        case nodes.Getitem(arg=nodes.Slice() as cut):
            return f"{of(node.node)}[{_bound(cut.start)}:{_bound(cut.stop)}:{_bound(cut.step)}]"
        case nodes.Getitem():
            return f"{of(node.node)}[{of(node.arg)}]"
        case nodes.Call(dyn_args=None, dyn_kwargs=None):
            return f"{of(node.node)}({_arguments(node)})"
        case nodes.Filter(dyn_args=None, dyn_kwargs=None) if node.node is not None:
            given = f"({_arguments(node)})" if node.args or node.kwargs else ""
            return f"({of(node.node)} | {node.name}{given})"
        case nodes.Test(args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
            return f"({of(node.node)} is {node.name})"
    return _operation(node)


def _operation(node: nodes.Node) -> str:
    of = expression_source
    match node:
        case nodes.CondExpr():
            otherwise = f" else {of(node.expr2)}" if node.expr2 is not None else ""
            return f"({of(node.expr1)} if {of(node.test)}{otherwise})"
        case nodes.Compare():
            return f"({of(node.expr)}{''.join(f' {_COMPARISONS[each.op]} {of(each.expr)}' for each in node.ops)})"
        case nodes.And() | nodes.Or() | nodes.Add() | nodes.Sub() | nodes.Mod():
            return f"({of(node.left)} {_operator(node)} {of(node.right)})"
        case nodes.Not():
            return f"(not {of(node.node)})"
        case nodes.Neg():
            return f"(-{of(node.node)})"
    raise ValueError(f"no source for {type(node).__name__}")


def _literal(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case int():
            return str(value)
    raise ValueError(f"no source for a {type(value).__name__}")


def _bound(node: nodes.Node | None) -> str:
    return "" if node is None else expression_source(node)


def _arguments(node: nodes.Call | nodes.Filter) -> str:
    named = [f"{each.key}={expression_source(each.value)}" for each in node.kwargs]
    return ", ".join([*map(expression_source, node.args), *named])


def _operator(node: nodes.BinExpr) -> str:
    return {nodes.And: "and", nodes.Or: "or", nodes.Add: "+", nodes.Sub: "-", nodes.Mod: "%"}[type(node)]
