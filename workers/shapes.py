"""What a replica answers, in OpenAI's shapes: whole objects and server-sent events. Pure: values in, bytes out.

A chunk is the unit of cost in a long answer, so it is put together from bytes that are fixed for the answer; only its
text is encoded. Every chunk of an answer has the same id and created.

The chunks before the last leave `usage` out: OpenAI writes null there, and every client reads the two alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from workers.api_error import ApiError

__all__ = ["DONE", "FinishedChoice", "Shape", "Usage", "error_event", "model_card", "model_list"]

DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    """Of all choices, end and stop tokens included."""
    cached_tokens: int
    """Prompt tokens that were not computed again. 0 is said as 0: absent would mean unknown."""

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class Shape:
    """Writes one answer, whole or in chunks: a chat completion or a text completion."""

    def __init__(self, *, chat: bool, request_id: str, created: int, model: str, fingerprint: str) -> None:
        self._chat = chat
        self._object = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        chunk = {"object": "chat.completion.chunk" if chat else "text_completion", **self._head}
        self._chunk = b'data: %b,"choices":[' % _encode(chunk)[:-1]
        self._text = b'"delta":{"content":%b}' if chat else b'"text":%b'
        self._nothing = b'"delta":{}' if chat else b'"text":""'

    def opening(self, index: int) -> bytes:
        """The event that opens a choice, sent with its first token; b'' where the kind has none."""
        return self._choice(index, b'"delta":{"role":"assistant","content":""}', b"null") if self._chat else b""

    def text(self, index: int, text: str) -> bytes:
        return self._choice(index, self._text % _encode(text), b"null")

    def finish(self, index: int, reason: str) -> bytes:
        return self._choice(index, self._nothing, b'"%b"' % reason.encode())

    def usage(self, usage: Usage) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._chunk, _encode(usage.as_json()))

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return _encode(
            {
                "object": self._object,
                **self._head,
                "choices": [self._whole_choice(choice) for choice in choices],
                "usage": usage.as_json(),
            }
        )

    def _choice(self, index: int, content: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (self._chunk, index, content, reason)

    def _whole_choice(self, choice: FinishedChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        content: dict[str, Any] = {"message": message} if self._chat else {"text": choice.text}
        return {"index": choice.index, **content, "logprobs": None, "finish_reason": choice.finish_reason}


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
