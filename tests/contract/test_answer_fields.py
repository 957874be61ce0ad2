"""What each field of a request does to its answer, whatever computes behind it. Tests with a number are public reports of other
servers, put to ours as black boxes.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.contract.asking import CHAT, TEXT, chat, error_of, events, fresh_ids, streamed_text, text
from tests.replicas import Replica

TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}}},
}


async def answer(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def choice_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    return (await answer(http, path, body))["choices"][0]


# --- logprobs --------------------------------------------------------------------------------------------------------


async def test_a_chats_logprobs_are_text_with_its_true_bytes(http: httpx.AsyncClient) -> None:
    """7. vllm#19177: byte-level vocabulary strings where the text should be."""
    choice = await choice_of(http, CHAT, chat(logprobs=True, top_logprobs=3, max_tokens=8))

    content = choice["logprobs"]["content"]
    assert len(content) == 8
    assert (
        bytes(byte for each in content for byte in each["bytes"]).decode(errors="replace")
        == choice["message"]["content"]
    )
    for each in content:
        assert each["token"] == bytes(each["bytes"]).decode(errors="replace")
        assert -9999 <= each["logprob"] <= 0
        assert [top["logprob"] for top in each["top_logprobs"]] == sorted(
            (top["logprob"] for top in each["top_logprobs"]), reverse=True
        )
        assert len(each["top_logprobs"]) <= 3
        assert each["top_logprobs"][0]["logprob"] >= each["logprob"]


async def test_without_top_logprobs_only_the_chosen_ones_are_told(http: httpx.AsyncClient) -> None:
    content = (await choice_of(http, CHAT, chat(logprobs=True, max_tokens=3)))["logprobs"]["content"]

    assert [each["top_logprobs"] for each in content] == [[]] * 3


async def test_a_completions_logprobs_stand_in_columns_along_the_text(http: httpx.AsyncClient) -> None:
    choice = await choice_of(http, TEXT, text("Once upon a time", logprobs=2, max_tokens=6))

    told = choice["logprobs"]
    assert {len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {6}
    assert told["text_offset"][0] == 0
    assert told["text_offset"] == sorted(told["text_offset"])
    assert all(1 <= len(top) <= 3 for top in told["top_logprobs"])
    assert all(token in top for token, top in zip(told["tokens"], told["top_logprobs"], strict=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(logprobs=True, top_logprobs=2, max_tokens=6)),
        (TEXT, text("Once upon", logprobs=2, max_tokens=6, echo=True)),
    ],
)
async def test_streamed_logprobs_joined_are_the_whole_ones(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = (await choice_of(http, path, body))["logprobs"]

    chunks = await events(http, path, body)

    told = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1] if chunk["choices"][0]["logprobs"]]
    columns = ["content"] if path == CHAT else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    for column in columns:
        assert [item for each in told for item in each[column]] == whole[column]


async def test_logprobs_do_not_depend_on_what_else_is_asked_for(http: httpx.AsyncClient) -> None:
    body = text("Once upon a time", max_tokens=6)

    one, many = [(await choice_of(http, TEXT, {**body, "logprobs": num}))["logprobs"] for num in (0, 5)]

    assert (one["tokens"], one["token_logprobs"]) == (many["tokens"], many["token_logprobs"])


@pytest.mark.parametrize("value", [True, "5", [1], 2.5, 21, -1])
async def test_logprobs_that_are_no_number_are_a_400(http: httpx.AsyncClient, value: Any) -> None:
    reply = await http.post(TEXT, json=text("x", logprobs=value))

    assert reply.status_code == 400
    assert error_of(reply)["param"] == "logprobs"


# --- text ----------------------------------------------------------------------------------------------------------


async def test_of_a_prompt_that_ends_within_a_character_nothing_leaks(http: httpx.AsyncClient) -> None:
    """1. vllm#48853: the whole prompt came with the first delta."""
    ids = (await http.post("/tokenize", json={"prompt": "Zebra zebra 👩‍🚀"})).json()["tokens"][:-1]

    whole, chunks = (
        await choice_of(http, TEXT, text(ids, max_tokens=6)),
        await events(http, TEXT, text(ids, max_tokens=6)),
    )

    assert streamed_text(chunks) == whole["text"]
    assert "zebra" not in whole["text"].lower()


