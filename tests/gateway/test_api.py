"""What a gateway in front of foreign replicas answers besides completions: models, embeddings, responses, tokens, headers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.limits import Quota
from tests.gateway.stub import (
    MODEL,
    STREAM_HEAD,
    Answer,
    Running,
    chunked,
    dies,
    gateway,
    hangs,
    response,
    says,
    streams,
    stub,
    writes,
)
from tests.gateway.test_response_events import COMPLETED, CREATED, DELTAS, STREAM

RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": MODEL,
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hi", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    },
}
EMBEDDINGS = {
    "object": "list",
    "model": MODEL,
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.25]}],
    "usage": {"prompt_tokens": 5, "total_tokens": 5},
}


def gives(body: Any, status: int = 200) -> Answer:
    return writes(response(status, json.dumps(body).encode()))


async def post(running: Running, path: str, **fields: Any) -> httpx.Response:
    return await running.client.post(path, json={"model": MODEL, **fields}, headers=running.auth)


async def call(running: Running, method: str, path: str) -> httpx.Response:
    return await running.client.request(method, path, headers=running.auth)


def sdk(running: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.client.base_url}/v1", api_key=running.key, max_retries=0)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


async def metric(running: Running, name: str) -> float:
    text = (await running.admin.get("/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


# --- models


async def test_models_are_shown_with_what_their_replicas_say_of_them(tmp_path: Path) -> None:
    model = "org/name/with-slashes"
    async with stub(says("hi"), [model]) as one, stub(says("hi"), [model]) as two:
        one.card = {"max_model_len": 8192, "root": "org/base", "parent": None}
        two.card = {"max_model_len": 4096, "root": "org/base", "parent": None}
        async with gateway(tmp_path, one, two) as running:
            listed = (await call(running, "GET", "/v1/models")).json()
            shown = (await call(running, "GET", f"/v1/models/{model}")).json()
            escaped = (await call(running, "GET", f"/v1/models/{model.replace('/', '%2F')}")).json()
            missing = await call(running, "GET", "/v1/models/org/name")

    assert listed == {"object": "list", "data": [shown]}
    assert shown == escaped
    assert {**shown, "created": 0} == {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "warmpath",
        "root": "org/base",
        "parent": None,
        "max_model_len": 4096,
    }
    assert code_of(missing) == (404, "model_not_found")


# --- embeddings


async def test_embeddings_pass_byte_for_byte_and_are_counted(tmp_path: Path) -> None:
    body = response(200, json.dumps(EMBEDDINGS, indent=1).encode())
    async with stub(writes(body)) as replica, gateway(tmp_path, replica) as running:
        answer = await post(running, "/v1/embeddings", input=["a", "b"], dimensions=2, weird={"kept": 1})

        assert answer.content == json.dumps(EMBEDDINGS, indent=1).encode()
        assert replica.seen[0].path == "/v1/embeddings"
        assert replica.seen[0].json == {"model": MODEL, "input": ["a", "b"], "dimensions": 2, "weird": {"kept": 1}}
        assert await metric(running, "warmpath_prompt_tokens_total") == 5
        assert await metric(running, "warmpath_time_to_first_token_seconds_count") == 0


async def test_the_official_client_gets_embeddings(tmp_path: Path) -> None:
    async with stub(gives(EMBEDDINGS)) as replica, gateway(tmp_path, replica) as running, sdk(running) as client:
        answer = await client.embeddings.create(model=MODEL, input="x", encoding_format="float")

    assert answer.data[0].embedding == [0.5, -1.25]
    assert answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("fields", [{}, {"input": None}])
async def test_embeddings_of_nothing_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with stub(gives(EMBEDDINGS)) as replica, gateway(tmp_path, replica) as running:
        answer = await post(running, "/v1/embeddings", **fields)

        assert code_of(answer) == (400, "missing_required_parameter")
        assert replica.seen == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    "lack",
    [
        gives({"detail": "Not Found"}, 404),
        gives({"detail": "Method Not Allowed"}, 405),
        gives({"error": {"message": "Not Found", "type": "x", "param": None, "code": "not_found"}}, 404),
        gives({"error": "no such thing"}, 501),
    ],
)
async def test_what_the_replicas_lack_is_said_and_no_replicas_fault(tmp_path: Path, path: str, lack: Answer) -> None:
    async with stub(lack) as one, stub(lack) as two, gateway(tmp_path, one, two) as running:
        answers = [await post(running, path, input="x", prompt="x") for _ in range(12)]

        assert {code_of(answer) for answer in answers} == {(404, "unsupported_endpoint")}
        assert path in answers[0].json()["error"]["message"]
        assert len(one.seen) + len(two.seen) == 12, "asking another one would be in vain"
        states = (await running.admin.get("/admin/v1/replicas")).json()["replicas"]
        assert {state["breaker"] for state in states} == {"closed"}


@pytest.mark.parametrize(
    ("refusal", "status", "message"),
    [
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, 400, "too long"),
        ({"error": "bad"}, 400, "bad"),
        ({"detail": [{"loc": ["body", "x"], "msg": "secret"}]}, 422, "The replica refused this request."),
        ({}, 400, "The replica refused this request."),
    ],
)
async def test_refusals_of_other_servers_come_in_openais_shape(
    tmp_path: Path, refusal: dict[str, Any], status: int, message: str
) -> None:
    async with stub(gives(refusal, status)) as replica, gateway(tmp_path, replica) as running:
        answer = await running.chat()

        assert code_of(answer) == (400, "refused")
        assert answer.json()["error"]["message"] == message


# --- responses


@pytest.mark.parametrize("input_", ["hello", [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]])
async def test_a_response_passes_byte_for_byte_and_its_usage_is_counted(tmp_path: Path, input_: Any) -> None:
    async with stub(gives(RESPONSE)) as replica, gateway(tmp_path, replica) as running:
        answer = await post(running, "/v1/responses", input=input_, instructions="be brief", store=False)

        assert answer.content == json.dumps(RESPONSE).encode()
        assert replica.seen[0].json == {"model": MODEL, "input": input_, "instructions": "be brief", "store": False}
        assert await metric(running, "warmpath_prompt_tokens_total") == 9
        assert await metric(running, "warmpath_completion_tokens_total") == 3
        assert await metric(running, "warmpath_cached_tokens_reported_total") == 4


async def test_a_streamed_response_passes_byte_for_byte(tmp_path: Path) -> None:
    async with stub(streams(CREATED, *DELTAS, COMPLETED)) as replica, gateway(tmp_path, replica) as running:
        answer = await post(running, "/v1/responses", input="x", stream=True)

        assert answer.content == b"".join((CREATED, *DELTAS, COMPLETED))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "stream_options" not in replica.seen[0].json
        assert await metric(running, "warmpath_completion_tokens_total") == 3
        assert running.gateway.upstream.in_use == 0


async def test_the_official_client_streams_a_response(tmp_path: Path) -> None:
    async with stub(streams(STREAM)) as replica, gateway(tmp_path, replica) as running, sdk(running) as client:
        events = [event async for event in await client.responses.create(model=MODEL, input="x", stream=True)]

    assert [event.type for event in events][-1] == "response.completed"
    assert sum(event.type == "response.output_text.delta" for event in events) == 3


@pytest.mark.parametrize("broken", [dies, writes(STREAM_HEAD, chunked(CREATED), close=True), gives({}, 500)])
async def test_a_response_that_only_began_is_made_by_another_replica(tmp_path: Path, broken: Answer) -> None:
    good = streams(CREATED, *DELTAS, COMPLETED)
    async with stub(broken) as bad, stub(good) as other, gateway(tmp_path, bad, other) as running:
        for _ in range(20):
            answer = await post(running, "/v1/responses", input="x", stream=True)
            assert answer.content == b"".join((CREATED, *DELTAS, COMPLETED))
            if bad.seen:
                return
        pytest.fail("the broken replica was never tried, so this shows nothing")


@pytest.mark.parametrize("end", [b"", b'event: error\ndata: {"type":"error","message":"secret"}\n\n'])
async def test_a_response_that_breaks_ends_with_an_error_event_of_its_kind(tmp_path: Path, end: bytes) -> None:
    breaks = writes(STREAM_HEAD, chunked(CREATED + DELTAS[0] + end), close=True)
    async with stub(breaks) as replica, gateway(tmp_path, replica) as running, sdk(running) as client:
        answer = await post(running, "/v1/responses", input="x", stream=True)
        events = [event async for event in await client.responses.create(model=MODEL, input="x", stream=True)]

    *_, last, rest = answer.content.split(b"\n\n")
    assert rest == b""
    assert last.startswith(b'event: error\ndata: {"type":"error","code":"upstream_lost"')
    assert b"secret" not in answer.content
    assert b"[DONE]" not in last
    assert (events[-1].type, events[-1].sequence_number) == ("error", 2)


async def test_a_response_kept_alive_in_vain_ends_with_an_error_event_of_its_kind(tmp_path: Path) -> None:
    settings = {"stream": {"commit_after_s": 0.05, "ping_s": 0.05, "first_byte_s": 0.3}}
    async with stub(hangs) as replica, gateway(tmp_path, replica, **settings) as running:
        answer = await post(running, "/v1/responses", input="x", stream=True)

    assert answer.content.startswith(b": ping")
    assert b'event: error\ndata: {"type":"error","code":"upstream_timeout"' in answer.content


async def test_a_response_is_found_again_where_it_was_made(tmp_path: Path) -> None:
    async with stub(gives(RESPONSE)) as one, stub(gives(RESPONSE)) as two, gateway(tmp_path, one, two) as running:
        await post(running, "/v1/responses", input="x")
        maker = one if one.seen else two

        for method, path in [
            ("GET", "/v1/responses/resp_1?include[]=usage"),
            ("GET", "/v1/responses/resp_1/input_items?limit=3"),
            ("POST", "/v1/responses/resp_1/cancel"),
            ("DELETE", "/v1/responses/resp_1"),
        ]:
            answer = await call(running, method, path)
            assert answer.content == json.dumps(RESPONSE).encode()
            assert (maker.seen[-1].method, maker.seen[-1].path) == (method, path)
        for turn in range(8):
            await post(running, "/v1/responses", input=f"other {turn}", previous_response_id="resp_1")

        assert len(maker.seen) == 13
        assert await metric(running, "warmpath_prompt_tokens_total") == 9 * 9, "what was there already is counted once"


async def test_a_conversation_stays_where_it_is(tmp_path: Path) -> None:
    async with stub(gives(RESPONSE)) as one, stub(gives(RESPONSE)) as two, gateway(tmp_path, one, two) as running:
        for turn in range(6):
            conversation = "conv_1" if turn % 2 else {"id": "conv_1"}
            await post(running, "/v1/responses", input=f"{turn}", conversation=conversation)

        assert sorted((len(one.seen), len(two.seen))) == [0, 6]


async def test_a_streamed_response_is_found_while_it_runs(tmp_path: Path) -> None:
    async with (
        stub(writes(STREAM_HEAD, chunked(CREATED + DELTAS[0]))) as replica,
        gateway(tmp_path, replica) as running,
    ):
        body = {"model": MODEL, "input": "x", "stream": True}
        async with running.client.stream("POST", "/v1/responses", json=body, headers=running.auth) as answer:
            async for _ in answer.aiter_raw():
                break
            replica.answer = gives(RESPONSE)
            assert (await call(running, "POST", "/v1/responses/resp_1/cancel")).status_code == 200


async def test_nobody_elses_response_exists(tmp_path: Path) -> None:
    async with stub(gives(RESPONSE)) as replica, gateway(tmp_path, replica) as running:
        await post(running, "/v1/responses", input="x")
        _, running.key = await running.gateway.keys.create("client", name="other", tenant="other")
        theirs = await call(running, "GET", "/v1/responses/resp_1")
        made_up = await call(running, "GET", "/v1/responses/resp_2")
        strange = await call(running, "GET", "/v1/responses/resp%0A")

        assert code_of(theirs) == code_of(made_up) == code_of(strange) == (404, "response_not_found")
        assert theirs.json()["error"]["message"].replace("resp_1", "resp_2") == made_up.json()["error"]["message"]
        assert len(replica.seen) == 1


async def test_a_response_whose_replica_is_gone_is_gone_and_one_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async with stub(gives(RESPONSE)) as one, stub(gives(RESPONSE)) as two, gateway(tmp_path, one, two) as running:
        await post(running, "/v1/responses", input="x")
        maker, other = (one, two) if one.seen else (two, one)
        await running.admin.patch(f"/admin/v1/replicas/127-0-0-1-{maker.port}", json={"cordoned": True})

        away = await call(running, "GET", "/v1/responses/resp_1")

        assert code_of(away) == (503, "no_replica")
        assert float(away.headers["retry-after"]) >= 1
        assert other.seen == []


# --- tokens


async def test_tokens_come_from_a_replica_where_its_tokenizer_is_not_here(tmp_path: Path) -> None:
    tokens = {"count": 2, "max_model_len": 100, "tokens": [1, 2]}
    async with stub(gives(tokens)) as replica, gateway(tmp_path, replica) as running:
        assert (await post(running, "/tokenize", prompt="hello")).json() == tokens
        assert (await post(running, "/detokenize", tokens=[1, 2])).json() == tokens
        assert [(seen.method, seen.path) for seen in replica.seen] == [("POST", "/tokenize"), ("POST", "/detokenize")]


# --- headers and routes


async def test_a_key_with_a_limit_is_told_where_it_stands(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        _, running.key = await running.gateway.keys.create("client", name="few", limits=Quota(requests_per_minute=3))
        answers = [
            await running.chat(),
            await post(running, "/v1/chat/completions"),
            await running.chat("x", stream=True),
        ]
        answers += [await running.chat() for _ in range(3)]
        _, running.key = await running.gateway.keys.create("client", name="free")
        free = await running.chat()

    assert [answer.status_code for answer in answers] == [200, 400, 502, 200, 200, 429]
    del answers[1]  # was refused before it counted, as nothing that went wrong does for long
    for answer, remaining in zip(answers, (2, 1, 1, 0, 0), strict=True):
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(remaining)
        assert re.fullmatch(r"1m[01]s|\d+s", answer.headers["x-ratelimit-reset-requests"])
    assert 1 <= float(answers[-1].headers["retry-after"]) <= 61
    assert int(answers[-1].headers["retry-after-ms"]) <= 60_500
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


ALLOWED = {
    "GET /v1/chat/completions": "POST",
    "PUT /v1/embeddings": "POST",
    "GET /v1/responses": "POST",
    "DELETE /tokenize": "POST",
    "OPTIONS /v1/chat/completions": "POST",
    "TRACE /v1/models": "GET, HEAD",
    "POST /v1/models": "GET, HEAD",
    "POST /v1/models/x": "GET, HEAD",
    "PUT /v1/responses/resp_1": "DELETE, GET, HEAD",
    "GET /v1/responses/resp_1/cancel": "POST",
    "POST /health": "GET, HEAD",
}


async def test_another_method_is_a_405_that_says_which(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        for line, allowed in ALLOWED.items():
            answer = await call(running, *line.split(" "))

            assert code_of(answer) == (405, "method_not_allowed"), line
            assert ", ".join(sorted(answer.headers["allow"].split(", "))) == allowed, line
            assert answer.headers["x-request-id"].startswith("req-")


NOT_OURS = (
    *("/", "/v1", "/v1/", "/v1/chat/completions/", "//v1/models", "/v1/chat", "/v1/completions;a=b", "/V1/models"),
    *("/v1/%2e%2e/models", "/v1/responses/", "/v1/responses/a/b", "/metrics", "/docs", "/openapi.json", "/debug"),
    *("/admin/v1/replicas", "/v1/models%00", "/v1/chat%2fcompletion"),
)


async def test_what_is_no_path_of_ours_is_a_404_and_no_redirect(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        for path in NOT_OURS:
            for method in ("GET", "POST"):
                request = running.client.build_request(method, "/", headers=running.auth)
                request.url = request.url.copy_with(raw_path=path.encode())

                assert code_of(await running.client.send(request)) == (404, "not_found"), path
        assert replica.seen == []


async def test_an_encoded_path_is_the_same_path(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        known = await running.client.post("/v1/%63hat/completions", json=body, headers=running.auth)
        unknown = await running.client.post("/v1/%63hat/completions", json=body)

        assert known.status_code == 200
        assert code_of(unknown) == (401, "invalid_api_key")


async def test_every_endpoint_wants_a_key_before_anything_else(tmp_path: Path) -> None:
    async with stub(gives({})) as replica, gateway(tmp_path, replica) as running:
        for path in ("/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize", "/v1/responses/a/cancel"):
            assert code_of(await running.client.post(path, content=b"{")) == (401, "invalid_api_key"), path
        assert replica.seen == []


async def test_a_request_id_that_is_not_sane_is_never_sent_back(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        for sent in ("a b", "x" * 129, "é", "a\tb", ""):
            for path in ("/v1/models", "/nothing", "/v1/chat/completions", "/v1/responses/a"):
                answer = await running.client.get(path, headers=[(b"x-request-id", sent.encode())])

                assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"]), (sent, path)


async def test_bodies_that_are_not_plain_json_are_refused_unread(tmp_path: Path) -> None:
    refused = {
        (): (415, "unsupported_media_type"),
        (("content-type", "text/plain"),): (415, "unsupported_media_type"),
        (("content-type", "multipart/form-data; boundary=x"),): (415, "unsupported_media_type"),
        (("content-type", "application/jsonp"),): (415, "unsupported_media_type"),
        (("content-type", "application/json"), ("content-encoding", "gzip")): (415, "unsupported_encoding"),
        (("content-type", "application/json"), ("content-encoding", "br, identity")): (415, "unsupported_encoding"),
        (("content-type", "application/json"), ("content-type", "text/plain")): (400, "duplicate_header"),
    }
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/tokenize"):
            for headers, expected in refused.items():
                sent = [*headers, *running.auth.items()]
                assert code_of(await running.client.post(path, content=b"\x1f\x8b", headers=sent)) == expected, headers
        assert replica.seen == []


async def test_a_body_over_the_limit_is_refused_by_its_length_and_by_its_bytes(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 1024

    headers = {"content-type": "application/json"}
    settings = {"server": {"max_body_bytes": 4096}}
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, **settings) as running:
        for content in (b" " * 5000, pieces()):
            answer = await running.client.post("/v1/responses", content=content, headers=headers | running.auth)
            assert code_of(answer) == (413, "request_too_large")


async def test_a_replica_sees_of_a_clients_headers_only_what_it_needs(tmp_path: Path) -> None:
    sent = {
        "x-forwarded-for": "1.2.3.4",
        "x-forwarded-host": "evil",
        "forwarded": "for=1",
        "cookie": "a=b",
        "te": "trailers",
        "proxy-authorization": "Basic x",
        "x-openwebui-user-id": "u",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    async with stub(gives(EMBEDDINGS)) as replica, gateway(tmp_path, replica) as running:
        body = {"model": MODEL, "input": "x"}
        await running.client.post("/v1/embeddings", json=body, headers={**sent, **running.auth})

        assert replica.seen[0].headers.keys() == {
            *("host", "content-type", "content-length", "accept-encoding", "x-request-id", "traceparent")
        }


async def test_content_for_other_models_passes_to_replicas_that_may_take_it(tmp_path: Path) -> None:
    content = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        answer = await post(running, "/v1/chat/completions", messages=[{"role": "user", "content": content}])

        assert answer.status_code == 200
        assert replica.seen[0].json["messages"][0]["content"] == content
