"""One tool call as a model writes it, ``{"name": "f", "arguments": {…}}``, read as its text comes. Pure.

The reader knows as much JSON as it takes to see where each member begins and ends: strings, escapes, how many brackets are open
(not of which kind, so one that was forgotten costs less). The arguments are handed on as the model wrote them, JSON or not.

What must hold: each character is looked at once, and what comes of the text does not depend on how it is cut.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Final

__all__ = ["CallReader"]


class _At(Enum):
    """The place in the object."""

    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_STRING = auto()
    IN_BRACKETS = auto()
    IN_SCALAR = auto()
    AFTER_VALUE = auto()
    END = auto()


_BETWEEN: Final[dict[_At, dict[str, _At]]] = {
    _At.OBJECT: {"{": _At.FIRST_KEY},
    _At.FIRST_KEY: {'"': _At.IN_KEY, "}": _At.END},
    _At.KEY: {'"': _At.IN_KEY},
    _At.COLON: {":": _At.VALUE},
    _At.VALUE: {'"': _At.IN_STRING, "{": _At.IN_BRACKETS, "[": _At.IN_BRACKETS}
    | dict.fromkeys("-0123456789tfn", _At.IN_SCALAR),
    _At.AFTER_VALUE: {",": _At.KEY, "}": _At.END},
}
"""Place → next character that is no space → the place behind it."""

_INSIDE: Final = frozenset({_At.IN_KEY, _At.IN_STRING, _At.IN_BRACKETS, _At.IN_SCALAR})
"""Of a key or a value, where spaces are part of it or end it."""

_SPACES: Final = re.compile(r"[ \t\r\n]*")
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]*")
_PLAIN_IN_STRING: Final = re.compile(r'[^"\\]*')
_PLAIN_IN_BRACKETS: Final = re.compile(r'[^][{}"<]*')


class CallReader:
    """Reads from behind ``<tool_call>`` to the object's last bracket."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.announced = False
        """The name is known and the arguments have begun: it is a call, whatever comes."""
        self.ended = False
        """Nothing more of it will come. If it is not announced it never was a call."""
        self._at = _At.OBJECT
        self._key = ""
        self._arguments: list[str] = []
        self._string: list[str] = []
        self._sink: list[str] | None = None  # where what is being read is kept: one of the two above
        self._depth = 0  # open brackets of the value
        self._quoted = self._escaped = False  # inside a string, behind a backslash in it

    def feed(self, text: str, start: int, end: int) -> int:
        """Read ``text[start:end]`` as far as the call goes; returns where it stopped."""
        while start < end and not self.ended:
            start = (self._read_inside if self._at in _INSIDE else self._read_between)(text, start, end)
        return start

    def take_arguments(self) -> str:
        """Those that came since this was called last; none before the call is announced."""
        if not self.announced:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _read_between(self, text: str, start: int, end: int) -> int:
        start = _end_of(_SPACES, text, start, end)
        if start == end:
            return start
        char = text[start]
        following = _BETWEEN[self._at].get(char)
        if following is None:
            self.ended = True
            return start
        self._at = following
        if following is _At.END:
            self.ended = True
        elif following in _INSIDE:
            self._open(char)
        return start + 1

    def _open(self, char: str) -> None:
        """`char` begins a key or value."""
        self._quoted, self._depth = char == '"', int(char in "{[")
        self._sink = None
        if self._at is _At.IN_KEY:
            self._sink = self._string = [char]
        elif self.announced:
            return
        elif self._key == "name":
            self._sink = self._string = [char]
            self.ended = self._at is not _At.IN_STRING
        elif self._key == "arguments":
            self._sink = self._arguments = [char]
            self.ended = char != "{"
            self.announced = not self.ended and self.name is not None

    def _read_inside(self, text: str, start: int, end: int) -> int:
        if self._at is _At.IN_SCALAR:
            stop = _end_of(_SCALAR, text, start, end)
            through = stop < end
        elif self._at is _At.IN_BRACKETS:
            stop = self._read_brackets(text, start, end)
            through = not self._depth
        else:
            stop = self._read_string(text, start, end)
            through = not self._quoted
        if self._sink is not None:
            self._sink.append(text[start:stop])
        if through:
            self._close()
        return stop

    def _close(self) -> None:
        """The key or value is read to its end."""
        if self._at is _At.IN_KEY:
            key = _decoded("".join(self._string))
            self._key, self._at, self.ended = key or "", _At.COLON, key is None
            return
        self._at = _At.AFTER_VALUE
        if self._key == "name" and not self.announced:
            self.name = _decoded("".join(self._string)) or None
            self.ended = self.name is None
            self.announced = not self.ended and bool(self._arguments)

    def _read_brackets(self, text: str, start: int, end: int) -> int:
        while start < end and self._depth:
            if self._quoted:
                start = self._read_string(text, start, end)
                continue
            start = _end_of(_PLAIN_IN_BRACKETS, text, start, end)
            if start == end:
                break
            char = text[start]
            if char == "<":  # no JSON begins so, a closing tag does
                self.ended = True
                break
            start += 1
            self._quoted = char == '"'
            self._depth += (char in "{[") - (char in "}]")
        return start

    def _read_string(self, text: str, start: int, end: int) -> int:
        """To behind the quote that ends it."""
        while start < end and self._quoted:
            if self._escaped:
                self._escaped = False
            else:
                start = _end_of(_PLAIN_IN_STRING, text, start, end)
                if start == end:
                    break
                self._quoted, self._escaped = text[start] != '"', text[start] == "\\"
            start += 1
        return start


def _end_of(pattern: re.Pattern[str], text: str, start: int, end: int) -> int:
    match = pattern.match(text, start, end)
    assert match is not None, "these patterns match the empty string too"
    return match.end()


def _decoded(literal: str) -> str | None:
    """What a string in JSON says; None if it is none, or has half of a surrogate pair, which is no character."""
    try:
        text = json.loads(literal)
        text.encode()
    except ValueError:
        return None
    return str(text)
