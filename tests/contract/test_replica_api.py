"""What every replica promises over HTTP, whatever computes behind it. No test here knows what the model says."""

import asyncio
import json
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from router.blocks import BLOCK_SIZE, block_names, matchable_blocks, root_name
from router.prompt import TokenizerFiles, load_prompter
from router.wire import Batch, Frame, FrameDecoder, Hello, Load, encode_ids, pack_ids
from tests.contract.asking import CHAT, TEXT, chat, error_of, events, fresh_ids, streamed_text, text
from tests.replicas import Replica


@asynccontextmanager
async def frames(http: httpx.AsyncClient, path: str = "/kv_events") -> AsyncIterator[AsyncIterator[Frame]]:
    """The frames of an event stream or a snapshot; what does not come ends the test."""

    async def decoded(answer: httpx.Response) -> AsyncGenerator[Frame, None]:
        decoder = FrameDecoder()
        async for data in answer.aiter_raw():
            for frame in decoder.feed(data):
                yield frame

    async with asyncio.timeout(30), http.stream("GET", path) as answer:
        assert answer.status_code == 200
        async with aclosing(decoded(answer)) as stream:
            yield stream


async def hello_of(http: httpx.AsyncClient) -> Hello:
    async with frames(http) as stream:
        hello = await anext(stream)
    assert isinstance(hello, Hello)
    return hello


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_chat_is_answered_in_openais_shape(http: httpx.AsyncClient, replica: Replica) -> None:
    answer = await http.post(CHAT, json=chat(model=replica.model))

    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == replica.model
    assert body["system_fingerprint"]
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 24


async def test_a_text_completion_is_answered_in_openais_shape(http: httpx.AsyncClient) -> None:
    body = (await http.post(TEXT, json=text("Once upon a time"))).json()

    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"]
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_text_completion_is_16_tokens_long_by_default(http: httpx.AsyncClient) -> None:
    body = (await http.post(TEXT, json={"prompt": "Once", "ignore_eos": True})).json()

    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text("Once upon a time"))])
async def test_a_streamed_answer_is_the_whole_one_in_pieces(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = (await http.post(path, json=body)).json()

    chunks = await events(http, path, body)

    choice = whole["choices"][0]
    assert streamed_text(chunks) == (choice["message"]["content"] if path == CHAT else choice["text"])
    assert chunks[-1] == "[DONE]"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(chunks) - 2) + ["length"], "exactly one is not null"
    assert len({(c["id"], c["created"], c["object"], c["model"], c["system_fingerprint"]) for c in chunks[:-1]}) == 1


async def test_a_chat_stream_opens_with_the_role(http: httpx.AsyncClient) -> None:
    chunks = await events(http, CHAT, chat())

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_usage_is_streamed_when_asked_for_and_equals_the_whole_answers(http: httpx.AsyncClient) -> None:
    body = chat(content="usage " * 40)
    await http.post(CHAT, json=body)
    whole = (await http.post(CHAT, json=body)).json()

    asked = await events(http, CHAT, {**body, "stream_options": {"include_usage": True}})
    not_asked = await events(http, CHAT, body)

    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"] == whole["usage"]
    assert all("usage" not in chunk for chunk in asked[:-2])
    assert all("usage" not in chunk for chunk in not_asked[:-1])


