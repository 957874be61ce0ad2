"""How the contract tests ask a replica, and what they read of its answers."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

_fresh = count(1000)


def fresh_ids(length: int) -> list[int]:
    """A prompt that no other test has used: ids that are small and mean something to every tokenizer."""
    number = next(_fresh)
    return [300 + (number * 7919 + position * position) % 9000 for position in range(length)]


def chat(content: str = "What is the capital of France?", **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 24,
        "temperature": 0,
        "seed": 7,
        "ignore_eos": True,
        **fields,
    }


def text(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "seed": 7, "ignore_eos": True, **fields}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events in order; the last one is "[DONE]"."""
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        raw = (await answer.aread()).decode()
    assert raw.endswith("\n\n")
    data = [event.partition("data: ")[2] for event in raw[:-2].split("\n\n")]
    return [json.loads(item) if item != "[DONE]" else item for item in data]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
