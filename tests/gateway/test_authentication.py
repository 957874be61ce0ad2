"""Who is let in at the client listener, what a key may, and what somebody without one is told: over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.routes import ENDPOINTS as ADMIN_ENDPOINTS
from gateway.authentication import Authenticator, FailureCounter
from gateway.keys import ALL_SCOPES
from gateway.openai import ENDPOINTS
from tests.gateway.stub import MODEL, Running, StubReplica, gateway, says, stub

ROUTES = [
    *(("POST", path) for path in sorted(ENDPOINTS)),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/v1/models/none/such"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/v1/responses/resp_1/input_items"),
]
ADMIN_ROUTES = [
    (endpoint.method, endpoint.path.replace("{replica_id}", "w1").replace("{key_id}", "abc"))
    for endpoint in ADMIN_ENDPOINTS
    if endpoint.needs.value
]
HOSTILE_HOSTS = ["x/health", "x/health?", "x?a=b", "x#/health", "x@127.0.0.1", "127.0.0.1:8001/health?x="]
INVENTED = [
    "x",
    "null",
    "undefined",
    "wp-abcdefghij-" + "x" * 43,
    "wpa-abcdefghij-" + "x" * 43,
    "wp-' OR '1'='1' -- ",
    'wp-"); redis.call("FLUSHALL") --',
    "wp-abcdefghij-%s%n%x{0.__class__}",
    "wp-abcdefghij-\t\x1b[31m",
    "sk-" + "a" * 48,
    "A" * 8000,
]


@pytest.fixture
async def replica() -> AsyncIterator[StubReplica]:
    async with stub(says("hi"), [MODEL, "other-model"]) as replica:
        yield replica


@pytest.fixture
async def running(tmp_path: Path, replica: StubReplica) -> AsyncIterator[Running]:
    async with gateway(tmp_path, replica) as running:
        yield running


def raw(url: httpx.URL, method: str, path: str, *headers: tuple[str, str | bytes]) -> tuple[int, bytes, dict[str, str]]:
    """Sends what no client library would."""
    connection = http.client.HTTPConnection(url.host, url.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=any(name == "host" for name, _ in headers))
        for name, value in headers:
            connection._buffer.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode()))  # type: ignore[attr-defined]
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "2")
        connection.endheaders(b"{}")
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


async def every(running: Running, *headers: tuple[str, str | bytes]) -> set[int]:
    """The statuses of all routes of both listeners that want a key, asked with these headers."""
    listeners = ((running.client.base_url, ROUTES), (running.admin.base_url, ADMIN_ROUTES))
    return {
        (await asyncio.to_thread(raw, url, method, path, *headers))[0]
        for url, routes in listeners
        for method, path in routes
    }


# --- black boxes: every route of both listeners


async def test_without_a_key_no_route_answers(running: Running) -> None:
    assert await every(running) == {401}


@pytest.mark.parametrize("host", HOSTILE_HOSTS)
async def test_no_host_header_gets_anyone_past_the_key(running: Running, host: str) -> None:
    """CVE-2026-48710: a path that is read from a URL built with the Host header."""
    assert await every(running, ("host", host)) <= {400, 401}


@pytest.mark.parametrize("key", INVENTED)
async def test_an_invented_key_is_a_plain_401_everywhere(running: Running, key: str) -> None:
    """CVE-2026-59822: an empty identity for an unknown bearer; CVE-2026-42208: a key's text inside SQL."""
    began = time.thread_time()

    statuses = await every(running, ("authorization", f"Bearer {key}"))

    assert statuses <= {401} or (statuses <= {400, 401} and ("\x1b" in key or len(key) > 4096))
    assert time.thread_time() - began < 5


async def test_a_user_key_opens_nothing_of_the_admin_listener(running: Running) -> None:
    """CVE-2026-35029: configuration without a look at the role."""
    for method, path in ADMIN_ROUTES:
        authorization = ("authorization", f"Bearer {running.key}")
        status, body, _ = await asyncio.to_thread(raw, running.admin.base_url, method, path, authorization)
        assert (status, b"insufficient_permissions" in body) == (403, True), path


async def test_an_admin_key_is_none_for_clients(running: Running) -> None:
    authorization = ("authorization", running.admin.headers["authorization"])

    for method, path in ROUTES:
        assert (await asyncio.to_thread(raw, running.client.base_url, method, path, authorization))[0] == 401


async def test_every_wrong_key_gets_the_same_answer(running: Running, replica: StubReplica) -> None:
    expired = (await running.gateway.keys.create("client", name="old", expires=1.0))[1]
    record, revoked = await running.gateway.keys.create("client", name="gone")
    await running.gateway.keys.revoke(record.id)
    good = ("authorization", f"Bearer {running.key}")
    asked: list[tuple[tuple[str, str | bytes], ...]] = [
        (),
        (("authorization", "Basic YTpi"),),
        (("authorization", f"Bearer {expired}"),),
        (("authorization", f"Bearer {revoked}"),),
        (("authorization", b"Bearer \xc3\xa9\xff"),),
        (good, good),
        (("authorization", "Bearer x"), good),
    ]

    answers = [
        await asyncio.to_thread(raw, running.client.base_url, "POST", "/v1/chat/completions", *headers)
        for headers in asked
    ]

    assert {status for status, _, _ in answers} == {401}
    assert len({body for _, body, _ in answers}) == 1
    assert len({tuple(sorted(set(headers) - {"date", "connection"})) for _, _, headers in answers}) == 1
    assert replica.seen == []