async def test_streamed_text_is_that_of_all_ids_at_once(http: httpx.AsyncClient) -> None:
    """5. vllm#984: words were glued where tokens met."""
    body = text("Once upon a time", max_tokens=16, return_token_ids=True, skip_special_tokens=False)
    whole, chunks = await choice_of(http, TEXT, body), await events(http, TEXT, body)

    decoded = (await http.post("/detokenize", json={"tokens": whole["token_ids"]})).json()["prompt"]

    assert streamed_text(chunks) == whole["text"] == decoded


# --- echo ------------------------------------------------------------------------------------------------------------


async def test_an_echo_is_the_prompt_and_then_the_answer(http: httpx.AsyncClient) -> None:
    plain = await choice_of(http, TEXT, text("Once upon a time", max_tokens=5))
    body = text("Once upon a time", max_tokens=5, echo=True)

    echoed, chunks = await choice_of(http, TEXT, body), await events(http, TEXT, body)

    assert echoed["text"] == "Once upon a time" + plain["text"]
    assert chunks[0]["choices"][0]["text"] == "Once upon a time", "the first chunk is the prompt"
    assert streamed_text(chunks) == echoed["text"]


async def test_an_echo_with_logprobs_tells_those_of_the_prompt(http: httpx.AsyncClient) -> None:
    body = text("Once upon a time", max_tokens=5, echo=True, logprobs=1)
    tokens = (await http.post("/tokenize", json={"prompt": "Once upon a time"})).json()["count"]

    first = await choice_of(http, TEXT, body)
    again = await choice_of(http, TEXT, body)

    told = first["logprobs"]
    assert len(told["tokens"]) == tokens + 5
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert all(logprob is not None and logprob <= 0 for logprob in told["token_logprobs"][1:])
    assert "".join(told["tokens"]).startswith("Once upon a time")
    assert first == again, "a prompt in the cache has logprobs too"


async def test_an_echo_may_be_all_that_is_wanted(http: httpx.AsyncClient, replica: Replica) -> None:
    ids = fresh_ids(40)
    bodies = [text(ids, max_tokens=0, echo=True), text(ids, max_tokens=0, echo=True, logprobs=0)]

    alone, scored = [await answer(http, TEXT, body) for body in bodies]
    chunks = await events(http, TEXT, bodies[1])

    assert alone["choices"][0]["text"] == scored["choices"][0]["text"] == streamed_text(chunks)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 40
    for each in (alone, scored):
        assert each["choices"][0]["finish_reason"] == "length"
        assert (each["usage"]["prompt_tokens"], each["usage"]["completion_tokens"]) == (40, 0)


# --- where an answer ends --------------------------------------------------------------------------------------------