async def test_the_official_client_reads_both_forms(replica: Replica) -> None:
    async with openai.AsyncOpenAI(base_url=f"{replica.base_url}/v1", api_key="any", max_retries=0) as client:
        models = await client.models.list()
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(
            model=replica.model, messages=messages, max_tokens=8, temperature=0, seed=1
        )
        stream = await client.chat.completions.create(
            model=replica.model, messages=messages, max_tokens=8, temperature=0, seed=1, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert [model.id for model in models.data] == [replica.model]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None


async def test_several_choices_have_texts_of_their_own(http: httpx.AsyncClient) -> None:
    body = chat(n=3, temperature=1, seed=11)

    whole = (await http.post(CHAT, json=body)).json()
    chunks = await events(http, CHAT, body)

    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [streamed_text(chunks, index) for index in range(3)] == texts
    endings = Counter(
        choice["index"] for chunk in chunks[:-1] for choice in chunk["choices"] if choice["finish_reason"] is not None
    )
    assert endings == {0: 1, 1: 1, 2: 1}
    assert whole["usage"]["completion_tokens"] == 3 * 24


async def test_a_prompt_is_counted_once_however_many_choices_it_has(http: httpx.AsyncClient) -> None:
    ids = fresh_ids(40)

    usage = (await http.post(TEXT, json=text(ids, n=3))).json()["usage"]

    assert usage["prompt_tokens"] == 40
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_several_prompts_give_n_choices_each_in_order(http: httpx.AsyncClient) -> None:
    prompts = [fresh_ids(20), fresh_ids(30)]
    body = text(prompts, n=2, temperature=1)

    whole = (await http.post(TEXT, json=body)).json()
    alone = (await http.post(TEXT, json={**body, "prompt": prompts[1]})).json()

    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"][2:]] == [choice["text"] for choice in alone["choices"]]
    assert whole["usage"]["prompt_tokens"] == 50


async def test_every_form_of_the_same_prompt_gives_the_same_answer(http: httpx.AsyncClient) -> None:
    prompt = "Once upon a time there was a fox"
    tokens = (await http.post("/tokenize", json={"prompt": prompt})).json()["tokens"]

    forms: list[Any] = [prompt, [prompt], tokens, [tokens]]
    answers = [(await http.post(TEXT, json=text(form))).json()["choices"] for form in forms]

    assert answers == [answers[0]] * 4


async def test_the_same_seed_gives_the_same_text_and_another_seed_another_one(http: httpx.AsyncClient) -> None:
    async def answer(seed: int) -> str:
        body = chat(temperature=1.5, seed=seed, max_tokens=32)
        content: str = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
        return content

    assert await answer(1) == await answer(1)
    assert await answer(1) != await answer(2)


async def test_without_a_seed_answers_differ(http: httpx.AsyncClient) -> None:
    body = chat(temperature=1.5, seed=None, max_tokens=32)

    contents = [(await http.post(CHAT, json=body)).json()["choices"][0]["message"]["content"] for _ in range(2)]

    assert contents[0] != contents[1]


async def test_a_stop_string_cuts_the_text_and_the_count(http: httpx.AsyncClient) -> None:
    body = text(fresh_ids(20), max_tokens=40)
    full: str = (await http.post(TEXT, json=body)).json()["choices"][0]["text"]
    middle = len(full) // 2
    stop = full[middle : middle + 5]
    before = full[: full.index(stop)]

    whole = (await http.post(TEXT, json={**body, "stop": [stop]})).json()
    chunks = await events(http, TEXT, {**body, "stop": stop, "stream_options": {"include_usage": True}})

    assert whole["choices"][0]["text"] == before
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert 0 < whole["usage"]["completion_tokens"] < 40
    assert streamed_text(chunks) == before
    assert chunks[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_a_stop_token_counts_but_is_not_shown(http: httpx.AsyncClient) -> None:
    body = text("Once upon a time", max_tokens=40)
    full: str = (await http.post(TEXT, json=body)).json()["choices"][0]["text"]
    tokens = (await http.post("/tokenize", json={"prompt": full, "add_special_tokens": False})).json()["tokens"]

    cut = (await http.post(TEXT, json={**body, "stop_token_ids": [tokens[5]]})).json()

    first = tokens.index(tokens[5])
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == first + 1
    assert full.startswith(cut["choices"][0]["text"])


async def test_tools_are_shown_to_the_model(http: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}

    plain = (await http.post(CHAT, json=chat())).json()
    with_tools = await http.post(CHAT, json=chat(tools=[tool], tool_choice="auto"))

    assert with_tools.status_code == 200
    # Templates that know no tools leave them out; none counts fewer tokens for them.
    assert with_tools.json()["usage"]["prompt_tokens"] >= plain["usage"]["prompt_tokens"]


# --- prefix cache ----------------------------------------------------------------------------------------------------


async def test_a_prompt_seen_before_is_served_from_the_cache(http: httpx.AsyncClient) -> None:
    ids = fresh_ids(100)

    first = (await http.post(TEXT, json=text(ids))).json()
    second = (await http.post(TEXT, json=text(ids))).json()

    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": matchable_blocks(100) * BLOCK_SIZE}
    assert second["choices"] == first["choices"]


async def test_the_last_prompt_token_is_never_counted_as_cached(http: httpx.AsyncClient) -> None:
    ids = fresh_ids(4 * BLOCK_SIZE)
    await http.post(TEXT, json=text(ids))

    usage = (await http.post(TEXT, json=text(ids))).json()["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK_SIZE


async def test_salts_do_not_share_a_cache(http: httpx.AsyncClient) -> None:
    ids = fresh_ids(64)

    async def cached_tokens(salt: str) -> int:
        body = text("", warmpath={"prompt_ids": encode_ids(pack_ids(ids)), "salt": salt})
        cached: int = (await http.post(TEXT, json=body)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert await cached_tokens("a") == 0
    assert await cached_tokens("b") == 0
    assert await cached_tokens("a") == 48


# --- what the gateway hands over -------------------------------------------------------------------------------------


async def test_given_ids_are_the_prompt(http: httpx.AsyncClient) -> None:
    body = chat()
    tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
    field = {"prompt_ids": encode_ids(pack_ids(tokens)), "request_id": "gw-1", "seed": 7}

    rendered = (await http.post(CHAT, json=body)).json()
    given = await http.post(CHAT, json={**body, "messages": "not looked at", "seed": None, "warmpath": field})

    assert given.status_code == 200
    assert given.json()["choices"] == rendered["choices"]
    assert given.json()["id"] == "chatcmpl-gw-1"
    assert given.headers["x-request-id"] == "gw-1"


@pytest.mark.parametrize("ids", ["!", "AAA", "AAAA", encode_ids(pack_ids(range(1, 3)))[:-2]])
async def test_broken_ids_are_a_400(http: httpx.AsyncClient, ids: str) -> None:
    answer = await http.post(CHAT, json=chat(warmpath={"prompt_ids": ids}))

    assert answer.status_code == 400
    assert error_of(answer)["param"] == "warmpath.prompt_ids"


async def test_the_gateways_field_is_unknown_to_everybody_else(stranger: httpx.AsyncClient) -> None:
    answer = await stranger.post(CHAT, json=chat(warmpath={"salt": "x"}))

    assert answer.status_code == 400
    assert error_of(answer)["code"] == "unknown_parameter"
    assert error_of(answer)["param"] == "warmpath"


@pytest.mark.parametrize("path", ["/kv_events", "/kv_snapshot", "/tokenizer"])
@pytest.mark.parametrize("shown", [None, "Bearer wrong", "Bearer é", "Basic eA==", "Bearer"])
async def test_what_is_for_gateways_needs_the_credential(
    stranger: httpx.AsyncClient, path: str, shown: str | None
) -> None:
    headers = [] if shown is None else [(b"authorization", shown.encode())]

    answer = await stranger.get(path, headers=headers)

    assert answer.status_code == 401
    assert error_of(answer)["type"] == "authentication_error"


async def test_two_credentials_are_none(stranger: httpx.AsyncClient, replica: Replica) -> None:
    right = ("authorization", f"Bearer {replica.credential}")

    answer = await stranger.get("/tokenizer", headers=[right, ("authorization", "Bearer x")])

    assert answer.status_code == 401


async def test_whoever_is_on_this_machine_may_generate(stranger: httpx.AsyncClient) -> None:
    answer = await stranger.post(CHAT, json=chat(), headers={"authorization": "Bearer sk-anything"})

    assert answer.status_code == 200


# --- bad input -------------------------------------------------------------------------------------------------------


async def test_another_model_is_not_found(http: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, chat(model="nope")), (TEXT, text("x", model="nope"))):
        answer = await http.post(path, json=body)

        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"
        assert error_of(answer)["param"] == "model"


async def test_malformed_json_is_a_400(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, content=b"{", headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert error_of(answer)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "headers",
    [{}, {"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}],
)
async def test_a_body_that_is_not_announced_as_json_is_a_415(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await http.post(CHAT, content=json.dumps(chat()).encode(), headers=headers)

    assert answer.status_code == 415
    error_of(answer)


async def test_a_content_type_may_have_parameters(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}

    answer = await http.post(CHAT, content=json.dumps(chat()).encode(), headers=headers)

    assert answer.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(http: httpx.AsyncClient, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 20)

    content = pieces() if chunked else b" " * (17 << 20)

    answer = await http.post(CHAT, content=content, headers={"content-type": "application/json"})

    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/chat/completions/", "/v1/embeddings", "/docs", "/%2e%2e/x"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_route_is_a_404(http: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await http.request(method, path)

    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, "POST"), ("DELETE", TEXT, "POST"), ("POST", "/health", "GET"), ("PUT", "/tokenize", "POST")],
)
async def test_a_wrong_method_is_a_405(http: httpx.AsyncClient, method: str, path: str, allowed: str) -> None:
    answer = await http.request(method, path)

    assert answer.status_code == 405
    assert allowed in answer.headers["allow"]
    assert error_of(answer)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"n": True}, "invalid_type"),
        ({"stop": [""]}, "invalid_value"),
        ({"bad_words": ["x"]}, "unsupported_parameter"),
        ({"cache_salt": "x"}, "unknown_parameter"),
        ({"messages": []}, "invalid_type"),
        ({"messages": [{"role": "x", "content": ""}]}, "invalid_value"),
        ({"stop_token_ids": [0xFFFFFFFF + 1]}, "invalid_type"),
        ({"stream_options": {}}, "invalid_value"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(http: httpx.AsyncClient, change: dict[str, Any], code: str) -> None:
    answer = await http.post(CHAT, json=chat(**change))

    assert answer.status_code == 400
    error = error_of(answer)
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(next(iter(change)))


async def test_the_context_is_filled_to_the_last_token_and_not_beyond(
    http: httpx.AsyncClient, replica: Replica
) -> None:
    room = replica.max_model_len
    exactly = fresh_ids(room)

    async def status(prompt_tokens: int, max_tokens: int | None) -> tuple[int, Any]:
        answer = await http.post(TEXT, json=text(exactly[:prompt_tokens], max_tokens=max_tokens))
        if answer.status_code == 200:
            return 200, answer.json()["usage"]["completion_tokens"]
        return answer.status_code, error_of(answer)["code"]

    assert await status(room, None) == (400, "context_length_exceeded")
    assert await status(room, 1) == (400, "context_length_exceeded")
    assert await status(room - 1, 2) == (400, "context_length_exceeded")
    assert await status(room - 1, 1) == (200, 1)
    assert await status(room - 1, None) == (200, 1)
    assert await status(100, 10**12) == (400, "context_length_exceeded")


async def test_a_stream_that_cannot_begin_has_a_true_status(http: httpx.AsyncClient, replica: Replica) -> None:
    answer = await http.post(TEXT, json=text(fresh_ids(replica.max_model_len), stream=True))

    assert answer.status_code == 400
    assert error_of(answer)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("given", "kept"), [("abc-1_X", True), ("bad id", False), ("x" * 129, False), ("", False)])
async def test_a_sane_request_id_is_echoed_and_any_other_replaced(
    http: httpx.AsyncClient, given: str, kept: bool
) -> None:
    for answer in (
        await http.get("/health", headers={"x-request-id": given}),
        await http.post(CHAT, json=chat(max_tokens=1), headers={"x-request-id": given}),
        await http.post(CHAT, json={}, headers={"x-request-id": given}),
        await http.get("/nowhere", headers={"x-request-id": given}),
    ):
        echoed = answer.headers["x-request-id"]
        assert echoed == given if kept else echoed.startswith("req-")


# --- models, tokenizer, metrics, health ------------------------------------------------------------------------------


async def test_the_model_is_listed_with_its_context(http: httpx.AsyncClient, replica: Replica) -> None:
    listed = (await http.get("/v1/models")).json()
    shown = (await http.get(f"/v1/models/{replica.model}")).json()

    assert listed == {"object": "list", "data": [shown]}
    assert shown["id"] == replica.model
    assert shown["max_model_len"] == replica.max_model_len
    assert (await http.get("/v1/models/nope")).status_code == 404


async def test_tokens_become_the_text_again(http: httpx.AsyncClient) -> None:
    prompt = "Grüße, 世界! " * 2000

    tokens = (await http.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False})).json()
    text_again = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()

    assert tokens["count"] == len(tokens["tokens"])
    assert text_again == {"prompt": prompt}


