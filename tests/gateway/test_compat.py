"""What other routers' scripts say to a gateway, and the answers they know."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.stub import MODEL, gateway, says, stub
from tests.gateway.test_admin import Admin, build

URL = "http://127.0.0.1:8100"


@pytest.fixture
async def admin(tmp_path: Path) -> Admin:
    return await build(tmp_path)


async def test_a_worker_is_added_shown_and_removed_as_smg_does_it(admin: Admin) -> None:
    added = await admin.call(
        "POST", "/workers", json={"url": URL, "model_id": "m", "api_key": "s3cret", "priority": 50}
    )
    worker_id = added.json()["worker_id"]
    listed = (await admin.call("GET", "/workers")).json()
    shown = [
        (await admin.call("GET", f"/workers/{name}")).json()
        for name in (worker_id, "127-0-0-1-8100", "http%3A%2F%2F127.0.0.1%3A8100")
    ]
    again = await admin.call("POST", "/workers", json={"url": URL + "/"})
    removed = await admin.call("DELETE", f"/workers/{worker_id}")
    gone = await admin.call("GET", f"/workers/{worker_id}")

    assert added.status_code == 202
    assert added.headers["location"] == f"/workers/{worker_id}"
    assert added.json() | {"message": ""} == {
        "status": "accepted",
        "worker_id": str(uuid.UUID(worker_id)),
        "url": URL,
        "location": f"/workers/{worker_id}",
        "message": "",
    }
    worker = {
        "id": worker_id,
        "url": URL,
        "model_id": "m",
        "worker_type": "regular",
        "connection_mode": "http",
        "is_healthy": False,
        "status": "not_ready",
        "load": 0,
        "priority": 50,
        "cost": 1.0,
    }
    assert listed == {
        "workers": [worker],
        "total": 1,
        "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 1},
    }
    assert shown == [worker] * 3
    assert (again.status_code, again.json()["code"]) == (409, "WORKER_ALREADY_EXISTS")
    assert (removed.status_code, removed.json()["worker_id"]) == (202, worker_id)
    assert (gone.status_code, gone.json()["code"]) == (404, "WORKER_NOT_FOUND")


async def test_a_url_is_added_listed_and_removed_as_the_older_routers_do_it(admin: Admin) -> None:
    added = await admin.call("POST", f"/add_worker?url={URL}")
    listed = await admin.call("GET", "/list_workers")
    again = await admin.call("POST", f"/add_worker?url={URL}")
    removed = await admin.call("POST", "/remove_worker?url=http://localhost:8100")
    gone = await admin.call("POST", f"/remove_worker?url={URL}")

    assert (added.status_code, added.text) == (200, f"Successfully added worker: {URL}")
    assert listed.json() == {"urls": [URL]}
    assert again.status_code == 400
    assert (removed.status_code, removed.text) == (200, f"Successfully removed worker: {URL}")
    assert gone.status_code == 404
    assert admin.context.router.replicas() == []


async def test_what_they_add_has_no_lease_and_is_no_workers_to_take(admin: Admin) -> None:
    await admin.call("POST", f"/add_worker?url={URL}")
    admin.now[0] += 1e6
    admin.context.registry.expire(admin.now[0])

    taken = await admin.register("127-0-0-1-8100")

    assert (await admin.replica("127-0-0-1-8100"))["lease_expires"] is None
    assert taken.status_code == 409


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "http://10.0.0.1:8100",
        "http://127.0.0.1:6379",
        "http://user:pw@127.0.0.1:8100",
        "http://[::ffff:10.0.0.1]:8100",
        "http://2852039166:8100",
        "file:///etc/passwd",
        "zzz",
        "",
    ],
)
async def test_the_guard_of_addresses_stands_here_too(admin: Admin, url: str) -> None:
    posted = await admin.call("POST", "/workers", json={"url": url})
    older = await admin.call("POST", "/add_worker", params={"url": url})

    assert (posted.status_code, posted.json()["code"]) == (400, "BAD_REQUEST")
    assert older.status_code == 400
    assert admin.context.router.replicas() == []


@pytest.mark.parametrize(
    "change",
    [
        {"worker_type": "prefill"},
        {"connection_mode": "grpc"},
        {"bootstrap_port": 1},
        {"model_id": "../m"},
        {"api_key": "a\r\nb"},
        {"url": 1},
        {"disable_health_check": True},
    ],
)
async def test_a_worker_of_another_kind_is_refused(admin: Admin, change: dict[str, Any]) -> None:
    answer = await admin.call("POST", "/workers", json={"url": URL} | change)

    assert answer.status_code == 400
    assert admin.context.router.replicas() == []


async def test_one_unlike_the_others_of_its_model_is_refused(admin: Admin) -> None:
    await admin.register()

    answer = await admin.call("POST", "/workers", json={"url": URL, "model_id": "m"})

    assert (answer.status_code, answer.json()["code"]) == (409, "MODEL_MISMATCH")


async def test_there_is_room_for_only_so_many(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many is tests/gateway/test_registry.py's to say."""
    monkeypatch.setattr("gateway.admin.registry._MAX_REPLICAS", 4)
    for port in range(30000, 30004):
        await admin.call("POST", f"/add_worker?url=http://127.0.0.1:{port}")

    full = await admin.call("POST", "/workers", json={"url": URL})

    assert full.status_code == 409
    assert "4 replicas" in full.json()["error"]


async def test_a_worker_that_was_added_serves(tmp_path: Path) -> None:
    async with stub(says("hi")) as first, stub(says("hi")) as second, gateway(tmp_path, first) as running:
        added = await running.admin.post("/workers", json={"url": second.url, "api_key": "s3cret"})
        name = added.json()["worker_id"]
        while (await running.admin.get(f"/workers/{name}")).json()["status"] != "ready":
            pass
        await running.admin.post("/remove_worker", params={"url": first.url})

        answer = await running.chat()

        assert answer.status_code == 200
        assert [seen.headers["authorization"] for seen in second.seen] == ["Bearer s3cret"]
        assert (await running.admin.get(f"/workers/{name}")).json()["model_id"] == MODEL
