"""A client's JSON schema, made ready for llguidance: how large it may be, and how the JSON shall look. Pure.

llguidance bounds its own work but for two things. Whether strings can obey several patterns at once: the time for that
doubles with each pattern (0.1 s for 17 of them, minutes for 30). And what is a multiple: of 10,007 takes 0.02 s, of 99,991
some seconds, of two such numbers at once hours. So we count how much of either meets in one place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from workers.api_error import invalid_value

__all__ = ["is_lenient", "ready_schema"]

MAX_SCHEMA_BYTES: Final = 65_536
MAX_DEPTH: Final = 64
"""Objects and lists within each other. llguidance itself reads 127."""
MAX_PATTERNS_AT_ONCE: Final = 8
MAX_MULTIPLE: Final = 10_000
"""The product of all ``multipleOf`` that one number has to obey; the decimal point and zeros at the end do not count."""

_PATH: Final = re.compile(r"#(/[A-Za-z0-9_$. -]+)*")
"""A reference as nearly everybody writes it: names of members, with nothing escaped in them."""

_CHILDREN: Final = ("properties", "patternProperties", "$defs", "definitions")
_CHILD: Final = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")


_STYLE: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""Spaces where JSON allows them, but not without end: small models would rather indent for ever than close a bracket."""


def ready_schema(schema: Any, param: str, *, lenient: bool = False) -> dict[str, Any]:
    """`lenient`: keywords that llguidance does not know are left out, instead of being a fault. Raises `ApiError` 400."""
    if not isinstance(schema, dict):
        raise invalid_value(f"'{param}' must be a JSON schema, an object.", param)
    if _is_deeper_than(schema, MAX_DEPTH):
        raise invalid_value(f"'{param}' is nested more than {MAX_DEPTH} levels deep.", param)
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise invalid_value(f"'{param}' takes more than {MAX_SCHEMA_BYTES} bytes.", param)
    try:
        patterns = _AtOnce(schema, _own_patterns).count(schema)
        magnitude = _AtOnce(schema, _own_magnitude).count(schema)
    except RecursionError as error:
        raise invalid_value(f"'{param}' has too long a chain of references.", param) from error
    if patterns > MAX_PATTERNS_AT_ONCE:
        raise invalid_value(f"'{param}' has more than {MAX_PATTERNS_AT_ONCE} patterns for one string.", param)
    if magnitude > math.log(MAX_MULTIPLE) + 1e-9:
        raise invalid_value(f"'{param}' has a 'multipleOf' beyond {MAX_MULTIPLE}, or several that make one.", param)
    return {**schema, "x-guidance": _STYLE | {"lenient": True} if lenient else _STYLE}


def is_lenient(wrapper: Mapping[str, Any], param: str) -> bool:
    """``strict: false`` beside a schema asks for as much of it as can be had. Who says nothing gets all of it or an error."""
    strict = wrapper.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid_value(f"'{param}.strict' must be a boolean.", f"{param}.strict")
    return strict is False


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [child for item in level for child in _inside(item)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    """Objects and lists right inside an object or list."""
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


class _AtOnce:
    """Adds up, never too low, how much of something one value of an instance may have to obey."""

    def __init__(self, root: Mapping[str, Any], own: Callable[[Mapping[str, Any]], float]) -> None:
        """`own`: how much a schema itself has of it."""
        self._root = root
        self._own = own
        self._known: dict[int, float] = {}  # by the identity of a schema, which lives as long as the root
        self._in_all = sum(map(own, _objects(root)))
        # References by names, or from a place with a name of its own, are too much to follow here.
        self._by_path_only = not any(
            schema is not root and isinstance(schema.get("$id"), str) for schema in _objects(root)
        )

    def count(self, schema: Any) -> float:
        if not isinstance(schema, dict):
            return 0
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = 0  # what refers to itself adds nothing to itself
        count = self._of_its_own(schema)
        count += sum(map(self.count, _list(schema.get("allOf"))))
        for key in ("anyOf", "oneOf"):
            count += max(map(self.count, _list(schema.get(key))), default=0)
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in schema:
                count += self._behind(schema[key])
        self._known[id(schema)] = count
        return count

    def _of_its_own(self, schema: Mapping[str, Any]) -> float:
        """For the schema's own value, or for one further inside, which is another one."""
        children = [schema.get(key) for key in _CHILD] + _list(schema.get("prefixItems")) + _list(schema.get("items"))
        for key in _CHILDREN:
            named = schema.get(key)
            children += named.values() if isinstance(named, dict) else []
        return max(self._own(schema), *map(self.count, children))

    def _behind(self, reference: Any) -> float:
        path = _PATH.fullmatch(reference) if isinstance(reference, str) and self._by_path_only else None
        if path is None:
            return self._in_all
        value: Any = self._root
        for part in path[0].split("/")[1:]:
            value = value.get(part) if isinstance(value, dict) else None
        return self._in_all if value is None else self.count(value)


def _own_patterns(schema: Mapping[str, Any]) -> int:
    of_keys = schema.get("patternProperties")
    return ("pattern" in schema) + ("format" in schema) + (len(of_keys) if isinstance(of_keys, dict) else 0)


def _own_magnitude(schema: Mapping[str, Any]) -> float:
    """The logarithm of ``multipleOf``, so that those of a product add up. What is no such number llguidance refuses."""
    value = schema.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    digits = "".join(map(str, Decimal(str(value)).as_tuple().digits)).strip("0")
    return math.log(int(digits)) if digits else 0.0


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        item = pending.pop()
        pending += _inside(item)
        if isinstance(item, dict):
            yield item


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
