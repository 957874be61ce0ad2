"""Templates whose loop over the messages can begin in its middle, because what it wrote before is known.

Of a talk that goes on, a template writes the same again and then something new. That it is the same must be proven, for
templates look ahead: Qwen3's leaves out the reasoning before the last question, others close a run of tool answers. The proof:

- All but the loop is rendered anew each time, over all messages, so it may read what it likes.
- The loop goes through `messages` or an end of them, and of other messages its body reads the first, the one before and a few
  after the present one, counted in what goes by the name `messages` there. So the text of an iteration is a function of those,
  of its place, and of the variables that the body reads. That holds or does not for a template's syntax tree, and where it
  does not, nothing is reused.
- What those variables are is said at run time: a resumable template notes them before its loop, and texts are reused only
  where all are the same. One that is only compared with the place of a message counts as the same when every comparison
  comes out the same: that is how the reasoning of a talk stays out when its last question moves on.
- What the body changes in a namespace is noted at each iteration, and put back where the loop begins again.

Here such a template is made of a common one. It puts `MARK` before the text of every iteration; who renders it passes

    warmpath_skip   how many iterations to leave out
    warmpath_state  what the body had put into namespaces when it had gone through those
    warmpath_note   a function that it calls with notes: whether a value is defined, the value, and so on. First of how many
                    messages the loop goes through, then of what its body reads, then of `warmpath_state` at each iteration
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from router.sandbox import parse_template
from router.settled_loops import end_settled_loops
from router.template_source import expression_source, template_source

__all__ = ["MARK", "NOTE", "SKIP", "STATE", "Resumable", "make_resumable"]

MARK: Final = "\ufdd1"
"""No character. One that stands in a message is one too many, and who counts them finds out."""

_OURS: Final = "warmpath_"
SKIP: Final = "warmpath_skip"
STATE: Final = "warmpath_state"
NOTE: Final = "warmpath_note"
_SKIP: Final = nodes.Name(SKIP, "load")
_FUNCTIONS: Final = frozenset({"raise_exception", "namespace", "range"})
"""Which say the same whenever they are asked: not `strftime_now`."""
_KNOWN_OF_LOOP: Final = frozenset({"index", "index0", "first", "last"})
"""What stays the same when messages come behind: all but the last iteration is not the last."""


@dataclass(frozen=True, slots=True)
class Resumable:
    source: str
    reach: int
    """How many messages after the one of its place may change the text of an iteration."""
    variables: tuple[str, ...]
    """What the loop reads of the variables given to the template."""
    places: tuple[bool, ...]
    """Of each value noted before the loop, whether it is only compared with `loop.index0`."""
    num_states: int
    """How many values are noted at each iteration."""

    def key(self, before: Sequence[Any], variables: Mapping[str, Any], iterations: int) -> bytes | None:
        """The same key, the same texts of this many iterations over the same messages. None: they must not be reused.

        `before`: as noted before the loop. `variables`: given to the template.
        """
        defined, values = before[::2], before[1::2]
        settled = [
            min(value, iterations) if is_place and type(value) is int else value
            for is_place, value in zip(self.places, values, strict=True)
        ]
        given = [[name in variables, variables.get(name)] for name in self.variables]
        try:
            return msgspec.json.encode([defined, settled, given])
        except Exception:  # a value that is no JSON: a macro, a namespace
            return None


def make_resumable(source: str) -> Resumable | None:
    """None where texts of iterations must not be reused. `source` is one that minijinja may render."""
    tree = parse_template(source)
    if _OURS in source or MARK in source:
        return None
    end_settled_loops(tree)
    try:
        loop = _Loop.of(tree)
        loop.read()
        made = loop.made_resumable()
    except (_NotProvenError, ValueError):
        return None
    # What is written is what was meant.
    if parse_template(made.source) != _TextsAsConstants().visit(tree):
        return None
    return made


class _NotProvenError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Where:
    is_ours: bool = True
    """`loop` is the loop over the messages."""
    is_behind_first: bool = False
    """What stands here is only evaluated for later messages than its first."""

    def behind_first(self) -> _Where:
        return replace(self, is_behind_first=True) if self.is_ours else self


@dataclass(slots=True)
class _Loop:
    """The last loop over the messages. `read` finds what its body depends on, and raises where that may be anything."""

    tree: nodes.Template
    node: nodes.For
    target: str
    ends: frozenset[str]
    """Names of the messages and of ends of them."""
    set_outside: frozenset[str]
    macros: frozenset[str]
    reach: int = 0
    variables: set[str] = field(default_factory=set)
    noted: dict[str, nodes.Expr] = field(default_factory=dict)
    """By their source."""
    used_otherwise: set[str] = field(default_factory=set)
    """Of those noted, what is not only compared with a place."""
    states: dict[str, tuple[nodes.NSRef, nodes.Expr]] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: nodes.Template) -> _Loop:
        ends = _ends_of_messages(tree)
        loops = [each for each in tree.body if isinstance(each, nodes.For) and _is_end(each.iter, ends)]
        if not loops:
            raise _NotProvenError
        loop = loops[-1]
        if not isinstance(loop.target, nodes.Name) or loop.test is not None or loop.else_ or loop.recursive:
            raise _NotProvenError
        inside = {id(name) for name in _names(loop)}
        outside = {name.name for name in _stored(tree) if id(name) not in inside}
        macros = frozenset(macro.name for macro in tree.find_all(nodes.Macro))
        return cls(tree, loop, loop.target.name, ends, frozenset(outside), macros)

    def read(self) -> None:
        if self.target in self.ends or self.target == "loop":
            raise _NotProvenError
        self._read_all(self.node.body, _Where())
        for macro in self.tree.find_all(nodes.Macro):
            self._read_macro(macro)

    def _read_macro(self, macro: nodes.Macro) -> None:
        """What it reads must be its own or given to the template: what else a macro sees is for each engine to say."""
        own = {id(name) for name in _stored(macro)}
        set_elsewhere = {name.name for name in _stored(self.tree) if id(name) not in own}
        loop_names = {id(name) for loop in macro.find_all(nodes.For) for each in loop.body for name in _names(each)}
        parameters = {name.name for name in macro.args}
        for name in _names(macro):
            if name.ctx != "load" or name.name in parameters | _FUNCTIONS | self.macros:
                continue
            if name.name == "loop" and id(name) in loop_names:
                continue
            if name.name in self.ends | set_elsewhere | {"loop", "strftime_now"}:
                raise _NotProvenError
            self.variables.add(name.name)
        if macro.find(nodes.NSRef) is not None:
            raise _NotProvenError

    def _read(self, node: nodes.Node, where: _Where) -> None:
        match node:
            case nodes.If() | nodes.For() | nodes.Break() | nodes.Macro() | nodes.NSRef():
                self._read_statement(node, where)
            case nodes.And() | nodes.Or():
                self._read(node.left, where)
                is_first_here = _denies_first if isinstance(node, nodes.And) else _says_first
                self._read(node.right, where.behind_first() if is_first_here(node.left) else where)
            case nodes.Compare(ops=[nodes.Operand()]) if where.is_ours and any(map(_is_place, _sides(node))):
                self._read_comparison(node, where)
            case nodes.Getitem(node=nodes.Name(name="messages")):
                self._read_message(node.arg, where)
            case nodes.Getattr(node=nodes.Name(name="loop")):
                if where.is_ours and node.attr not in _KNOWN_OF_LOOP:
                    raise _NotProvenError
            case nodes.Call():
                self._read_call(node, where)
            case nodes.Getattr() | nodes.Name() if (value := self._outer_value(node)) is not None:
                self.noted[(source := expression_source(value))] = value
                self.used_otherwise.add(source)
            case nodes.Name(ctx="load", name=name):
                self._read_name(name)
            case _:
                self._read_all(node.iter_child_nodes(), where)

    def _read_all(self, parts: Iterable[nodes.Node], where: _Where) -> None:
        for part in parts:
            self._read(part, where)

    def _read_statement(self, node: nodes.Node, where: _Where) -> None:
        match node:
            case nodes.If():
                self._read(node.test, where)
                self._read_all(node.body, where.behind_first() if _denies_first(node.test) else where)
                otherwise = where.behind_first() if _says_first(node.test) else where
                self._read_all((*node.elif_, *node.else_), otherwise)
            case nodes.For():
                if any(name.name == "loop" for part in (node.test, *node.else_) if part for name in _names(part)):
                    raise _NotProvenError  # whose it is there, engines say each in its way
                self._read(node.iter, where)
                self._read_all(node.iter_child_nodes(exclude=("iter",)), replace(where, is_ours=False))
            case nodes.NSRef():
                self._change(node)
            case nodes.Break() if not where.is_ours:
                pass
            case _:  # leaving the loop, the number of iterations would say nothing about the number of messages
                raise _NotProvenError

    def _read_call(self, node: nodes.Call, where: _Where) -> None:
        match node.node:
            case nodes.Name(name=name) if name in _FUNCTIONS | self.macros:
                pass
            case nodes.Getattr(node=value):  # a method, which depends on all of its value
                self._read(value, where)
            case _:
                raise _NotProvenError
        self._read_all(node.iter_child_nodes(exclude=("node",)), where)

    def _read_comparison(self, node: nodes.Compare, where: _Where) -> None:
        """Of `loop.index0` with something else."""
        for side in _sides(node):
            if (value := self._outer_value(side)) is not None:
                self.noted[expression_source(value)] = value
            else:
                self._read(side, where)

    def _outer_value(self, node: nodes.Node) -> nodes.Name | nodes.Getattr | None:
        """`node` if it is a variable that is set outside of the loop, or an attribute of one."""
        match node:
            case nodes.Name(ctx="load", name=name) | nodes.Getattr(node=nodes.Name(name=name)):
                if name in self.set_outside and name not in self.ends | self.macros | {self.target, "loop"}:
                    return node
        return None

    def _read_name(self, name: str) -> None:
        if name in self.ends or name in {"loop", "strftime_now"} or name in self.macros:
            raise _NotProvenError
        if name != self.target:
            self.variables.add(name)

    def _read_message(self, number: nodes.Node, where: _Where) -> None:
        match number:
            case nodes.Const(value=0):
                pass
            case nodes.Add(left=place, right=nodes.Const(value=int(ahead))) if where.is_ours and _is_place(place):
                self.reach = max(self.reach, ahead)
            case nodes.Sub(left=place, right=nodes.Const(value=1)) if where.is_ours and _is_place(place):
                if not where.is_behind_first:  # for which it would be the last message
                    raise _NotProvenError
            case place if where.is_ours and _is_place(place):
                pass
            case _:
                raise _NotProvenError

    def _change(self, node: nodes.NSRef) -> None:
        set_inside = any(name.name == node.name for name in _stored(self.node))
        if node.name not in self.set_outside or set_inside:
            raise _NotProvenError
        value = nodes.Getattr(nodes.Name(node.name, "load"), node.attr, "load")
        source = expression_source(value)
        self.noted[source] = value
        self.used_otherwise.add(source)
        self.states[source] = (node, value)

    def made_resumable(self) -> Resumable:
        """Changes the tree. To be called once."""
        loop, states = self.node, list(self.states.values())
        places = tuple(source not in self.used_otherwise for source in self.noted)
        restore = [
            nodes.Assign(
                nodes.NSRef(target.name, target.attr),
                nodes.Getitem(nodes.Name(STATE, "load"), nodes.Const(number), "load"),
            )
            for number, (target, _) in enumerate(states)
        ]
        at = self.tree.body.index(loop)
        length = nodes.Filter(loop.iter, "length", [], [], None, None)
        self.tree.body[at:at] = [
            _note([length]),
            _note(self.noted.values()),
            *([nodes.If(_SKIP, restore, [], [])] if restore else []),
        ]
        loop.iter = nodes.Getitem(loop.iter, nodes.Slice(_SKIP, None, None), "load")
        loop.body = [_Shifted().visit(each) for each in loop.body]
        if states:
            loop.body.insert(0, _note(value for _, value in states))
        if isinstance(first := loop.body[0], nodes.Output):  # or the two would be read again as one
            loop.body[0] = nodes.Output([nodes.Const(MARK), *first.nodes])
        else:
            loop.body.insert(0, nodes.Output([nodes.Const(MARK)]))
        return Resumable(
            source=template_source(self.tree),
            reach=self.reach,
            variables=tuple(sorted(self.variables | self.ends - {"messages"})),
            places=places,
            num_states=len(states),
        )


class _Shifted(NodeTransformer):
    """`loop` of a loop that began later."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - how jinja2 finds it
        node.iter = self.visit(node.iter)  # in there `loop` is another one
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802 - how jinja2 finds it
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="index" | "index0"):
                return nodes.Add(node, _SKIP)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="first"):
                return nodes.And(node, nodes.Not(_SKIP))
        return self.generic_visit(node)


