"""Pieces of an assistant's message in OpenAI's shapes: the whole message of an answer, the delta of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from workers.message import CallArguments, CallStart, Content, Piece, Reasoning

__all__ = ["delta_message", "joined_text", "whole_message"]

_Text = TypeVar("_Text", Content, Reasoning)


def joined_text(pieces: Sequence[Piece], kind: type[_Text]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def whole_message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """`content` is null where all that was said is calls or thoughts."""
    content, reasoning = joined_text(pieces, Content), joined_text(pieces, Reasoning)
    calls = _whole_calls(pieces)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not content and (calls or reasoning):
        message["content"] = None
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _whole_calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    arguments = {start.index: [""] for start in starts}
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index].append(piece.text)
    return [_call(start, "".join(arguments[start.index])) for start in starts]


def _call(start: CallStart, arguments: str) -> dict[str, Any]:
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}


def delta_message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Pieces that come together, in one delta: clients join each field, and the calls by their index."""
    delta: dict[str, Any] = {}
    if reasoning := joined_text(pieces, Reasoning):
        delta["reasoning"] = reasoning
    if content := joined_text(pieces, Content):
        delta["content"] = content
    if calls := _calls_of_delta(pieces):
        delta["tool_calls"] = calls
    return delta


def _calls_of_delta(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """One entry a call: some clients take a second one of the same index for the next call."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls[piece.index] = {"index": piece.index, **_call(piece, "")}
        elif isinstance(piece, CallArguments):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    return list(calls.values())
