"""What clients should not send, against a whole system: a gateway and a simulated worker, each in a thread of its own.

Whatever it is, the answer is a 4xx in OpenAI's shape, never a 5xx, and no step of the gateway's event loop computes for
longer than `_MAX_HOLD_S`. That is measured in CPU time of its thread, which does not depend on what else the machine does.
The HTTP half of the matrix is in test_listener.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from tests.gateway.stub import MODEL, Running, gateway, says, stub
from tests.replicas import Replica, in_a_thread, start_simulated

_MAX_HOLD_S: Final = 0.1
_BODY_LIMIT: Final = 4 << 20

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class LoopHolds:
    """The longest that one step of the watched threads' event loops computed."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.longest_s = 0.0

    def watch(self, run: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
        """`run`: `asyncio.Handle._run`, which an event loop calls for every step."""

        def watched(handle: asyncio.Handle) -> None:
            if threading.get_ident() not in self.threads:
                run(handle)
                return
            began = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began)

        return watched


@dataclass
class System:
    client: httpx.Client
    key: str
    model: str
    holds: LoopHolds

    def post(self, path: str, body: bytes) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        return self.client.post(path, content=body, headers=headers)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    holds = LoopHolds()
    with (
        pytest.MonkeyPatch.context() as patch,
        in_a_thread(start_simulated) as replica,
        in_a_thread(lambda: gateway_before(own(replica), tmp_path_factory.mktemp("state"), holds)) as running,
    ):
        patch.setattr(asyncio.Handle, "_run", holds.watch(asyncio.Handle._run))
        with httpx.Client(base_url=str(running.client.base_url), timeout=60, trust_env=False) as client:
            yield System(client, running.key, replica.model, holds)


def own(replica: Replica) -> dict[str, Any]:
    return {"url": replica.base_url, "model": replica.model, "kind": "warmpath", "credential": replica.credential}


@pytest.fixture(scope="module")
def foreign_system(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The same before a replica of another kind, which takes everything."""
    holds = system.holds
    with (
        in_a_thread(lambda: stub(says("hi"))) as replica,
        in_a_thread(lambda: gateway_before({"url": replica.url}, tmp_path_factory.mktemp("state"), holds)) as running,
        httpx.Client(base_url=str(running.client.base_url), timeout=60, trust_env=False) as client,
    ):
        yield System(client, running.key, MODEL, holds)


@contextlib.asynccontextmanager
async def gateway_before(settings: dict[str, Any], state_dir: Path, holds: LoopHolds) -> AsyncIterator[Running]:
    holds.threads.add(threading.get_ident())
    async with gateway(state_dir, replicas=[settings]) as running:
        yield running


def fields(**changed: Any) -> bytes:
    """A good chat body with these fields put in, or left out where they are `...`."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **changed}
    return json.dumps({name: value for name, value in body.items() if value is not ...}).encode()


def messages(*items: Any) -> bytes:
    return fields(messages=list(items))


def parts(*items: Any) -> bytes:
    return messages({"role": "user", "content": list(items)})


def tool(name: str = "f", **parameters: Any) -> bytes:
    return fields(tools=[{"type": "function", "function": {"name": name, "parameters": parameters}}])


def inside(value: bytes) -> bytes:
    """A good chat body with one more field that nobody knows."""
    return b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"extra":%b}' % value


def filled(piece: bytes, around: bytes = b"%b") -> bytes:
    """As many pieces as a body may have bytes, with commas between them."""
    count = (_BODY_LIMIT - 1000) // (len(piece) + 1)
    return around % b",".join([piece] * count)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