async def test_a_key_in_the_query_or_a_cookie_is_no_key(running: Running) -> None:
    cookie = ("cookie", f"authorization=Bearer {running.key}")

    status, _, _ = await asyncio.to_thread(
        raw, running.client.base_url, "GET", f"/v1/models?api_key={running.key}", cookie
    )

    assert status == 401


# --- what a key may


async def test_a_key_reaches_the_endpoints_of_its_scopes_and_no_others(running: Running) -> None:
    of_path = {
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
        "/v1/responses": "responses",
        "/v1/responses/resp_1": "responses",
        "/v1/embeddings": "embeddings",
        "/tokenize": "tokenize",
        "/detokenize": "tokenize",
        "/v1/models": "models",
        f"/v1/models/{MODEL}": "models",
    }
    assert set(of_path.values()) == ALL_SCOPES
    for scope in ALL_SCOPES:
        _, key = await running.gateway.keys.create("client", name=scope, scopes=(scope,))
        for path, needed in of_path.items():
            method = "GET" if "models" in path or "resp_1" in path else "POST"
            answer = await running.client.request(method, path, json={}, headers={"authorization": f"Bearer {key}"})
            assert (answer.status_code == 403) is (needed != scope), (scope, path, answer.text)
            assert ("insufficient_permissions" in answer.text) is (needed != scope)


async def test_a_model_that_a_key_may_not_ask_does_not_exist(running: Running) -> None:
    _, running.key = await running.gateway.keys.create("client", name="bound", models=("stub*",))

    allowed = await running.chat()
    hidden = await running.chat(model="other-model")
    unknown = await running.chat(model="other-mode1")
    shown = await running.client.get("/v1/models/other-model", headers=running.auth)
    listed = await running.client.get("/v1/models", headers=running.auth)

    assert allowed.status_code == 200
    assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "model_not_found")
    assert hidden.text.replace("other-model", "other-mode1") == unknown.text
    assert shown.status_code == 404
    assert [model["id"] for model in listed.json()["data"]] == [MODEL]


async def test_what_is_refused_for_its_scope_or_model_counts_against_no_limit(running: Running) -> None:
    made: Any = await running.admin.post(
        "/admin/v1/keys",
        json={"name": "few", "scopes": ["chat"], "models": [MODEL], "limits": {"requests_per_minute": 1}},
    )
    running.key = made.json()["key"]

    refused = [
        await running.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=running.auth),
        await running.chat(model="other-model"),
    ]

    assert [answer.status_code for answer in refused] == [403, 404]
    assert (await running.chat()).status_code == 200
    assert (await running.chat()).status_code == 429


# --- addresses that fail again and again


async def test_an_address_that_only_fails_is_told_to_stop_and_a_valid_key_still_passes(running: Running) -> None:
    wrong = {"authorization": "Bearer wp-abcdefghij-" + "x" * 43}

    answers = [await running.client.get("/v1/models", headers=wrong) for _ in range(102)]
    right = await running.client.get("/v1/models", headers=running.auth)

    assert [answer.status_code for answer in answers] == [401] * 100 + [429] * 2
    assert answers[-1].json()["error"]["code"] == "too_many_invalid_keys"
    assert answers[-1].headers["x-should-retry"] == "false"
    assert 0 < float(answers[-1].headers["retry-after"]) <= 60
    assert right.status_code == 200


def test_failures_are_counted_by_the_minute() -> None:
    counter = FailureCounter(free=2)

    assert [counter.failed("a", now) for now in (0.0, 1.0)] == [None, None]
    assert counter.failed("a", 20.0) == 40.0
    assert counter.failed("b", 20.0) is None
    assert counter.failed("a", 60.0) is None


def test_a_whole_network_of_ipv6_is_one_address() -> None:
    counter = FailureCounter(free=1)
    counter.failed("2001:db8::1", 0.0)

    assert counter.failed("2001:db8::ffff%eth0", 0.0) is not None
    assert counter.failed("2001:db8:0:1::1", 0.0) is None


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 1000)), max_size=50))
def test_only_so_many_addresses_are_remembered(failures: list[tuple[str, float]]) -> None:
    counter = FailureCounter(max_addresses=3)

    for address, now in failures:
        counter.failed(address, now)

    assert len(counter) <= 3


def test_a_bug_on_the_way_is_a_401() -> None:
    class Broken:
        @property
        def ring(self) -> Any:
            raise RuntimeError("s3cret")

    door = Authenticator(Broken(), clock=lambda: 0.0, wall_clock=lambda: 0.0)

    for ask in (door.client, door.any):
        with pytest.raises(Exception, match="key") as caught:
            ask({"headers": [(b"authorization", b"Bearer x")]})
        assert getattr(caught.value, "status", None) == 401
