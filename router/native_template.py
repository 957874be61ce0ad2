"""Chat templates in minijinja: six times as fast as jinja2, and used only where it writes the same text.

jinja2 defines what a template means (`router.sandbox`). Three things keep minijinja from ever saying something else:

- Vocabulary. Only templates made of what is known to mean the same in both are taken (`_means_the_same`, over jinja2's own
  syntax tree). That is also the sandbox: minijinja would call `messages.append`, so no method is allowed but a few of
  strings and dicts that change nothing, and no name that begins with an underscore. Filters are jinja2's, in Python.
- Doubt. What minijinja refuses, or might print in another way (a number, a list), is rendered by jinja2, whose text or error
  counts; so is what has characters that Rust and Python treat differently.
- Rehearsal. At load both render the same chats (`router.rehearsal`); one difference, and the template stays with jinja2.

What jinja2 refuses and minijinja answers: comparing values of different kinds, looking for what is no text in a text, and
taking a slice of nothing.

`FUEL` bounds the instructions of a rendering, so no loop runs for ever, and minijinja bounds `range` and recursion itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Never

from jinja2 import nodes

from router.sandbox import parse_template, tojson

try:
    import minijinja
except ImportError:  # an optional extra: jinja2 can do it all
    _INSTALLED = False
else:
    _INSTALLED = True

__all__ = ["NativeTemplate", "compile_native"]

FUEL: Final = 20_000_000
"""Instructions of one rendering: about a second. The longest body has a few hundred thousand."""

_NODES: Final = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Assign, nodes.Macro),
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.List, nodes.Tuple, nodes.Keyword, nodes.CondExpr),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Filter, nodes.Test, nodes.Break, nodes.Continue),
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Sub, nodes.Mod, nodes.Neg),
)
"""Not among them: products and powers, by which a template fills the memory, and `~`, which prints numbers."""

_METHODS: Final = frozenset({"startswith", "endswith", "split", "strip", "lstrip", "rstrip", "items", "get"})
_FUNCTIONS: Final = frozenset({"raise_exception", "namespace", "range", "strftime_now"})
_FILTERS: Final = frozenset({"tojson", "trim", "upper", "lower", "join", "length", "count", "default", "first", "last"})
_TESTS: Final = frozenset(
    {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "true", "false"}
)

_STRIPS: Final = re.compile(r"strip\s*\(\s*\)")
_LOOP: Final = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length"})
_AMBIGUOUS: Final = frozenset({*dir(str), *dir(list), *dir(dict)})
"""Where a value has such a key, jinja2 finds Python's method and minijinja the key."""

_WHITE_IN_PYTHON_ONLY: Final = ("\x1c", "\x1d", "\x1e", "\x1f")
"""`strip` leaves them at minijinja. In its text they raise doubt."""


class _Doubt(Exception):
    """jinja2 must say."""


class NativeTemplate:
    """A compiled template. Any thread may render."""

    def __init__(self, source: str) -> None:
        # Two of them, because asking about each printed value takes a fifth of the time, and most chats are only text.
        self._trusting = _environment(source, finalizer=None)
        self._asking = _environment(source, finalizer=_only_text)
        self._strips = _STRIPS.search(source) is not None

    def render(self, variables: Mapping[str, Any], *, only_text: bool) -> str | None:
        """None where jinja2 must say. `only_text`: the messages hold nothing but texts, and there is nothing else.

        Raises `minijinja.TemplateError` when the fuel is used up.
        """
        environment = self._trusting if only_text else self._asking
        try:
            text: str = environment.render_template("chat", **variables)
        except Exception as error:  # foreign code over a client's values, and _Doubt
            if getattr(error, "kind", "") == "OutOfFuel":
                raise
            return None
        # Half a surrogate pair becomes U+FFFD on the way to Rust. Looking for it costs nothing in a text of ASCII.
        if "\ufffd" in text or (self._strips and any(character in text for character in _WHITE_IN_PYTHON_ONLY)):
            return None
        return text


def compile_native(source: str, functions: frozenset[str] = frozenset()) -> NativeTemplate | None:
    """None where minijinja is not installed or would not mean the same. `source` is one that jinja2 compiles, and may call
    `functions` beside those that every template may.
    """
    if not _INSTALLED or not _means_the_same(parse_template(source), functions):
        return None
    try:
        return NativeTemplate(source)
    except minijinja.TemplateError:
        return None


def _environment(source: str, finalizer: Callable[[Any], Any] | None) -> Any:
    filters: dict[str, Callable[..., Any]] = {
        "tojson": _for(str | bool | dict | list, tojson),
        "trim": _for(str, lambda text, characters=None: text.strip(characters)),
        "upper": _for(str, str.upper),
        "lower": _for(str, str.lower),
        "join": _for(list, _join),
    }
    tests = {
        "iterable": _for(object, lambda value: isinstance(value, Iterable)),
        "sequence": _for(object, lambda value: isinstance(value, str | list | dict)),
    }
    return minijinja.Environment(
        templates={"chat": source},
        filters=filters,
        tests=tests,
        globals={"raise_exception": _refuse},
        finalizer=finalizer,
        fuel=FUEL,
        debug=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _for(kind: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for values of this kind, doubt for others. None is always doubtful: what is undefined looks like it."""

    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        if value is None or not isinstance(value, kind):
            raise _Doubt
        return function(value, *args, **kwargs)

    return checked


def _join(values: list[Any], separator: str = "") -> str:
    if not all(type(value) is str for value in values):
        raise _Doubt
    return separator.join(values)


def _only_text(value: Any) -> str:
    if type(value) is str:
        return value
    raise _Doubt


def _refuse(message: object = "") -> Never:
    raise _Doubt  # with jinja2's words


def _means_the_same(tree: nodes.Template, functions: frozenset[str]) -> bool:
    callable_names = _FUNCTIONS | functions | {macro.name for macro in tree.find_all(nodes.Macro)}
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
    if assigned & (callable_names | {"loop"}):
        return False
    calls = list(tree.find_all(nodes.Call))
    called = {id(call.node) for call in calls}
    return all(_is_known_call(call, callable_names) for call in calls) and all(
        _is_known(node) for node in tree.find_all(nodes.Node) if id(node) not in called
    )


def _is_known_call(call: nodes.Call, callable_names: frozenset[str]) -> bool:
    if call.dyn_args is not None or call.dyn_kwargs is not None:
        return False
    match call.node:
        case nodes.Name(name=name):
            return name in callable_names
        case nodes.Getattr(attr="split"):
            return len(call.args) == 1  # without, at what Python holds for white space
        case nodes.Getattr(attr=method):
            return method in _METHODS
    return False


def _is_known(node: nodes.Node) -> bool:
    match node:
        case nodes.Const():
            return not isinstance(node.value, float)
        case nodes.Name() | nodes.NSRef():
            return not node.name.startswith("_")
        case nodes.Filter():
            return node.name in _FILTERS
        case nodes.Test():
            return node.name in _TESTS
        case nodes.Getattr(node=nodes.Name(name="loop")):
            return node.attr in _LOOP
        case nodes.Getattr():
            return node.attr not in _AMBIGUOUS and not node.attr.startswith("_")
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return isinstance(key, int) or (key not in _AMBIGUOUS and not key.startswith("_"))
    return isinstance(node, _NODES)
