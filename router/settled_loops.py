"""Loops that end as soon as nothing more can come of them.

Qwen3's template looks for the last question from the end of the talk, and when it has found it, it walks through all other
messages and asks each time whether it still looks. Where a loop does nothing but behind such a question, and the answer is no,
then nothing will ever make it yes again: the loop may as well end.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

__all__ = ["end_settled_loops"]


def end_settled_loops(tree: nodes.Template) -> None:
    """Change the tree so that such loops end, and mean the same."""
    for loop in tree.find_all(nodes.For):
        flag = _flag(loop)
        if flag is not None:
            loop.body.insert(0, nodes.If(nodes.Not(flag), [nodes.Break()], [], []))


def _flag(loop: nodes.For) -> nodes.Getattr | None:
    """The attribute of a namespace without which no iteration does anything; None if there is no such."""
    if loop.else_ or loop.test is not None or loop.recursive:
        return None
    flags = []
    for statement in loop.body:
        match statement:
            case nodes.Assign(target=nodes.Name()) if all(map(_cannot_fail, _walk(statement.node))):
                continue  # it is forgotten with the iteration
            case nodes.If(elif_=[], else_=[]) if (flag := _first_condition(statement.test)) is not None:
                flags.append(flag)
            case _:
                return None
    set_here = {name.name for name in loop.find_all(nodes.Name) if name.ctx == "store"}
    if not flags or any(flag != flags[0] for flag in flags) or set_here & {name.name for name in _names(flags[0])}:
        return None
    return flags[0]


def _first_condition(test: nodes.Node) -> nodes.Getattr | None:
    """What must be true of a namespace before anything else of a condition is looked at."""
    while isinstance(test, nodes.And):
        test = test.left
    match test:
        case nodes.Getattr(node=nodes.Name()):
            return test
    return None


def _cannot_fail(node: nodes.Node) -> bool:
    """Sums of places and lengths."""
    match node:
        case nodes.Add() | nodes.Sub() | nodes.Name(name="loop" | "messages"):
            return True
        case nodes.Const(value=value):
            return type(value) is int
        case nodes.Getattr(node=nodes.Name(name="loop")):
            return node.attr in ("index", "index0")
        case nodes.Filter(name="length", node=nodes.Name(name="messages")):
            return not node.args
    return False


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    return node.find_all(nodes.Name)