async def test_tokens_are_told_as_text_where_that_is_asked_for(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "one two", "add_special_tokens": False}

    plain = (await http.post("/tokenize", json=asked)).json()
    told = (await http.post("/tokenize", json={**asked, "return_token_strs": True})).json()

    assert "".join(told.pop("token_strs")) == "one two"
    assert told == plain


async def test_no_request_is_so_large_that_it_could_never_be_queued(http: httpx.AsyncClient) -> None:
    prompts = [[300 + number] for number in range(64)]

    most = await http.post(TEXT, json=text(prompts, n=2, max_tokens=1))
    more = await http.post(TEXT, json=text(prompts, n=3, max_tokens=1))

    assert most.status_code == 200
    assert [choice["index"] for choice in most.json()["choices"]] == list(range(128))
    assert more.status_code == 400, "a 503 would be an invitation to come again"
    assert error_of(more)["param"] == "n"


@pytest.mark.parametrize("ids", [[1, 1 << 32], [-1], [True], [1.0], "1"])
async def test_what_is_no_token_has_no_text(http: httpx.AsyncClient, ids: Any) -> None:
    answer = await http.post("/detokenize", json={"tokens": ids})

    assert answer.status_code == 400
    assert error_of(answer)["param"].startswith("tokens")


async def test_a_gateway_can_load_the_replicas_tokenizer(http: httpx.AsyncClient) -> None:
    body = (await http.get("/tokenizer")).json()
    digest = body.pop("digest")
    prompter = load_prompter(TokenizerFiles(**body))

    hello = await hello_of(http)
    tokens = (await http.post("/tokenize", json={"prompt": "hello there"})).json()["tokens"]

    assert prompter.digest == digest == hello.tokenizer_digest
    assert prompter.encode_text("hello there") == array("I", tokens)


