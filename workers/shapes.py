"""What a replica answers, in OpenAI's shapes: whole objects and server-sent events. Pure: values in, bytes out.

A chunk is the unit of cost in a long answer, so it is put together from bytes that are fixed for the answer; only its
text is encoded. Every chunk of an answer has the same id and created.

An event that tells ids numbers them in its ``id`` field, which clients leave alone: ``id: <n>:<ids>``, n of them told before.
From these a gateway knows what to send to another replica if this one breaks (`router.wire.Resume`).

The chunks before the last leave `usage` out unless they are asked for it: OpenAI writes null there, and every client reads the
two alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from workers.api_error import ApiError
from workers.choice import Delta
from workers.logprob_json import TokenBytes, chat_logprobs, completion_logprobs
from workers.message import Content, Piece
from workers.message_json import delta_message, joined_text, whole_message
from workers.protocol import TokenLogprob

__all__ = ["DONE", "Opening", "Shape", "Usage", "error_event", "model_card", "model_list"]

DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    """Of all choices, end and stop tokens included."""
    cached_tokens: int
    """Prompt tokens that were not computed again. 0 is said as 0: absent would mean unknown."""
    reasoning_tokens: int = 0
    """Part of the completion's."""

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True)
class Opening:
    """What a choice begins with, before anything is generated."""

    echo: Delta | None = None
    """The prompt as the first part of the text, where it is asked for."""
    prompt_ids: Sequence[int] | None = None
    """None where they are not asked for."""


class Shape:
    """Writes one answer, whole or in chunks: a chat completion or a text completion."""

    def __init__(
        self,
        *,
        chat: bool,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str,
        token_bytes: TokenBytes,
        logprobs: bool = False,
        token_ids: bool = False,
    ) -> None:
        """`logprobs`, `token_ids`: whether they are told."""
        self._chat = chat
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._head = {"id": response_id, "created": created, "model": model, "system_fingerprint": fingerprint}
        chunk = {"object": "chat.completion.chunk" if chat else "text_completion", **self._head}
        self._chunk = b'data: %b,"choices":[' % _encode(chunk)[:-1]
        self._text = b'"delta":{"content":%b}' if chat else b'"text":%b'
        self._nothing = b'"delta":{}' if chat else b'"text":""'

    def opening(self, index: int, opening: Opening, usage: Usage | None = None) -> bytes:
        """The event that opens a choice, sent with its first token; b'' where a text completion has nothing to say yet."""
        echo, prompt, inner = opening.echo, b"", self._nothing
        if opening.prompt_ids is not None:
            prompt = b',"prompt_token_ids":%b' % _encode(opening.prompt_ids)
        if self._chat:
            inner = b'"delta":{"role":"assistant","content":""}'
        elif echo is not None:
            inner = self._content(echo.pieces)
        elif not prompt:
            return b""
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":null%b}]%b%b}\n\n' % (
            self._chunk,
            index,
            inner,
            b"null" if echo is None else self._logprobs_of_delta(echo),
            b"" if self._chat else prompt,
            prompt if self._chat else b"",
            b"" if usage is None else _usage_member(usage),
        )

    def event(self, index: int, delta: Delta, *, numbered: bool, usage: Usage | None = None) -> bytes:
        """`numbered`: the ids go into the event's own id. `usage`: so far, where every event tells it."""
        reason = b"null"
        if delta.end is not None:
            reason = b'"%b","stop_reason":%b' % (delta.end.reason.encode(), _encode(delta.end.stopped_by))
        if self._token_ids:
            reason += b',"token_ids":%b' % _encode(delta.ids)
        return b'%b%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            _id_line(delta) if numbered else b"",
            self._chunk,
            index,
            self._content(delta.pieces),
            self._logprobs_of_delta(delta),
            reason,
            b"" if usage is None else _usage_member(usage),
        )

    def usage(self, usage: Usage) -> bytes:
        return b"%b]%b}\n\n" % (self._chunk, _usage_member(usage))

    def whole(self, choices: Sequence[tuple[Opening, Sequence[Delta]]], usage: Usage) -> bytes:
        """`choices` in the order of their indices, each with all its deltas."""
        answer: dict[str, Any] = {
            "object": "chat.completion" if self._chat else "text_completion",
            **self._head,
            "choices": [self._whole_choice(index, *choice) for index, choice in enumerate(choices)],
            "usage": usage.as_json(),
        }
        if self._chat and self._token_ids:
            answer["prompt_token_ids"] = choices[0][0].prompt_ids
        return _encode(answer)

    def _content(self, pieces: Sequence[Piece]) -> bytes:
        if not pieces:
            return self._nothing
        if len(pieces) == 1 and isinstance(piece := pieces[0], Content):
            return self._text % _encode(piece.text)
        if self._chat:
            return b'"delta":%b' % _encode(delta_message(pieces))
        return self._text % _encode(joined_text(pieces, Content))

    def _logprobs_of_delta(self, delta: Delta) -> bytes:
        if not self._logprobs or not delta.ids:
            return b"null"
        return _encode(self._logprobs_of(delta.ids, delta.logprobs, delta.offsets))

    def _logprobs_of(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        if self._chat:
            return chat_logprobs(ids, logprobs, self._token_bytes)
        return completion_logprobs(ids, logprobs, offsets, self._token_bytes)

    def _whole_choice(self, index: int, opening: Opening, deltas: Sequence[Delta]) -> dict[str, Any]:
        end = deltas[-1].end
        assert end is not None, "the last delta of a choice ends it"
        parts = [*([] if opening.echo is None else [opening.echo]), *deltas]
        pieces = [piece for delta in parts for piece in delta.pieces]
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["message"] = whole_message(pieces)
        else:
            choice["text"] = joined_text(pieces, Content)
        choice |= {"logprobs": None, "finish_reason": end.reason, "stop_reason": end.stopped_by}
        if self._logprobs:
            choice["logprobs"] = self._logprobs_of(
                [id_ for delta in parts for id_ in delta.ids],
                [logprob for delta in parts for logprob in delta.logprobs],
                [offset for delta in parts for offset in delta.offsets],
            )
        if self._token_ids:
            choice["token_ids"] = [id_ for delta in deltas for id_ in delta.ids]
            if not self._chat:
                choice["prompt_token_ids"] = opening.prompt_ids
        return choice


def _id_line(delta: Delta) -> bytes:
    ids = delta.ids
    if len(ids) == 1:
        return b"id: %d:%d\n" % (delta.num_told, ids[0])
    return b"id: %d:%b\n" % (delta.num_told, ",".join(map(str, ids)).encode()) if ids else b""


def _usage_member(usage: Usage) -> bytes:
    return b',"usage":%b' % _encode(usage.as_json())


def error_event(error: ApiError) -> bytes:
    """The end of a stream that failed after its first byte; no `DONE` follows, or clients would take it for complete."""
    return b"data: %b\n\n" % error.body()


def model_card(*, model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """A model with the fields that vLLM adds and clients read."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "warmpath",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }


def model_list(cards: Sequence[dict[str, Any]]) -> bytes:
    """``GET /v1/models``."""
    return _encode({"object": "list", "data": cards})