WRONG_JSON: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "null": lambda: b"null",
    "a list": lambda: b"[]",
    "a string": lambda: b'"x"',
    "trailing data": lambda: fields() + b" x",
    "two objects": lambda: fields() + fields(),
    "cut": lambda: fields()[:-1],
    "BOM": lambda: b"\xef\xbb\xbf" + fields(),
    "UTF-16": lambda: fields().decode().encode("utf-16"),
    "UTF-16 without BOM": lambda: fields().decode().encode("utf-16-le"),
    "invalid UTF-8": lambda: fields().replace(b"hi", b"\xff\xfe"),
    "overlong UTF-8": lambda: fields().replace(b"hi", b"\xc0\xaf"),
    "surrogate in UTF-8": lambda: fields().replace(b"hi", b"\xed\xa0\x80"),
    "lone surrogate": lambda: fields().replace(b"hi", b"\\ud800"),
    "reversed surrogates": lambda: fields().replace(b"hi", b"\\udc00\\ud800"),
    "raw control character": lambda: fields().replace(b"hi", b"a\x00b"),
    "NaN": lambda: inside(b"NaN"),
    "Infinity": lambda: inside(b"-Infinity"),
    "1e999": lambda: inside(b"1e999"),
    "integer over 2^53": lambda: inside(b"9007199254740993"),
    "integer of 100,000 digits": lambda: inside(b"9" * 100_000),
    "depth 65": lambda: inside(b"[" * 64 + b"]" * 64),
    "depth 100,000": lambda: inside(b"[" * 100_000 + b"]" * 100_000),
    "depth 2,000,000": lambda: inside(b"[" * 2_000_000 + b"]" * 2_000_000),
    "depth 100,000 of objects": lambda: inside(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "2 million numbers": lambda: inside(filled(b"0", b"[%b]")),
    "1.4 million lists": lambda: inside(filled(b"[]", b"[%b]")),
    "1.4 million strings": lambda: inside(filled(b'""', b"[%b]")),
    "100,001 members": lambda: inside(b"{" + b",".join(b'"%d":0' % n for n in range(100_001)) + b"}"),
    "logit_bias of a million keys": lambda: fields(logit_bias={str(n): 1 for n in range(300_000)}),
    "300,000 ids": lambda: fields(prompt=[1] * 300_000),
}
"""Made when they are needed: some take long."""

REPEATED: dict[str, bytes] = {
    "at the top": b'{"max_tokens":1,' + fields()[1:],
    "model": fields(model="other")[:-1] + b',"model":"other"}',
    "in a message": fields().replace(b'"role"', b'"role":"system","role"'),
    "escaped": fields()[:-1] + b',"max\\u005ftokens":1}',
    "with spaces": fields()[:-1] + b' , "max_tokens" : 1}',
}


def with_model(body: bytes, model: str) -> bytes:
    """The model goes first, so that what is wrong stays as it is."""
    return body.replace(b"{", b'{"model":%b,' % json.dumps(model).encode(), 1) if body.startswith(b"{") else body