class _TextsAsConstants(NodeTransformer):
    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 - how jinja2 finds it
        return nodes.Const(node.data)


def _note(values: Iterable[nodes.Expr]) -> nodes.Assign:
    arguments = [each for value in values for each in (nodes.Test(value, "defined", [], [], None, None), value)]
    call = nodes.Call(nodes.Name(NOTE, "load"), arguments, [], None, None)
    return nodes.Assign(nodes.Name("warmpath_noted", "store"), call)


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    if isinstance(node, nodes.Name):
        yield node
    yield from node.find_all(nodes.Name)


def _stored(node: nodes.Node) -> Iterator[nodes.Name]:
    return (name for name in _names(node) if name.ctx in ("store", "param"))


def _ends_of_messages(tree: nodes.Template) -> frozenset[str]:
    """`messages`, and names that are never anything but an end of them. Llama 3.1's cuts the first off `messages` itself."""
    stored = [name.name for name in _stored(tree)]
    assigned: dict[str, list[nodes.Node]] = {}
    for assign in _assigns_outside_of_loops(tree.body):
        if isinstance(assign.target, nodes.Name):
            assigned.setdefault(assign.target.name, []).append(assign.node)
    ends = {
        name
        for name in ("messages", *assigned)
        if len(values := assigned.get(name, [])) == stored.count(name)
        and all(_is_end(value, frozenset({"messages"})) for value in values)
    }
    if "messages" not in ends:
        raise _NotProvenError
    return frozenset(ends)


