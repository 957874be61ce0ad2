"""Logprobs in OpenAI's two shapes. Pure.

A token is shown as its text, and beside it as its true bytes: where a character lies across several tokens, each one's text
alone is U+FFFD, and only the bytes tell what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from workers.protocol import TokenLogprob

__all__ = ["TokenBytes", "chat_logprobs", "completion_logprobs"]

TokenBytes = Callable[[int], bytes]

_LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], token_bytes: TokenBytes
) -> dict[str, Any]:
    content = [
        {
            **_chat_token(id_, logprob.logprob, token_bytes),
            "top_logprobs": [_chat_token(other, value, token_bytes) for other, value in logprob.top],
        }
        for id_, logprob in zip(ids, logprobs, strict=True)
        if logprob is not None
    ]
    return {"content": content, "refusal": None}


def _chat_token(id_: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(id_)
    return {"token": _text(data), "logprob": max(logprob, _LEAST), "bytes": list(data)}


def completion_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offsets: Sequence[int], token_bytes: TokenBytes
) -> dict[str, Any]:
    """The first token of a prompt has no logprob: nothing stands before it."""
    pairs = list(zip(ids, logprobs, strict=True))
    return {
        "tokens": [_text(token_bytes(id_)) for id_ in ids],
        "token_logprobs": [None if logprob is None else max(logprob.logprob, _LEAST) for logprob in logprobs],
        "top_logprobs": [None if logprob is None else _top(id_, logprob, token_bytes) for id_, logprob in pairs],
        "text_offset": list(offsets),
    }


def _top(id_: int, logprob: TokenLogprob, token_bytes: TokenBytes) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Of several with one text (parts of characters) the likeliest counts."""
    top: dict[str, float] = {}
    for other, value in (*logprob.top, (id_, logprob.logprob)):
        top.setdefault(_text(token_bytes(other)), max(value, _LEAST))
    return top


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
