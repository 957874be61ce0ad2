"""What is remembered of a head on a kept connection never outlives what it was made of: keys, their scopes, rules, tenants."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.authentication import Authenticator
from gateway.hot_head import HotHead, hot_head
from gateway.keys import RingHolder
from gateway.limits import Quota, Rules
from gateway.tenants import Standing
from router import Priority
from tests.gateway.stub import MODEL, Running, StubReplica, gateway, says, stub

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def replica() -> AsyncIterator[StubReplica]:
    async with stub(says("hi")) as replica:
        yield replica


@pytest.fixture
async def running(tmp_path: Path, replica: StubReplica) -> AsyncIterator[Running]:
    async with gateway(tmp_path, replica) as running:
        yield running


async def ask(running: Running, key: str, **headers: str) -> httpx.Response:
    return await running.client.post(
        "/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}", **headers}
    )


async def test_a_key_that_is_revoked_is_refused_on_the_connection_that_knew_it(
    running: Running, recognized: list[int]
) -> None:
    record, key = await running.gateway.keys.create("client", name="a")
    assert [(await ask(running, key)).status_code for _ in range(3)] == [200] * 3
    assert recognized, "of the same client, on the same connection"

    await running.gateway.keys.revoke(record.id)

    assert [(await ask(running, key)).status_code for _ in range(2)] == [401, 401]


async def test_what_a_key_may_counts_from_the_next_request(running: Running, recognized: list[int]) -> None:
    record, key = await running.gateway.keys.create("client", name="a")
    for _ in range(2):
        await ask(running, key)

    await running.gateway.keys.patch(record.id, {"scopes": ("completions",)})
    refused = await ask(running, key)
    await running.gateway.keys.patch(record.id, {"scopes": (), "limits": {"requests_per_minute": 1}})
    limited = [(await ask(running, key)).status_code for _ in range(2)]

    assert refused.status_code == 403
    assert limited == [200, 429], "the first one that counts, and the next"
    assert len(recognized) == 4


async def test_rules_that_are_loaded_anew_count_from_the_next_request(running: Running, recognized: list[int]) -> None:
    _, key = await running.gateway.keys.create("client", name="a", tenant="acme")
    for _ in range(2):
        await ask(running, key)

    running.gateway.public.set_rules(Rules(Quota(requests_per_minute=1)), {})

    assert [(await ask(running, key)).status_code for _ in range(2)] == [200, 429]
    assert len(recognized) == 3


async def test_each_request_of_a_known_head_has_an_id_of_its_own(running: Running, recognized: list[int]) -> None:
    ids = {(await ask(running, running.key)).headers["x-request-id"] for _ in range(3)}
    given = [(await ask(running, running.key, **{"x-request-id": "mine"})).headers["x-request-id"] for _ in range(2)]

    assert len(ids) == 3
    assert given == ["mine", "mine"]
    assert len(recognized) == 3


async def test_a_connection_that_is_kept_keeps_no_keys_of_before(running: Running, recognized: list[int]) -> None:
    for _ in range(2):
        await ask(running, running.key)
    ring = weakref.ref(running.gateway.keys.ring)

    await running.gateway.keys.create("client", name="new")
    gc.collect()

    assert recognized, "the head is still known"
    assert ring() is None


async def test_a_key_that_expires_is_not_current_any_more(tmp_path: Path, running: Running) -> None:
    now = time.time()
    record, key = await running.gateway.keys.create("client", name="a", expires=now + 100)
    moment = [now]
    ring = running.gateway.keys.ring
    door = Authenticator(RingHolder(ring), clock=lambda: 0.0, wall_clock=lambda: moment[0])
    assert door.client({"headers": [(b"authorization", b"Bearer " + key.encode())]}) == record
    assert door.is_current(record, ring)

    moment[0] = now + 101

    assert not door.is_current(record, ring)


def head(*headers: tuple[bytes, bytes], path: str = "/v1/chat/completions") -> HotHead:
    scope: dict[str, Any] = {"method": "POST", "path": path, "query_string": b"", "headers": list(headers)}
    found = hot_head(scope)
    assert found is not None
    return found


@pytest.mark.parametrize("highest", list(Priority))
def test_a_priority_is_at_most_the_tenants_whatever_was_asked(highest: Priority) -> None:
    for asked in Priority:
        known = head((b"x-warmpath-priority", asked.name.lower().encode()))

        assert known.priority(highest) == max(highest, asked)
        assert known.priority(Standing().priority) == max(Standing().priority, asked)
    assert head().priority(highest) == highest


def test_traces_are_told_of_their_headers_only() -> None:
    known = head((b"traceparent", b"a"), (b"authorization", b"Bearer x"), (b"baggage", b"b"))

    assert known.trace_headers == [(b"traceparent", b"a"), (b"baggage", b"b")]


def test_only_hot_routes_have_a_head() -> None:
    assert hot_head({"method": "GET", "path": "/v1/models", "query_string": b"", "headers": []}) is None
    assert hot_head({"method": "GET", "path": "/v1/chat/completions", "query_string": b"", "headers": []}) is None