async def test_a_working_replica_is_healthy(stranger: httpx.AsyncClient) -> None:
    assert (await stranger.get("/health")).status_code == 200


async def test_metrics_carry_vllms_names(
    http: httpx.AsyncClient, stranger: httpx.AsyncClient, replica: Replica
) -> None:
    await http.post(CHAT, json=chat())

    answer = await stranger.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    label = f'model_name="{replica.model}"'
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
        *("generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count"),
        *("e2e_request_latency_seconds_sum", "cache_config_info", "num_preemptions_total"),
    ):
        assert any(line.startswith(f"vllm:{name}{{") and label in line for line in lines), name
    finished = next(line for line in lines if line.startswith("vllm:request_success_total{") and '"length"' in line)
    assert float(finished.rpartition(" ")[2]) > 0


# --- events ----------------------------------------------------------------------------------------------------------


async def test_events_name_the_blocks_of_a_prompt(http: httpx.AsyncClient, replica: Replica) -> None:
    ids = fresh_ids(100)
    names = block_names(pack_ids(ids), root_name(model=replica.model, salt="s"))
    body = text("", warmpath={"prompt_ids": encode_ids(pack_ids(ids)), "salt": "s", "request_id": "named"})
    stored: set[int] = set()
    admitted: list[str] = []
    seqs: list[int] = []

    async with frames(http) as stream:
        hello = await anext(stream)
        await http.post(TEXT, json=body)
        async for frame in stream:
            if isinstance(frame, Batch):
                seqs.append(frame.seq)
                stored.update(name for run in frame.stored for name in run.names)
            elif isinstance(frame, Load):
                admitted += frame.admitted
            if stored.issuperset(names) and "named" in admitted:
                break

    assert isinstance(hello, Hello)
    assert hello.model == replica.model
    assert hello.block_size == BLOCK_SIZE
    assert hello.seq <= seqs[-1]
    assert seqs == list(range(1, len(seqs) + 1)), "a stream without `after` begins at the beginning"