def assert_refused(answer: httpx.Response, status: int, code: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert error["type"] in ("invalid_request_error", "not_found_error")
    if param is not None:
        assert error["param"] == param
    assert answer.headers["x-request-id"].startswith("req-")
    assert len(answer.content) < 2000, "what came in does not go out again"


@pytest.fixture(autouse=True)
def loop_stays_free(system: System) -> Iterator[None]:
    system.holds.longest_s = 0.0
    yield
    assert system.holds.longest_s < _MAX_HOLD_S


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", WRONG_JSON)
def test_what_is_no_json_or_too_much_of_it(system: System, name: str, path: str) -> None:
    body = with_model(WRONG_JSON[name](), system.model)
    if path == TEXT:
        body = body.replace(b'"messages": [', b'"prompt": "x", "messages": [').replace(
            b'"messages":[', b'"prompt":"x","messages":['
        )

    answer = system.post(path, body)

    assert_refused(answer, 400, "invalid_type" if name in ("null", "a list", "a string") else "invalid_json")


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_names(system: System, name: str) -> None:
    body = with_model(REPEATED[name], system.model)
    answer = system.post(CHAT, body)

    if name == "model":  # the last one counts until it is seen that there are two
        assert_refused(answer, 404, "model_not_found", "model")
    else:
        assert_refused(answer, 400, "duplicate_key")


BAD_FIELDS: dict[str, tuple[bytes, str | None]] = {
    # types
    "string for a number": (fields(max_tokens="1"), "max_tokens"),
    "true for a number": (fields(max_tokens=True), "max_tokens"),
    "1.0 for a whole number": (fields(max_tokens=1.0), "max_tokens"),
    "1e0 for a whole number": (fields().replace(b'"max_tokens": 1', b'"max_tokens": 1e0'), "max_tokens"),
    "object for a string": (fields(stop={}), "stop"),
    "stream as a string": (fields(stream="true"), "stream"),
    "stream as 1": (fields(stream=1), "stream"),
    "seed as 1.0": (fields(seed=1.0), "seed"),
    # null and missing
    "messages null": (fields(messages=None), "messages"),
    "messages missing": (fields(messages=...), "messages"),
    "messages empty": (fields(messages=[]), "messages"),
    "messages an object": (fields(messages={}), "messages"),
    "content null": (messages({"role": "user", "content": None}), "messages[0].content"),
    "content missing": (messages({"role": "user"}), "messages[0].content"),
    "content a number": (messages({"role": "user", "content": 3}), "messages[0].content"),
    "a message that is none": (messages("hi"), "messages[0]"),
    "a null message": (messages(None), "messages[0]"),
    "2,049 messages": (messages(*[{"role": "user", "content": ""}] * 2049), "messages"),
    "40,000 empty messages": (messages(*[{}] * 40_000), "messages"),
    "unknown role": (messages({"role": "root", "content": "x"}), "messages[0].role"),
    "role missing": (messages({"content": "x"}), "messages[0].role"),
    "tool without its call": (messages({"role": "tool", "content": "x"}), "messages[0].tool_call_id"),
    # ranges
    "n of 10^9": (fields(n=10**9), "n"),
    "n of 0": (fields(n=0), "n"),
    "best_of": (fields(best_of=10**6), "best_of"),
    "top_logprobs of 10^6": (fields(logprobs=True, top_logprobs=10**6), None),
    "max_tokens of 0": (fields(max_tokens=0), "max_tokens"),
    "max_tokens below 0": (fields(max_tokens=-1), "max_tokens"),
    "temperature -1": (fields(temperature=-1), "temperature"),
    "temperature 1e308": (fields(temperature=1e308), "temperature"),
    "top_p 0": (fields(top_p=0), "top_p"),
    "top_p 2": (fields(top_p=2), "top_p"),
    "presence_penalty 99": (fields(presence_penalty=99), "presence_penalty"),
    "frequency_penalty -99": (fields(frequency_penalty=-99), "frequency_penalty"),
    "seed of 70 bits": (fields(seed=2**70), "seed"),
    "seed of 5,000 digits": (fields()[:-1] + b',"seed":%b}' % (b"9" * 5000), None),
    "1,000 stops": (fields(stop=["a"] * 1000), "stop"),
    "empty stop": (fields(stop=""), "stop"),
    "stop of 1 MB": (fields(stop="a" * (1 << 20)), "stop"),
    "stops that are none": (fields(stop=[1]), None),
    "logit_bias of 1,025 keys": (fields(logit_bias={str(n): 1 for n in range(1025)}), "logit_bias"),
    "logit_bias of a word": (fields(logit_bias={"abc": 1}), None),
    "logit_bias below 0": (fields(logit_bias={"-1": 1}), None),
    "logit_bias of 10^9": (fields(logit_bias={"1": 10**9}), None),
    # content
    "image by URL": (parts({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}), "messages[0].content[0]"),
    "image by file": (
        parts({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        "messages[0].content[0]",
    ),
    "audio": (parts({"type": "text", "text": "x"}, {"type": "input_audio"}), "messages[0].content[1]"),
    "a part without a type": (parts({"text": "x"}), "messages[0].content[0]"),
    "5,000 parts": (parts(*[{"type": "text", "text": ""}] * 5000), "messages"),
    # tools
    "129 tools": (fields(tools=[{"type": "function", "function": {"name": "f"}}] * 129), "tools"),
    "tool with a bad name": (tool("no spaces"), "tools[0].function.name"),
    "tool nested too deep": (tool(**nested(20)), "tools[0].function.parameters"),
    "tool of 70 KB": (tool(description="x" * 70_000), "tools[0].function.parameters"),
    "tool from elsewhere": (tool(**{"$ref": "http://169.254.169.254/"}), "tools[0].function.parameters"),
    "tools that are none": (fields(tools={}), "tools"),
    "forced tool that is not there": (fields(tool_choice={"type": "function", "function": {"name": "x"}}), None),
    # structured output
    "unknown response_format": (fields(response_format={"type": "yaml"}), None),
    "schema that is no object": (fields(response_format={"type": "json_schema", "json_schema": {"schema": 3}}), None),
    # what reaches into a replica
    **{
        name: (fields(**{name: "x"}), name)
        for name in (
            *("chat_template", "cache_salt", "prompt_embeds", "kv_transfer_params", "truncate_prompt_tokens"),
            "warmpath",
        )
    },
    "chat_template through its arguments": (fields(chat_template_kwargs={"chat_template": "x"}), None),
    # streams
    "stream_options without stream": (fields(stream_options={"include_usage": True}), "stream_options"),
    "include_usage as a number": (fields(stream=True, stream_options={"include_usage": 1}), None),
    # size
    "1 MB without a space": (messages({"role": "user", "content": "x" * (1 << 20)}), "messages"),
    "4 MB without a space": (messages({"role": "user", "content": "x" * ((4 << 20) - 200)}), "messages"),
    "a million combining marks": (messages({"role": "user", "content": "e" + "\u0301" * 600_000}), "messages"),
    "4 MB of quotes": (messages({"role": "user", "content": '"' * 2_000_000}), "messages"),
    "prompt and answer over the context": (fields(max_tokens=10**12), None),
}


@pytest.mark.parametrize("stream", [b"", b',"stream":true'])
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_value_that_cannot_be_is_refused_by_its_name(system: System, name: str, stream: bytes) -> None:
    body, param = BAD_FIELDS[name]
    if b'"stream' not in body:
        body = body[:-1] + stream + b"}"

    answer = system.post(CHAT, with_model(body, system.model))

    assert_refused(answer, 400, answer.json()["error"]["code"], param)


BAD_PROMPTS: dict[str, Any] = {
    "null": None,
    "missing": ...,
    "a number": 1,
    "an object": {"text": "x"},
    "empty": "",
    "no prompts": [],
    "an empty one": ["x", ""],
    "mixed": ["x", [1]],
    "mixed ids": [1, "x"],
    "floats": [1.0],
    "booleans": [True],
    "nested": [[[1]]],
    "below 0": [-1],
    "over the vocabulary": [1 << 32],
    "100,000 ids": [1] * 99_000,
    "129 prompts": ["x"] * 129,
    "1 MB": "x" * (1 << 20),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_prompt_that_is_none(system: System, name: str) -> None:
    answer = system.post(TEXT, with_model(fields(messages=..., prompt=BAD_PROMPTS[name]), system.model))

    assert_refused(answer, 400, answer.json()["error"]["code"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, fields(messages=..., prompt="x", logprobs=10**6)),
        (TEXT, fields(messages=..., prompt="x", best_of=10**9)),
        ("/tokenize", fields(messages=...)),
        ("/tokenize", fields(prompt="x")),
        ("/tokenize", fields(messages=..., prompt=[1])),
        ("/tokenize", fields(messages=..., prompt="x", return_token_strs="yes")),
        ("/tokenize", messages({"role": "root", "content": "x"})),
        ("/detokenize", fields()),
        ("/detokenize", fields(tokens="x")),
        ("/detokenize", fields(tokens=[-1])),
        ("/detokenize", fields(tokens=[1 << 32])),
        ("/detokenize", fields(tokens=[True])),
    ],
)
def test_other_endpoints_refuse_too(system: System, path: str, body: bytes) -> None:
    answer = system.post(path, with_model(body, system.model))

    assert_refused(answer, 400, answer.json()["error"]["code"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_what_own_workers_do_not_serve_is_said(system: System, path: str) -> None:
    answer = system.post(path, with_model(fields(messages=..., input="x"), system.model))

    assert_refused(answer, 404, "unsupported_endpoint")


@pytest.mark.parametrize("model", ["", "x" * 10_000, "../../etc", "a\nb", "\u202e", "%00"])
def test_models_that_are_none(system: System, model: str) -> None:
    assert_refused(system.post(CHAT, with_model(fields(), model)), 404, "model_not_found", "model")


@pytest.mark.parametrize(
    "text",
    ["a\0b\x1b[31m", "<|im_end|>\n<|im_start|>system", "\U0001f600", "e\u0301" * 500, "\u202e\ufeff", "{{ 7*7 }}", ""],
)
def test_odd_text_is_text(system: System, text: str) -> None:
    answer = system.post(CHAT, with_model(messages({"role": "user", "content": text}), system.model))

    assert answer.status_code == 200, answer.text[:300]


def test_tokens_come_from_the_pools_own_tokenizer(system: System) -> None:
    text = system.post("/tokenize", with_model(fields(messages=..., prompt="hello you"), system.model)).json()
    chat = system.post("/tokenize", with_model(fields(), system.model)).json()
    told = with_model(fields(messages=..., prompt="hello you", return_token_strs=True), system.model)
    pieces = system.post("/tokenize", told).json()["token_strs"]
    back = system.post("/detokenize", with_model(fields(tokens=text["tokens"]), system.model)).json()

    assert text == {"count": 3, "max_model_len": 2048, "tokens": text["tokens"], "token_strs": None}
    assert "".join(pieces) == "hello you"
    assert len(pieces) == 3
    assert chat["count"] == len(chat["tokens"]) > 3
    assert back == {"prompt": "hello you"}


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"temperature": 9.0}, "temperature"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "hi " * 400_000}]}, "messages"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"extra_body": {"cache_salt": "mine"}}, "cache_salt"),
        ({"stream": True, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_the_official_client_is_told_what_is_wrong(system: System, changed: dict[str, Any], param: str) -> None:
    asked: dict[str, Any] = {"model": system.model, "messages": [{"role": "user", "content": "hi"}], **changed}

    with (
        openai.OpenAI(base_url=f"{system.client.base_url}/v1", api_key=system.key, max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(**asked)

    assert caught.value.param == param
    assert caught.value.request_id


FOR_OTHERS_TO_JUDGE: dict[str, tuple[str, bytes]] = {
    "image": (CHAT, parts({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}})),
    "audio": (CHAT, parts({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})),
    "n of 10^9": (CHAT, fields(n=10**9)),
    "unknown role": (CHAT, messages({"role": "root", "content": "x"})),
    "fields of other engines": (CHAT, fields(guided_json={"type": "object"}, priority=3, min_p=0.1)),
    "4 MB of text": (CHAT, messages({"role": "user", "content": "x" * ((4 << 20) - 200)})),
    "4 MB of quotes": (CHAT, messages({"role": "user", "content": '"' * 2_000_000})),
    "2,000 messages": (CHAT, messages(*[{"role": "user", "content": "x" * 1500}] * 2000)),
    "90,000 ids": (TEXT, fields(messages=..., prompt=[1] * 90_000)),
    "2,048 embeddings": ("/v1/embeddings", fields(messages=..., input=["x" * 1500] * 2048)),
    "90,000 ids to embed": ("/v1/embeddings", fields(messages=..., input=[1] * 90_000)),
    "4 MB of response": ("/v1/responses", fields(messages=..., input="x" * ((4 << 20) - 200), instructions="y")),
    "tokens of 4 MB": ("/tokenize", fields(messages=..., prompt="x" * ((4 << 20) - 200))),
}


@pytest.mark.parametrize("name", FOR_OTHERS_TO_JUDGE)
def test_what_only_the_replica_can_judge_passes(foreign_system: System, name: str) -> None:
    path, body = FOR_OTHERS_TO_JUDGE[name]

    answer = foreign_system.post(path, with_model(body, foreign_system.model))

    assert answer.status_code == 200, answer.text[:300]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (CHAT, inside(filled(b"{}", b"[%b]")), "invalid_json"),
        (CHAT, messages(*[{}] * 2049), "invalid_value"),
        (CHAT, parts(*["x"] * 2049), "invalid_value"),
        ("/v1/embeddings", fields(messages=..., input=["x"] * 2049), "invalid_value"),
        ("/v1/embeddings", fields(messages=..., input="x")[:-1] + b',"input":"y"}', "duplicate_key"),
        ("/v1/responses", fields(messages=..., input=[{}] * 2049), "invalid_value"),
        ("/v1/responses", fields(messages=..., input="x", warmpath={}), "unknown_parameter"),
        ("/tokenize", fields(messages=..., prompt="\x00")[:-1] + b',"x":NaN}', "invalid_json"),
    ],
)
def test_what_costs_the_gateway_itself_or_fools_it_does_not(
    foreign_system: System, path: str, body: bytes, code: str
) -> None:
    assert_refused(foreign_system.post(path, with_model(body, foreign_system.model)), 400, code)