async def full_text(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    shown: str = (await choice_of(http, TEXT, body))["text"]
    return shown


async def test_no_part_of_a_stop_string_is_streamed(http: httpx.AsyncClient) -> None:
    """9. vllm#2577: parts of the stop string were. 11. smg#1524: one that spans tokens was missed."""
    body = text(fresh_ids(30), max_tokens=24)
    full = await full_text(http, body)
    stop = full[len(full) // 3 : len(full) // 3 + 11]
    before = full[: full.index(stop)]

    chunks = await events(http, TEXT, {**body, "stop": [stop]})

    assert streamed_text(chunks) == before
    assert chunks[-2]["choices"][0]["stop_reason"] == stop


async def test_a_stop_string_can_be_shown(http: httpx.AsyncClient) -> None:
    body = text(fresh_ids(30), max_tokens=24)
    full = await full_text(http, body)
    stop = full[10:15]
    body |= {"stop": stop, "include_stop_str_in_output": True}

    choice, chunks = await choice_of(http, TEXT, body), await events(http, TEXT, body)

    assert choice["text"] == full[: full.index(stop) + len(stop)] == streamed_text(chunks)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_before_min_tokens_nothing_ends_an_answer(http: httpx.AsyncClient) -> None:
    body = text(fresh_ids(30), max_tokens=24)
    full = await full_text(http, body)

    cut = await answer(http, TEXT, {**body, "stop": [full[2:4], full[1:2]]})
    kept = await answer(http, TEXT, {**body, "stop": [full[2:4], full[1:2]], "min_tokens": 12})

    assert cut["usage"]["completion_tokens"] < 12
    assert kept["usage"]["completion_tokens"] > 12
    assert full.startswith(kept["choices"][0]["text"])


async def test_a_stop_token_is_the_reason_and_a_limit_is_none(http: httpx.AsyncClient) -> None:
    """13. sglang#4550, llama.cpp#7198: finish_reason was null, or always stop."""
    body = text(fresh_ids(30), max_tokens=24, return_token_ids=True)
    ids = (await choice_of(http, TEXT, body))["token_ids"]

    by_token = await choice_of(http, TEXT, {**body, "stop_token_ids": [ids[5]]})
    by_length = await choice_of(http, TEXT, body)

    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", ids[5])
    assert by_token["token_ids"] == ids[: ids.index(ids[5]) + 1]
    assert (by_length["finish_reason"], by_length["stop_reason"]) == ("length", None)


async def test_of_each_choice_exactly_one_event_ends_it(http: httpx.AsyncClient) -> None:
    """13 as well, and 43. fmperf#13: empty chunks while a long prompt was computed."""
    chunks = await events(http, CHAT, chat(content="long " * 1500, n=2, temperature=1, max_tokens=6))

    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"] is not None) == [0, 1]
    opened: set[int] = set()
    for choice in choices:
        delta = choice["delta"]
        assert delta.get("content") or choice["finish_reason"] or (delta.get("role") and choice["index"] not in opened)
        opened.add(choice["index"])


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
async def test_an_empty_prompt_is_a_400_and_harms_nobody(http: httpx.AsyncClient, prompt: Any) -> None:
    """15. vllm#7632, #7283, #1130: the engine was dead for everyone."""
    reply = await http.post(TEXT, json=text(prompt))

    assert (reply.status_code, error_of(reply)["param"]) == (400, "prompt")
    assert (await http.post(TEXT, json=text("x", max_tokens=1))).status_code == 200


@pytest.mark.parametrize(("missing", "status"), [(0, 400), (-1, 400), (1, 200)])
async def test_a_prompt_as_long_as_the_context(
    http: httpx.AsyncClient, replica: Replica, missing: int, status: int
) -> None:
    """17. mini-sglang hung for ever."""
    reply = await http.post(TEXT, json=text(fresh_ids(replica.max_model_len - missing), max_tokens=1))

    assert reply.status_code == status


@pytest.mark.parametrize("bias", [{"4294967296": 1}, {"-1": 1}, {"x": 1}, {"5": 1000}, {"5": None}])
async def test_a_bias_that_cannot_be_is_a_400(http: httpx.AsyncClient, bias: Any) -> None:
    """19. vllm#16529, #6866: an id beyond the vocabulary ended the engine."""
    reply = await http.post(CHAT, json=chat(logit_bias=bias))

    assert reply.status_code == 400
    assert str(error_of(reply)["param"]).startswith("logit_bias")


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [1 << 70], [1, -(1 << 63)], [True], [None]])
async def test_ids_that_are_none_are_a_400(http: httpx.AsyncClient, ids: list[Any]) -> None:
    """21. vllm#9634, #26797: huge or negative ids were a crash."""
    reply = await http.post(TEXT, json=text(ids))

    assert reply.status_code == 400
    assert str(error_of(reply)["param"]).startswith("prompt")


async def test_a_template_that_cannot_render_is_a_400(http: httpx.AsyncClient) -> None:
    """23. vllm#17119: a 500."""
    reply = await http.post(CHAT, json=chat(messages=[{"role": "assistant", "content": ""}], continue_final_message=5))
    both = await http.post(CHAT, json=chat(continue_final_message=True, add_generation_prompt=True))
    reserved = await http.post(CHAT, json=chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}))

    assert [each.status_code for each in (reply, both, reserved)] == [400, 400, 400]
    assert error_of(both)["param"] == "continue_final_message"