async def test_a_resumed_stream_goes_on_where_it_was_left(http: httpx.AsyncClient) -> None:
    await http.post(TEXT, json=text(fresh_ids(64)))
    left = await hello_of(http)
    await http.post(TEXT, json=text(fresh_ids(64)))

    async with frames(http, f"/kv_events?epoch={left.epoch}&after={left.seq}") as stream:
        hello, first = await anext(stream), await anext(stream)

    assert isinstance(hello, Hello)
    assert isinstance(first, Batch)
    assert first.seq == left.seq + 1


async def test_a_stream_of_another_epoch_starts_anew(http: httpx.AsyncClient) -> None:
    await http.post(TEXT, json=text(fresh_ids(64)))

    async with frames(http, "/kv_events?epoch=another&after=1000000") as stream:
        hello, first = await anext(stream), await anext(stream)

    assert isinstance(hello, Hello)
    assert hello.epoch != "another"
    assert isinstance(first, Batch)
    assert first.seq == 1


async def test_a_point_that_never_was_is_gone(http: httpx.AsyncClient) -> None:
    answer = await http.get("/kv_events?after=1000000000")

    assert answer.status_code == 410
    error_of(answer)


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9" * 30])
async def test_a_malformed_point_is_a_400(http: httpx.AsyncClient, after: str) -> None:
    answer = await http.get("/kv_events", params={"after": after})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == "after"


