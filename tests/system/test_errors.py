"""What goes wrong, as the official client sees it: a status, a code, OpenAI's shape."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.system.processes import Up, running_up

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("errors")
    with running_up(folder, "--model", "simulated", "--workers", "1", "--", "--max-model-len", "512") as system:
        yield system


def post(up: Up, content: bytes, **headers: str) -> httpx.Response:
    sent = {"authorization": f"Bearer {up.api_key}", "content-type": "application/json", **headers}
    return httpx.post(f"{up.base_url}/chat/completions", content=content, headers=sent)


def chat(up: Up, content: str = "hello", **fields: Any) -> Any:
    with up.client as client:
        return client.chat.completions.create(
            **{"model": up.model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
        )


def assert_openai_shape(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "key", ["wrong", "wp-aaaaaaaaaa-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "wp-' OR 1=1 --"]
)
def test_a_wrong_key_is_a_401(up: Up, key: str) -> None:
    with (
        pytest.raises(openai.AuthenticationError) as caught,
        openai.OpenAI(base_url=up.base_url, api_key=key) as client,
    ):
        client.models.list()

    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer \xc3\xa9", b"Basic eDp5", b"Bearer a b"])
def test_what_is_no_key_at_all_is_a_401_too(up: Up, header: bytes) -> None:
    answer = httpx.get(f"{up.base_url}/models", headers=[(b"authorization", header)])

    assert_openai_shape(answer, 401, "invalid_api_key")


def test_a_refused_key_is_told_how_to_ask(up: Up) -> None:
    for method, path in (("GET", "/models"), ("POST", "/chat/completions")):
        assert httpx.request(method, f"{up.base_url}{path}").headers["www-authenticate"] == "Bearer"


def test_two_keys_are_none(up: Up) -> None:
    header = (b"authorization", f"Bearer {up.api_key}".encode())

    assert_openai_shape(httpx.get(f"{up.base_url}/models", headers=[header, header]), 401, "invalid_api_key")


def test_an_admin_key_and_a_join_token_open_nothing_here(up: Up) -> None:
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=up.base_url, api_key=up.admin_key) as client:
        client.models.list()


def test_a_clients_key_opens_nothing_there(up: Up) -> None:
    answer = httpx.get(f"{up.admin_url}/admin/v1/replicas", headers={"authorization": f"Bearer {up.api_key}"})

    assert_openai_shape(answer, 403, "insufficient_permissions")


def test_an_unknown_model_is_a_404(up: Up) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(up, model="no-such-model")

    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_malformed_json_is_a_400(up: Up) -> None:
    assert_openai_shape(post(up, b'{"model": '), 400, "invalid_json")


def test_another_content_type_is_a_415(up: Up) -> None:
    answer = post(up, b"{}", **{"content-type": "text/plain"})

    assert_openai_shape(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_a_400(up: Up, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(up, "word " * 2000, stream=stream)

    assert caught.value.code == "context_length_exceeded"


def test_a_body_over_the_limit_is_a_413(up: Up) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        chat(up, "x" * (4 << 20))

    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("n", 10**9),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop", ["a"] * 9),
        ("stop", ""),
        ("logit_bias", {"1": 500}),
        ("top_logprobs", 3),
        ("bad_words", ["x"]),
        ("chat_template", "{{ 1 }}"),
        ("warmpath", {"salt": "mine"}),
    ],
)
def test_a_field_that_cannot_be_honoured_is_a_400_that_names_it(up: Up, field: str, value: object) -> None:
    body = {"model": up.model, "messages": [{"role": "user", "content": "hi"}], field: value}

    answer = post(up, json.dumps(body).encode())

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_no_replica_is_a_503_with_a_time_to_come_back(up: Up) -> None:
    up.admin("PATCH", "/replicas/worker-0", json={"cordoned": True}).raise_for_status()
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            chat(up)
    finally:
        up.admin("PATCH", "/replicas/worker-0", json={"cordoned": False}).raise_for_status()

    assert caught.value.status_code == 503
    assert caught.value.code == "no_replica"
    assert float(caught.value.response.headers["retry-after"]) > 0


def test_a_key_over_its_limit_is_a_429_with_a_time_to_come_back(up: Up) -> None:
    made = up.admin("POST", "/keys", json={"name": "slow", "limits": {"requests_per_minute": 2}}).json()
    with openai.OpenAI(base_url=up.base_url, api_key=made["key"], max_retries=0) as client:
        for _ in range(2):
            client.completions.create(model=up.model, prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=up.model, prompt="x", max_tokens=1)

    assert caught.value.code == "rate_limit_exceeded"
    assert 0 < float(caught.value.response.headers["retry-after"]) <= 61  # a window, and it is never told too early


def test_a_revoked_key_is_refused_at_once(up: Up) -> None:
    made = up.admin("POST", "/keys", json={"name": "short"}).json()
    with openai.OpenAI(base_url=up.base_url, api_key=made["key"], max_retries=0) as client:
        client.models.list()
        up.admin("DELETE", f"/keys/{made['id']}").raise_for_status()
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


@pytest.mark.parametrize("admin", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: ten\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400_in_openais_shape(up: Up, data: bytes, admin: bool) -> None:
    url = httpx.URL(up.admin_url if admin else up.base_url)
    with socket.create_connection((url.host, url.port or 0), timeout=5) as client:
        client.sendall(data)
        head, _, body = b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nx-request-id: req-" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(("method", "path"), [("GET", "/chat/completions"), ("GET", "/nothing"), ("POST", "/models")])
def test_wrong_routes_have_openais_shape_too(up: Up, method: str, path: str) -> None:
    answer = httpx.request(method, f"{up.base_url}{path}")

    assert answer.status_code in (404, 405)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