async def test_more_tokens_than_there_may_be_are_a_400(http: httpx.AsyncClient) -> None:
    for min_tokens in (25, 1 << 60):
        reply = await http.post(CHAT, json=chat(min_tokens=min_tokens))

        assert (reply.status_code, error_of(reply)["param"]) == (400, "min_tokens")


@pytest.mark.parametrize("depth", [50, 300, 900, 1100, 5000])
async def test_a_body_nested_to_any_depth_is_answered_or_refused(http: httpx.AsyncClient, depth: int) -> None:
    """49, in part: 10,000 levels took servers down. Templates print what they are given, so what passes must not break them."""
    deep = '{"a":' * depth + "1" + "}" * depth
    for field in (
        f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}]',
        f'"chat_template_kwargs":{{"x":{deep}}}',
        f'"unknown":{deep}',
        f'"response_format":{{"type":"json_schema","json_schema":{{"schema":{deep}}}}}',
        f'"messages":[{{"role":"user","content":"x","extra":{deep}}}]',
    ):
        content = f'{{"messages":[{{"role":"user","content":"x"}}],"max_tokens":1,{field}}}'

        reply = await http.post(CHAT, content=content, headers={"content-type": "application/json"})

        assert reply.status_code in (200, 400), field[:40]


# --- ids, usage, tools -----------------------------------------------------------------------------------------------


async def test_a_stream_of_one_choice_tells_its_ids(http: httpx.AsyncClient) -> None:
    body = chat(max_tokens=10, return_token_ids=True, stream=True)

    raw = (await http.post(CHAT, json=body)).text
    whole = await choice_of(http, CHAT, {**body, "stream": False})
    several = (await http.post(CHAT, json={**body, "n": 2})).text

    told = [line.removeprefix("id: ").partition(":") for line in raw.split("\n") if line.startswith("id: ")]
    ids = [int(id_) for _, _, ids in told for id_ in ids.split(",")]
    assert ids == whole["token_ids"]
    assert [int(number) for number, _, _ in told] == [
        sum(len(ids.split(",")) for _, _, ids in told[:place]) for place in range(len(told))
    ]
    assert "\nid:" not in several
    assert not several.startswith("id:")


async def test_every_chunk_can_tell_the_usage_so_far(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = await events(http, CHAT, chat(max_tokens=6, stream_options=options))

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts[0] <= 1
    assert counts[-2:] == [6, 6]
    assert counts == sorted(counts)
    assert chunks[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_tools_that_are_not_called_leave_an_answer_as_it_is(http: httpx.AsyncClient) -> None:
    body = chat(tools=[TOOL], max_tokens=12)

    whole, chunks = await choice_of(http, CHAT, body), await events(http, CHAT, body)

    assert "tool_calls" not in whole["message"]
    assert streamed_text(chunks) == whole["message"]["content"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ],
)
async def test_tools_and_formats_that_cannot_be_are_a_400(
    http: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    reply = await http.post(CHAT, json=chat(**change))

    assert reply.status_code == 400
    assert str(error_of(reply)["param"]).startswith(param)


async def test_penalties_and_cuts_are_taken(http: httpx.AsyncClient) -> None:
    body = chat(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"300": -100},
        max_tokens=6,
    )

    first, second = [await choice_of(http, CHAT, body) for _ in range(2)]

    assert first == second


async def test_extras_of_openais_clients_change_nothing(http: httpx.AsyncClient) -> None:
    extras = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "verbosity": "low"}
    nulls = dict.fromkeys(["tools", "response_format", "logit_bias", "stop", "n", "stream_options", "logprobs"])

    plain = await choice_of(http, CHAT, chat(max_tokens=4))
    same = await choice_of(http, CHAT, json.loads(json.dumps(chat(max_tokens=4) | extras | nulls)))

    assert plain == same