async def test_a_snapshot_is_what_the_events_add_up_to(http: httpx.AsyncClient) -> None:
    await http.post(TEXT, json=text(fresh_ids(80)))

    async with frames(http, "/kv_snapshot") as stream:
        hello, *batches, load = [frame async for frame in stream]

    assert isinstance(hello, Hello)
    assert isinstance(load, Load)
    assert load.seq == hello.seq
    held: set[int] = set()
    for batch in batches:
        assert isinstance(batch, Batch)
        assert batch.seq == hello.seq
        assert not batch.removed
        held.update(name for run in batch.stored for name in run.names)
    assert held == await added_up(http, hello.seq)


async def added_up(http: httpx.AsyncClient, seq: int) -> set[int]:
    held: set[int] = set()
    async with frames(http) as stream:
        async for frame in stream:
            if isinstance(frame, Batch):
                held.difference_update(frame.removed)
                held.update(name for run in frame.stored for name in run.names)
                if frame.seq == seq:
                    break
    return held


async def test_a_load_comes_every_second_even_when_nothing_happens(http: httpx.AsyncClient) -> None:
    loads = 0
    async with asyncio.timeout(3.5), frames(http) as stream:
        async for frame in stream:
            loads += isinstance(frame, Load)
            if loads == 3:
                break


# --- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generation(
    http: httpx.AsyncClient, replica: Replica, stream: bool
) -> None:
    async def running() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        )

    async def wait_until_running(expected: bool) -> None:
        async with asyncio.timeout(30):
            while bool(await running()) != expected:  # noqa: ASYNC110 - the replica tells it only when asked
                await asyncio.sleep(0.01)

    body = text(fresh_ids(20), max_tokens=replica.max_model_len - 20, stream=stream)
    async with replica.client() as leaver:
        task = asyncio.create_task(leaver.post(TEXT, json=body))
        await wait_until_running(True)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await wait_until_running(False)