def _assigns_outside_of_loops(body: Iterable[nodes.Node]) -> Iterator[nodes.Assign]:
    for node in body:
        match node:
            case nodes.Assign():
                yield node
            case nodes.If():
                yield from _assigns_outside_of_loops((*node.body, *node.elif_, *node.else_))


def _is_end(node: nodes.Node, ends: frozenset[str]) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in ends
        case nodes.Getitem(node=inner, arg=nodes.Slice(start=nodes.Const(value=int(start)), stop=None, step=None)):
            return start >= 0 and _is_end(inner, ends)
    return False


def _sides(node: nodes.Compare) -> tuple[nodes.Node, nodes.Node]:
    return node.expr, node.ops[0].expr


def _is_place(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0"):
            return True
    return False


def _says_first(node: nodes.Node) -> bool:
    """Whether it is true of the first message, whatever else it is true of."""
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="first"):
            return True
        case nodes.Compare(expr=place, ops=[nodes.Operand(op="eq", expr=nodes.Const(value=0))]):
            return _is_place(place)
        case nodes.Or():
            return _says_first(node.left) or _says_first(node.right)
    return False


def _denies_first(node: nodes.Node) -> bool:
    """Whether it is false of the first message, whatever else it is false of."""
    match node:
        case nodes.Not():
            return _says_first(node.node)
        case nodes.Compare(expr=place, ops=[nodes.Operand(op="gt", expr=nodes.Const(value=0))]):
            return _is_place(place)
        case nodes.And():
            return _denies_first(node.left) or _denies_first(node.right)
    return False
