"""A stream that is cut after any of its events and resumed on another worker is, joined, the stream that was not cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from router.prompt import TokenizerFiles, load_prompter
from tests.router import tiny_tokenizer as tiny
from tests.streams import events_in, is_usage, resumption_of, told_ids
from tests.workers.scripted_engine import ScriptedEngine
from workers.protocol import EngineInfo
from workers.server import ReplicaApp
from workers.simulated import simulated_info

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CREDENTIAL = "secret"
SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"authorization", f"Bearer {CREDENTIAL}".encode())],
}

FILES = TokenizerFiles.from_hf(tokenizer_json=tiny.byte_level(), config_json=tiny.CONFIG)
PROMPTER = load_prompter(FILES)
(EOS,) = PROMPTER.eos_ids
INFO: EngineInfo = msgspec.structs.replace(
    simulated_info(max_model_len=4096), vocab_size=PROMPTER.max_id + 1, eos_ids=[EOS], precision="int8"
)
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def ids_of(text: str) -> list[int]:
    return PROMPTER.encode_text(text, add_special_tokens=False).tolist()


Worker = Callable[[str, dict[str, Any]], Awaitable[list[str]]]
"""Path and body → the events of the stream."""


@asynccontextmanager
async def worker(engine: ScriptedEngine) -> AsyncIterator[Worker]:
    """Called as a server would call it: a connection for each of a thousand streams takes longer than they do."""

    async def events_of(path: str, body: dict[str, Any]) -> list[str]:
        sent: list[Message] = []
        encoded = msgspec.json.encode({**body, "stream": True})
        incoming: list[Message] = [{"type": "http.request", "body": encoded, "more_body": False}]

        async def receive() -> Message:
            return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            sent.append(message)

        await app({**SCOPE, "path": path}, receive, send)
        text = b"".join(message.get("body", b"") for message in sent).decode()
        assert sent[0]["status"] == 200, text
        return events_in(text)

    with ThreadPoolExecutor(1) as executor:
        app = ReplicaApp(
            engine=engine,
            info=await engine.start(),
            files=FILES,
            prompter=PROMPTER,
            executor=executor,
            credential=CREDENTIAL,
            on_loopback=True,
        )
        yield events_of


SENTENCE = "the quick brown fox jumps over the lazy dog. It's naïve, 日本語, emoji 👩‍🚀 and café; the fox runs."
CALLS = (
    "So.\n"
    '<tool_call>\n{"name": "run", "arguments": {"a": "</tool_call> ü", "b": [1]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
)
THOUGHTS = "<think>\nHm, 日本?\n</think>\n\n"
USAGE = {"stream_options": {"include_usage": True}}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "plain": (CHAT, {}, SENTENCE),
    "usage in every event": (
        CHAT,
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        SENTENCE,
    ),
    "length": (CHAT, {"max_tokens": 17, **USAGE}, SENTENCE),
    "stop string": (CHAT, {"stop": ["over the lazy d", "never"], **USAGE}, SENTENCE),
    "stop string shown": (TEXT, {"stop": ["lazy"], "include_stop_str_in_output": True, "max_tokens": 99}, SENTENCE),
    "held back to the end": (CHAT, {"stop": ["the fox runs. And"], **USAGE}, SENTENCE),
    "stop token": (CHAT, {"stop_token_ids": [ids_of("日")[-1]], **USAGE}, SENTENCE),
    "min_tokens": (CHAT, {"stop": ["o", "over the"], "min_tokens": 21, **USAGE}, SENTENCE),
    "chat logprobs": (CHAT, {"logprobs": True, "top_logprobs": 3, **USAGE}, SENTENCE),
    "text logprobs": (TEXT, {"logprobs": 2, "max_tokens": 99, "stop": ["emoji 👩‍🚀"]}, SENTENCE),
    "echo": (TEXT, {"echo": True, "max_tokens": 12, "return_token_ids": True}, SENTENCE),
    "echo with logprobs": (TEXT, {"echo": True, "logprobs": 1, "max_tokens": 12, **USAGE}, SENTENCE),
    "special tokens shown": (CHAT, {"skip_special_tokens": False, "return_token_ids": True}, "a<|im_start|>b<think>c"),
    "tools": (CHAT, {"tools": [TOOL], **USAGE}, CALLS),
    "one tool": (CHAT, {"tools": [TOOL], "parallel_tool_calls": False}, CALLS),
    "tools with logprobs": (CHAT, {"tools": [TOOL], "logprobs": True, **USAGE}, CALLS),
    "tools cut by length": (CHAT, {"tools": [TOOL], "max_tokens": 45}, CALLS),
    "reasoning": (CHAT, USAGE, THOUGHTS + SENTENCE),
    "reasoning and tools": (CHAT, {"tools": [TOOL], **USAGE}, THOUGHTS + CALLS),
    "reasoning left out": (CHAT, {"include_reasoning": False, "logprobs": True, **USAGE}, THOUGHTS + "so"),
    "json": (CHAT, {"response_format": {"type": "json_object"}, **USAGE}, '{"a": [1, "日本"]}'),
    "forced tool": (CHAT, {"tools": [TOOL], "tool_choice": "required", **USAGE}, CALLS.partition("\n")[2]),
    "penalties": (CHAT, {"frequency_penalty": 1, "logit_bias": {"5": 2}, "min_p": 0.1, **USAGE}, SENTENCE),
    "no text at all": (CHAT, USAGE, ""),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_cut_after_any_event_goes_on_elsewhere_without_a_seam(name: str) -> None:
    path, extra, answer = CASES[name]
    script = [*ids_of(answer), EOS]
    prompt = {"messages": [{"role": "user", "content": "go"}]} if path == CHAT else {"prompt": "the café says"}
    body = {**prompt, **extra, "warmpath": {"seed": 1}}
    async with (
        worker(ScriptedEngine(INFO, lambda _: script)) as first,
        worker(ScriptedEngine(INFO, lambda _: script)) as second,
    ):
        whole = await first(path, body)

        for cut in range(1, len(whole)):
            seen = whole[:cut]
            rest = await second(path, {**body, "warmpath": {"seed": 1, "resume": resumption_of(seen)}})
            # Who resumes after the usage, with nothing but the end missing, has it already.
            assert seen + (rest[1:] if is_usage(seen[-1]) else rest) == whole, f"cut after event {cut}"

    assert whole[-1] == "data: [DONE]"
    assert told_ids(whole) == script[: len(told_ids(whole))]
