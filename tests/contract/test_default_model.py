"""The default model, as an application meets it: thirty layers of real weights behind the same API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import httpx
import openai
import pytest

from tests.contract.asking import CHAT, chat, events
from tests.replicas import Replica, in_a_thread, start_default_model
from tests.streams import events_in, resumption_of

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Replica]:
    with in_a_thread(start_default_model) as replica:
        yield replica


@pytest.fixture
async def real(smollm2: Replica) -> AsyncIterator[httpx.AsyncClient]:
    async with smollm2.client() as client:
        client.timeout = httpx.Timeout(120)
        yield client


_salts = count()

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def calls_of(chunks: list[Any]) -> list[dict[str, str]]:
    """Joined by index, as clients do."""
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks[:-1]:
        for piece in chunk["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"name": "", "arguments": "", "id": piece.get("id", "")})
            call["name"] += piece["function"].get("name", "")
            call["arguments"] += piece["function"]["arguments"]
    return [calls[index] for index in sorted(calls)]


async def test_a_forced_call_obeys_its_schema_streamed_or_not(real: httpx.AsyncClient) -> None:
    """47. vllm#10589, #38946, #24509, #49216: streamed arguments that joined were no JSON."""
    body = chat("The weather in Rome, in Celsius?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    body |= {"max_tokens": 60, "ignore_eos": False, "warmpath": {"request_id": "calls"}}

    whole = (await real.post(CHAT, json=body)).json()["choices"][0]
    chunks = await events(real, CHAT, body)

    (call,) = whole["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"city", "unit"}
    assert calls_of(chunks) == [{"id": call["id"], **call["function"]}]
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_function_that_is_named_is_called_and_the_answer_ends_as_any_other(real: httpx.AsyncClient) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = chat("Rome?", tools=[WEATHER], tool_choice=choice, max_tokens=60, ignore_eos=False)

    (answer,) = (await real.post(CHAT, json=body)).json()["choices"]

    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["get_weather"]
    assert answer["finish_reason"] == "stop"


async def test_behind_the_sentence_of_a_grammar_nothing_comes(real: httpx.AsyncClient) -> None:
    body = chat("Yes or no?", structured_outputs={"choice": ["yes", "no"]}, ignore_eos=True, n=2, temperature=1)

    answer = await real.post(CHAT, json=body)

    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["message"]["content"] in ("yes", "no")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


async def test_a_grammar_that_turns_out_too_complex_is_its_clients_fault(real: httpx.AsyncClient) -> None:
    """A 5xx would be held against the replica, and be tried on the others too."""
    regex = "(((((a{1,99}){1,99}){1,99}){1,99}){1,99})"

    answer = await real.post(CHAT, json=chat(structured_outputs={"regex": regex}))

    assert answer.status_code == 400, answer.text
    assert "grammar" in answer.json()["error"]["message"]


async def test_a_format_is_kept_by_the_official_client(smollm2: Replica) -> None:
    number = {"type": "integer", "maximum": 99}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    messages: list[Any] = [{"role": "user", "content": "A number?"}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    async with openai.AsyncOpenAI(base_url=f"{smollm2.base_url}/v1", api_key="any", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=smollm2.model, messages=messages, response_format=form, max_tokens=30, temperature=0, logprobs=True
        )

    (choice,) = answer.choices
    assert choice.message.content is not None
    assert json.loads(choice.message.content)["n"] <= 99
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[-1].token == "<|im_end|>"


@pytest.mark.parametrize(
    "extra",
    [
        {"logprobs": True, "top_logprobs": 2, "temperature": 0.8, "frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}, "ignore_eos": False},
    ],
)
async def test_a_real_stream_goes_on_where_it_broke(real: httpx.AsyncClient, extra: dict[str, Any]) -> None:
    body = chat("Say something with an emoji 👩‍🚀", max_tokens=12, stream=True, **extra)
    body["stream_options"] = {"include_usage": True}

    async def stream(**field: Any) -> list[str]:
        field |= {"seed": 5, "salt": f"resume-{next(_salts)}"}  # so that nothing is in the cache
        answer = await real.post(CHAT, json={**body, "warmpath": field})
        assert answer.status_code == 200, answer.text
        return events_in(answer.text)

    whole = await stream()
    for cut in (len(whole) // 2, len(whole) - 3):
        assert whole[:cut] + await stream(resume=resumption_of(whole[:cut])) == whole


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "string", "pattern": "("},
        {"enum": []},
        {"type": "object", "required": ["a"], "additionalProperties": False},
    ],
)
async def test_a_schema_that_cannot_be_is_a_400_and_harms_nobody(real: httpx.AsyncClient, schema: Any) -> None:
    """49. vllm#17248, #11828, #4070: it ended the API server or the engine."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    answer = await real.post(CHAT, json=chat(response_format=form))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("response_format")
    assert (await real.post(CHAT, json=chat(max_tokens=1))).status_code == 200
