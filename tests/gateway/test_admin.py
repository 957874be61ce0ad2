import asyncio
import dataclasses
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

from gateway.admin import rest
from gateway.admin.addresses import Address, Resolve, resolve_host
from gateway.admin.bodies import DecisionBody, RequestRates, decision_body
from gateway.admin.context import AdminContext, Insight
from gateway.admin.idempotency import Idempotency
from gateway.admin.live import Live
from gateway.admin.registry import Registry
from gateway.admin.replicas import replica_bodies
from gateway.admin.rest import Endpoint
from gateway.admin.routes import ENDPOINTS, admin_app
from gateway.aliases import Aliases
from gateway.api_document import Needs
from gateway.api_error import ApiError
from gateway.job import Record
from gateway.keys import GivenKey, KeyKind, KeyRecord, KeyStoreError
from gateway.keys.file_storage import FileStorage
from gateway.keys.opening import open_key_store
from gateway.model_cards import ModelCards
from gateway.reload_plan import Plan
from gateway.settings import Settings
from gateway.settings_loader import SettingsError, load_settings
from gateway.telemetry import Telemetry, render
from router import Candidate, Decision, Outcome, Query, ReplicaView, Router, Trust
from router.wire import Hello, Load, ReplicaSpec
from tests.serving import eventually

WALL_OFFSET = 1_800_000_000.0
WORKER = {"url": "http://127.0.0.1:8101", "model": "m", "epoch": "e1", "credential": "s3cret"}

RATES = RequestRates(3, 0, 1.5, 0.0)

KEYLESS = [endpoint for endpoint in ENDPOINTS if endpoint.needs is Needs.NO_KEY]
KEYED = [endpoint for endpoint in ENDPOINTS if endpoint.needs is not Needs.NO_KEY]
HOSTILE_HOSTS = ["example.com", "a/health?", "a/health#", "health", "[::1]", "x@y", "127.0.0.1:8001/health?x=", ""]


def name_of(endpoint: Endpoint[AdminContext]) -> str:
    return f"{endpoint.method} {endpoint.path}"


keyed = pytest.mark.parametrize("endpoint", KEYED, ids=name_of)


@dataclass
class Admin:
    """An admin listener with everything real behind it but time, watching and routing of real prompts."""

    app: ASGIApp
    context: AdminContext
    keys: dict[str, str]
    now: list[float]
    asked: list[tuple[bytes, str | None]]
    records: list[Record]
    not_ready: list[str]

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys.get(key, key)}"} if key else {}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001", headers=headers)

    async def call(self, method: str, path: str, key: str | None = "admin", **how: Any) -> httpx.Response:
        async with self.client(key) as client:
            return await client.request(method, path, **how)

    async def register(self, replica_id: str = "w1", key: str = "join", **changes: Any) -> httpx.Response:
        return await self.call("PUT", f"/admin/v1/replicas/{replica_id}", key, json=WORKER | changes)

    async def replica(self, replica_id: str = "w1") -> dict[str, Any]:
        answer = await self.call("GET", f"/admin/v1/replicas/{replica_id}")
        found: dict[str, Any] = answer.json()
        return found


@dataclass
class Explain:
    asked: list[tuple[bytes, str | None]] = field(default_factory=list)

    async def __call__(self, body: bytes, group: str | None) -> tuple[Decision, bool]:
        self.asked.append((body, group))
        if b"unknown" in body:
            raise ApiError(404, "model_not_found", "The model 'unknown' does not exist.", param="model")
        if b"bug" in body:
            raise RuntimeError("s3cret detail")
        return a_decision(), False


def a_decision() -> Decision:
    candidate = Candidate("w1", True, "", 32, 68, 0.5, 0.1, 0.6, Trust.EXACT, 3)
    return Decision("w1", 32, 100, "longest_match", 2.0, "cost", (candidate,))


async def build(folder: Path, settings: Settings | None = None, resolve: Resolve = resolve_host) -> Admin:
    now = [100.0]
    keys = await open_key_store(Settings(state_dir=folder), clock=lambda: now[0] + WALL_OFFSET)
    router = Router()
    explain = Explain()
    records: list[Record] = []
    not_ready: list[str] = []
    current = settings or Settings()
    aliases = Aliases(current.aliases)

    async def reload() -> Plan:
        if not_ready == ["bad settings"]:
            raise SettingsError(["server.port: too high", "aliases: a loop"])
        return Plan(current, ("limits.requests_per_minute",), ("server.port",))

    async def metrics(replicas: Sequence[ReplicaView]) -> bytes:
        return render(Telemetry().families(3), replicas, now[0])

    async def decisions() -> list[DecisionBody]:
        return [decision_body(record, record.decision, WALL_OFFSET) for record in records if record.decision]

    context = AdminContext(
        current_settings=lambda: current,
        reload=reload,
        cards=ModelCards(),
        aliases=aliases,
        live=Live(lambda: (replica_bodies(context), RATES), lambda: now[0], tick_s=0.01),
        keys=keys,
        router=router,
        registry=Registry(
            router,
            lease_s=15,
            forget_after_s=60,
            start_watch=lambda replica_id, spec: None,
            stop_watch=lambda replica_id: None,
        ),
        insight=Insight(metrics, decisions, unready=lambda: not_ready[0] if not_ready else None, rates=lambda: RATES),
        resolve=resolve,
        explain=explain,
        clock=lambda: now[0],
        wall_clock=lambda: now[0] + WALL_OFFSET,
        version="1.2.3",
    )
    kinds: tuple[KeyKind, ...] = ("client", "admin", "join")
    texts: dict[str, str] = {kind: (await keys.create(kind, name=kind))[1] for kind in kinds}
    return Admin(admin_app(context), context, texts, now, explain.asked, records, not_ready)


@pytest.fixture
async def admin(tmp_path: Path) -> Admin:
    return await build(tmp_path)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, after a look at whether it has OpenAI's shape."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def path_of(endpoint: Endpoint[AdminContext]) -> str:
    return endpoint.path.replace("{replica_id}", "w1").replace("{key_id}", "abc").replace("{worker_id:path}", "w1")


# --- who may what: every endpoint there is


@keyed
async def test_without_a_key_nothing_is_answered(admin: Admin, endpoint: Endpoint[AdminContext]) -> None:
    for headers in ({}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Basic YTpi"}):
        answer = await admin.call(endpoint.method, path_of(endpoint), key=None, headers=headers, json={})

        assert answer.status_code == 401
        assert error_of(answer)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@keyed
async def test_an_invented_expired_or_revoked_key_is_no_key(admin: Admin, endpoint: Endpoint[AdminContext]) -> None:
    keys = admin.context.keys
    expired = (await keys.create("admin", name="old", expires=1.0))[1]
    record, revoked = await keys.create("admin", name="gone")
    await keys.revoke(record.id)

    for text in ("x", "null", "wpa-abcdefghij-" + "x" * 43, admin.keys["admin"][:-1], expired, revoked):
        answer = await admin.call(endpoint.method, path_of(endpoint), key=text, json={})
        assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")


@keyed
async def test_a_clients_key_opens_nothing(admin: Admin, endpoint: Endpoint[AdminContext]) -> None:
    answer = await admin.call(endpoint.method, path_of(endpoint), key="client", json={})

    assert answer.status_code == 403
    assert error_of(answer) | {"message": ""} == {
        "message": "",
        "type": "permission_error",
        "param": None,
        "code": "insufficient_permissions",
    }


@keyed
async def test_a_join_token_reaches_only_registration(admin: Admin, endpoint: Endpoint[AdminContext]) -> None:
    answer = await admin.call(endpoint.method, path_of(endpoint), key="join", json={})

    registers = (endpoint.method, endpoint.path.removeprefix("/admin/v1/replicas/{replica_id}")) in [
        ("PUT", ""),
        ("POST", "/heartbeat"),
        ("DELETE", ""),
    ]
    assert (answer.status_code == 403) is not registers


@keyed
@pytest.mark.parametrize("host", HOSTILE_HOSTS)
async def test_no_host_header_opens_anything(admin: Admin, endpoint: Endpoint[AdminContext], host: str) -> None:
    answer = await admin.call(endpoint.method, path_of(endpoint), key=None, headers={"host": host}, json={})

    assert answer.status_code == 401


@keyed
async def test_two_keys_are_no_key(admin: Admin, endpoint: Endpoint[AdminContext]) -> None:
    headers = [("authorization", f"Bearer {admin.keys['admin']}")] * 2
    answer = await admin.call(endpoint.method, path_of(endpoint), key=None, headers=headers, json={})

    assert answer.status_code == 401


@keyed
async def test_a_key_in_the_query_or_a_cookie_is_no_key(admin: Admin, endpoint: Endpoint[AdminContext]) -> None:
    text = admin.keys["admin"]
    answer = await admin.call(
        endpoint.method,
        f"{path_of(endpoint)}?key={text}&api_key={text}",
        key=None,
        headers={"cookie": f"authorization=Bearer {text}", "x-api-key": text},
        json={},
    )

    assert answer.status_code == 401


def test_only_these_need_no_key() -> None:
    assert sorted(endpoint.path for endpoint in KEYLESS) == [
        "/health",
        "/metrics",
        "/openapi.json",
        "/openapi/public.json",
        "/ready",
    ]
    assert {endpoint.path for endpoint in KEYED if not endpoint.path.startswith("/admin/v1/")} == {
        *("/workers", "/workers/{worker_id:path}", "/list_workers", "/add_worker", "/remove_worker")
    }


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/admin",
        "/admin/v1",
        "/admin/v1/",
        "/admin/v1/replicas/",
        "//admin/v1/replicas",
        "/admin//v1/replicas",
        "/admin/v1/replicas/w1/",
        "/admin/v1/replicas/w1%2fkeys",
        "/admin/v1/nothing",
        "/v1/models",
        "/docs",
        "/metrics/",
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "a/health?"])
async def test_other_paths_are_404_in_shape_and_never_a_redirect(admin: Admin, path: str, host: str) -> None:
    for key in ("admin", None):
        answer = await admin.call("GET", f"http://127.0.0.1{path}", key, headers={"host": host})
        assert (answer.status_code, error_of(answer)["code"]) in ((404, "not_found"), (404, "replica_not_found"))


async def test_an_error_is_answered_without_another_thread(admin: Admin) -> None:
    """Replicas beat at a gateway that has restarted and get 404; the framework's threads are 15 ms of imports on the loop."""
    before = set(threading.enumerate())

    answers = [await admin.call("POST", "/admin/v1/replicas/w1/heartbeat", "join", json={"epoch": "e1"})]
    answers.append(await admin.call("GET", "/nothing/here"))

    assert [answer.status_code for answer in answers] == [404, 404]
    assert set(threading.enumerate()) <= before


async def test_another_method_is_405_and_says_which_are_allowed(admin: Admin) -> None:
    answer = await admin.call("POST", "/admin/v1/replicas/w1", json={})

    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert {"PUT", "GET", "PATCH", "DELETE"} <= set(answer.headers["allow"].split(", "))


async def test_percent_encoded_paths_need_the_same_key(admin: Admin) -> None:
    assert (await admin.call("GET", "/%61dmin/v1/%6beys", key=None)).status_code == 401


async def test_the_callers_request_id_comes_back_if_it_is_sane(admin: Admin) -> None:
    sane = await admin.call("GET", "/health", headers={"x-request-id": "abc-1"})
    odd = await admin.call("GET", "/nothing", headers={"x-request-id": "a b\t"})

    assert sane.headers["x-request-id"] == "abc-1"
    assert odd.headers["x-request-id"] != "a b\t"


# --- bodies


BROKEN_BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b'{"epoch": "e1"} {}', 400, "invalid_json"),
    (b"\xff\xfe{}", 400, "invalid_json"),
    (b'{"epoch": "\xff"}', 400, "invalid_json"),
    (b"[" * 50_000, 400, "invalid_value"),
    (b'{"epoch": ' + b"[" * 50_000, 400, "invalid_value"),
    (b'{"epoch": 1}', 400, "invalid_value"),
    (b'{"epoch": "e1", "role": "admin"}', 400, "invalid_value"),
    (b"{}", 400, "invalid_value"),
    (b'{"epoch": "' + b"e" * 70_000 + b'"}', 413, "request_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), BROKEN_BODIES)
async def test_a_body_that_is_not_what_was_asked_for(admin: Admin, body: bytes, status: int, code: str) -> None:
    answer = await admin.call(
        "POST", "/admin/v1/replicas/w1/heartbeat", content=body, headers={"content-type": "application/json"}
    )

    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


async def test_the_field_at_fault_is_named(admin: Admin) -> None:
    for body, param in (({"nam": "x"}, "nam"), ({"name": "x", "debug": 1}, "debug"), ({}, "name")):
        error = error_of(await admin.call("POST", "/admin/v1/keys", json=body))
        assert error["param"] == param


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/json2", ""])
async def test_only_json_is_read(admin: Admin, kind: str) -> None:
    answer = await admin.call("POST", "/admin/v1/keys", content=b'{"name": "x"}', headers={"content-type": kind})

    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    assert len(admin.context.keys.ring.records()) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/v1/keys", '{"name": "a", "name": "b"}'),
        ("/admin/v1/keys", '{"name": "a", "limits": {"requests_per_minute": 1, "requests_per_minute": 2}}'),
        ("/admin/v1/replicas", '{"url": "http://127.0.0.1:8101", "url": "http://127.0.0.1:8102"}'),
        ("/workers", '{"url": "http://127.0.0.1:8101", "url": "http://127.0.0.1:8102"}'),
    ],
)
async def test_a_name_that_is_there_twice_means_nothing(admin: Admin, path: str, body: str) -> None:
    answer = await admin.call("POST", path, content=body, headers={"content-type": "application/json"})

    assert (answer.status_code, error_of(answer)["code"]) == (400, "duplicate_key")


async def test_a_compressed_body_is_refused_unread(admin: Admin) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    answer = await admin.call("POST", "/admin/v1/keys", content='{"name": "a"}', headers=headers)

    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_encoding")


async def test_a_body_without_an_announced_length_is_counted_while_it_comes(admin: Admin) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1024

    answer = await admin.call("POST", "/admin/v1/keys", content=endless(), headers={"content-type": "application/json"})

    assert answer.status_code == 413


async def send_raw(app: ASGIApp, key: str, messages: Sequence[Message]) -> list[Message]:
    """A request whose body comes in `messages`, and then nothing more."""
    pending = list(messages)
    sent: list[Message] = []

    async def receive() -> Message:
        if pending:
            return pending.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/admin/v1/keys",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return sent


async def test_a_body_that_does_not_come_is_waited_for_only_so_long(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "_BODY_S", 0.01)

    sent = await send_raw(admin.app, admin.keys["admin"], [{"type": "http.request", "body": b"{", "more_body": True}])

    assert sent[0]["status"] == 408


async def test_a_caller_who_leaves_while_sending_changes_nothing(admin: Admin) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"name": "x"}', "more_body": True},
        {"type": "http.disconnect"},
    ]

    await send_raw(admin.app, admin.keys["admin"], messages)

    assert len(admin.context.keys.ring.records()) == 3


# --- replicas


async def test_a_worker_registers_beats_and_says_goodbye(admin: Admin) -> None:
    registered = await admin.register(lease_s=10)
    admin.now[0] += 5
    beat = await admin.call("POST", "/admin/v1/replicas/w1/heartbeat", "join", json={"epoch": "e1"})
    gone = await admin.call("DELETE", "/admin/v1/replicas/w1", "join")
    after = await admin.call("POST", "/admin/v1/replicas/w1/heartbeat", "join", json={"epoch": "e1"})

    assert registered.json() == {"lease_s": 10, "lease_expires": WALL_OFFSET + 110}
    assert beat.json() == {"lease_s": 10, "lease_expires": WALL_OFFSET + 115}
    assert (gone.status_code, gone.json()) == (200, {"status": "removed"})
    assert (after.status_code, error_of(after)["code"]) == (404, "replica_not_found")


async def test_the_log_tells_what_changed_and_not_each_heartbeat(
    admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmpath.audit")

    await admin.register()
    await admin.call("POST", "/admin/v1/replicas/w1/heartbeat", "join", json={"epoch": "e1"})
    await admin.call("HEAD", "/admin/v1/replicas", "admin")
    await admin.call("POST", "/admin/v1/replicas/a%0Ab%22/drain", "admin", json={})
    await admin.call("POST", "/add_worker?url=http://user:s3cret@127.0.0.1:8100", "admin")
    await admin.call("POST", "/admin/v1/keys", "client", json={"name": "x"})
    await admin.call("DELETE", "/admin/v1/replicas/w1", "join")

    told = [json.loads(message) for message in caplog.messages]
    join, operator = (
        next(record for record in admin.context.keys.ring.records() if record.kind == kind)
        for kind in ("join", "admin")
    )
    assert told == [
        audited(join, "PUT /admin/v1/replicas/{replica_id}", {"replica_id": "w1"}, 200),
        audited(
            operator,
            "POST /admin/v1/replicas/{replica_id}/drain",
            {"replica_id": 'a\nb"'},
            404,
            code="replica_not_found",
        ),
        audited(operator, "POST /add_worker", {}, 400),
        audited(join, "DELETE /admin/v1/replicas/{replica_id}", {"replica_id": "w1"}, 200),
    ]
    assert "s3cret" not in caplog.text
    assert all("\n" not in message for message in caplog.messages)


def audited(key: KeyRecord, action: str, target: dict[str, str], status: int, **more: str) -> dict[str, object]:
    return {"key_id": key.id, "key_kind": key.kind, "action": action, "target": target, "status": status, **more}


async def test_a_registered_replica_is_shown_whole_but_without_its_credential(admin: Admin) -> None:
    await admin.register()
    await admin.register("w0", url="http://127.0.0.1:8100")

    listed = await admin.call("GET", "/admin/v1/replicas")
    shown = await admin.call("GET", "/admin/v1/replicas/w1")

    assert [replica["id"] for replica in listed.json()["replicas"]] == ["w0", "w1"]
    assert listed.json()["replicas"][1] == shown.json()
    assert shown.json() == {
        "id": "w1",
        "url": "http://127.0.0.1:8101",
        "model": "m",
        "revision": "",
        "kind": "warmpath",
        "priority": False,
        "epoch": "e1",
        "lease_expires": WALL_OFFSET + 115,
        "healthy": False,
        "cordoned": False,
        "draining": False,
        "drain": None,
        "weight": 1.0,
        "breaker": "closed",
        "mismatch": "",
        "trust": "learning",
        "inflight": 0,
        "promised_tokens": 0,
        "prefill_tok_s": None,
        "fixed_s": None,
        "bytes_per_token": None,
        "capacity_blocks": None,
        "capacity_tokens": 1 << 20,
        "capacity_learned": False,
        "indexed_blocks": 0,
        "expected_blocks": 0,
        "indexed": True,
        "cached_tokens_precision": None,
        "cached_tokens_recall": None,
        "load": None,
    }
    assert "s3cret" not in listed.text


async def test_what_a_replica_says_of_its_load_is_shown(admin: Admin) -> None:
    await admin.register()
    hello = Hello(
        epoch="e1",
        seq=0,
        model="m",
        block_size=16,
        tokenizer_digest="t",
        numerics="n",
        capacity_blocks=500,
        max_num_seqs=8,
        started_at=0.0,
    )
    load = Load(
        seq=0,
        ts=0.0,
        waiting=1,
        waiting_uncached_tokens=30,
        running=2,
        kv_used_blocks=40,
        prefill_tok_s=900.0,
        step_ms=5.0,
        prompt_tokens_total=1000,
        cached_tokens_total=600,
        generated_tokens_total=70,
    )
    admin.context.router.apply("w1", hello, now=100.0)
    admin.context.router.apply("w1", load, now=100.0)

    shown = await admin.replica()

    assert (shown["trust"], shown["capacity_blocks"], shown["prefill_tok_s"]) == ("exact", 500, 900.0)
    assert shown["load"] == {
        "waiting": 1,
        "waiting_uncached_tokens": 30,
        "running": 2,
        "kv_used_blocks": 40,
        "prefill_tok_s": 900.0,
        "step_ms": 5.0,
        "prompt_tokens_total": 1000,
        "cached_tokens_total": 600,
        "generated_tokens_total": 70,
    }


async def test_a_static_replica_has_no_lease(admin: Admin) -> None:
    spec = ReplicaSpec(url="http://10.0.0.1:8000", model="m", kind="openai")
    admin.context.registry.add_static("s1", spec, now=0.0)

    assert (await admin.replica("s1"))["lease_expires"] is None


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254:8100",
        "http://10.0.0.1:8100",
        "http://0.0.0.0:8100",
        "http://[::ffff:10.0.0.1]:8100",
        "http://2852039166:8100",
        "http://127.0.0.1:22",
        "http://127.0.0.1:6379",
        "http://user:pw@127.0.0.1:8100",
        "gopher://127.0.0.1:8100",
        "http://127.0.0.1:8100/x",
        "",
    ],
)
async def test_a_replica_outside_the_allowed_networks_is_refused(admin: Admin, url: str) -> None:
    answer = await admin.register(url=url)

    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "address_not_allowed", "url")
    assert admin.context.router.replicas() == []


async def test_what_was_checked_is_what_will_be_called(tmp_path: Path) -> None:
    """A name that points into the allowed network at registration may point elsewhere later."""

    async def resolve(host: str, port: int) -> Sequence[Address]:
        return await resolve_host("10.0.0.7", port)

    admin = await build(tmp_path, load_settings(flags={"registry": {"networks": ["10.0.0.0/8"]}}), resolve)

    await admin.register(url="http://rebinding.example:8100")

    assert admin.context.router.spec("w1").url == "http://10.0.0.7:8100"


@pytest.mark.parametrize("replica_id", ["W1", "a.b", "-a", "a" * 64, "%0a", "a%20b", "%C3%A9"])
async def test_an_odd_id_is_refused(admin: Admin, replica_id: str) -> None:
    answer = await admin.register(replica_id)

    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    "change",
    [{"model": "../m"}, {"kind": "vllm"}, {"credential": "a\r\nb"}, {"lease_s": -1}, {"lease_s": "x"}, {"x": 1}],
)
async def test_an_odd_registration_is_refused(admin: Admin, change: dict[str, Any]) -> None:
    answer = await admin.register(**change)

    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")


async def test_an_id_cannot_be_taken_over(admin: Admin) -> None:
    await admin.register()
    admin.keys["other"] = (await admin.context.keys.create("join", name="other"))[1]

    taken = await admin.register(key="other")
    moved = await admin.register(url="http://127.0.0.1:8102")
    beat = await admin.call("POST", "/admin/v1/replicas/w1/heartbeat", "other", json={"epoch": "e1"})
    gone = await admin.call("DELETE", "/admin/v1/replicas/w1", "other")

    assert [(answer.status_code, error_of(answer)["code"]) for answer in (taken, moved, beat, gone)] == [
        (409, "replica_conflict"),
        (409, "replica_conflict"),
        (403, "insufficient_permissions"),
        (403, "insufficient_permissions"),
    ]


async def test_a_replica_unlike_the_others_of_its_model_is_refused(admin: Admin) -> None:
    await admin.register()

    answer = await admin.register("w2", url="http://127.0.0.1:8102", kind="openai")

    assert (answer.status_code, error_of(answer)["code"]) == (409, "model_mismatch")


async def test_a_patch_changes_what_it_names_and_nothing_else(admin: Admin) -> None:
    await admin.register()

    heavier = await admin.call("PATCH", "/admin/v1/replicas/w1", json={"weight": 2.5})
    cordoned = await admin.call("PATCH", "/admin/v1/replicas/w1", json={"cordoned": True})

    assert (heavier.json()["weight"], heavier.json()["cordoned"]) == (2.5, False)
    assert (cordoned.json()["weight"], cordoned.json()["cordoned"]) == (2.5, True)


@pytest.mark.parametrize("patch", [{"weight": 0}, {"weight": -1}, {"weight": 1e9}, {"draining": True}, {"cordoned": 1}])
async def test_an_odd_patch_is_refused(admin: Admin, patch: dict[str, Any]) -> None:
    await admin.register()

    assert (await admin.call("PATCH", "/admin/v1/replicas/w1", json=patch)).status_code == 400


async def test_draining_shows_how_much_still_runs(admin: Admin) -> None:
    await admin.register()
    router = admin.context.router
    router.set_health("w1", True, now=100.0)
    query = Query(model="m", names=[], num_tokens=10)
    decision = router.route(query, now=100.0, draw=0.0)
    assert isinstance(decision, Decision)
    reservation = router.begin(decision, query, "r", now=100.0)

    started = await admin.call("POST", "/admin/v1/replicas/w1/drain", json={"deadline_s": 30})
    admin.now[0] += 31
    late = (await admin.replica())["drain"]
    router.finish(reservation, admin.now[0], Outcome.OK, cached_tokens=None)
    done = (await admin.replica())["drain"]
    back = await admin.call("DELETE", "/admin/v1/replicas/w1/drain")

    deadline = WALL_OFFSET + 130
    assert started.json() == {"inflight": 1, "done": False, "overdue": False, "deadline": deadline}
    assert late == {"inflight": 1, "done": False, "overdue": True, "deadline": deadline}
    assert done == {"inflight": 0, "done": True, "overdue": False, "deadline": deadline}
    assert (back.json()["draining"], back.json()["drain"]) == (False, None)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("PATCH", "", {}),
        ("DELETE", "", None),
        ("POST", "/heartbeat", {"epoch": "e"}),
        ("POST", "/drain", {}),
        ("DELETE", "/drain", None),
    ],
)
async def test_an_unknown_replica_is_404(admin: Admin, method: str, path: str, body: object) -> None:
    answer = await admin.call(method, f"/admin/v1/replicas/nobody{path}", json=body)

    assert (answer.status_code, error_of(answer)["code"]) == (404, "replica_not_found")


async def test_what_did_not_change_looks_the_same_although_clocks_are_never_read_at_once(admin: Admin) -> None:
    await admin.register()
    shaky = dataclasses.replace(admin.context, wall_clock=lambda: admin.now[0] + WALL_OFFSET + 3e-6)

    assert replica_bodies(shaky) == replica_bodies(admin.context)


async def test_an_operator_adds_a_server_that_stays(admin: Admin) -> None:
    added = await admin.call(
        "POST", "/admin/v1/replicas", json={"url": "http://127.0.0.1:8100", "credential": "s3cret", "priority": True}
    )
    again = await admin.call("POST", "/admin/v1/replicas", json={"url": "http://127.0.0.1:8100"})
    outside = await admin.call("POST", "/admin/v1/replicas", json={"url": "http://10.0.0.1:8100"})
    odd = await admin.call("POST", "/admin/v1/replicas", json={"url": "http://127.0.0.1:8101", "id": "../x"})

    assert added.status_code == 201
    shown = added.json()
    assert (shown["id"], shown["kind"], shown["priority"], shown["lease_expires"]) == (
        *("127-0-0-1-8100", "openai", True, None),
    )
    assert "s3cret" not in added.text
    assert [(answer.status_code, error_of(answer)["code"]) for answer in (again, outside, odd)] == [
        (409, "replica_conflict"),
        (400, "address_not_allowed"),
        (400, "invalid_value"),
    ]


async def test_an_operator_ends_a_models_service_only_on_purpose(admin: Admin) -> None:
    for replica_id in ("w1", "w2"):
        await admin.register(replica_id)
        admin.context.router.set_health(replica_id, True, now=100.0)
    await admin.register("other", url="http://127.0.0.1:8102", model="n")
    admin.context.router.set_health("other", True, now=100.0)

    first = await admin.call("DELETE", "/admin/v1/replicas/w1")
    last = await admin.call("DELETE", "/admin/v1/replicas/w2")
    forced = await admin.call("DELETE", "/admin/v1/replicas/w2?force=true")
    goodbye = await admin.call("DELETE", "/admin/v1/replicas/other", "join")

    assert first.status_code == 200
    assert (last.status_code, error_of(last)["code"]) == (409, "last_replica")
    assert (forced.status_code, goodbye.status_code) == (200, 200)


async def test_a_replica_that_is_down_may_go_although_it_is_the_last(admin: Admin) -> None:
    await admin.register()

    assert (await admin.call("DELETE", "/admin/v1/replicas/w1")).status_code == 200


async def test_a_reload_says_what_changed_or_every_fault(admin: Admin) -> None:
    good = await admin.call("POST", "/admin/v1/reload")
    admin.not_ready.append("bad settings")
    bad = await admin.call("POST", "/admin/v1/reload")

    assert good.json() == {"changed": ["limits.requests_per_minute"], "needs_restart": ["server.port"]}
    error = error_of(bad)
    assert (bad.status_code, error["code"]) == (400, "invalid_settings")
    assert "server.port: too high" in error["message"]
    assert "aliases: a loop" in error["message"]


async def test_a_model_shows_its_pool(admin: Admin) -> None:
    await admin.register()
    await admin.register("w2")
    admin.context.router.set_health("w2", True, now=100.0)
    load = Load(
        seq=0,
        ts=0.0,
        waiting=4,
        waiting_uncached_tokens=30,
        running=2,
        kv_used_blocks=40,
        prefill_tok_s=900.0,
        step_ms=5.0,
        prompt_tokens_total=1000,
        cached_tokens_total=600,
        generated_tokens_total=70,
    )
    admin.context.router.apply("w2", load, now=100.0)

    (model,) = (await admin.call("GET", "/admin/v1/models")).json()["models"]

    assert model == {
        "model": "m",
        "revision": "",
        "aliases": [],
        "key_space": "tokens",
        "block_size": 16,
        "tokenizer_digest": "",
        "max_model_len": None,
        "replicas": 2,
        "healthy": 1,
        "inflight": 0,
        "promised_tokens": 0,
        "waiting": 4,
        "hit_rate": 0.6,
    }


# --- keys


async def test_a_new_key_is_shown_once_and_works(admin: Admin) -> None:
    made = await admin.call(
        "POST",
        "/admin/v1/keys",
        json={"name": "ci", "tenant": "blue", "debug": True, "expires_in_s": 60, "limits": {"requests_per_minute": 5}},
    )
    listed = await admin.call("GET", "/admin/v1/keys")

    text = made.json()["key"]
    record = admin.context.keys.ring.verify(f"Bearer {text}".encode(), "client", WALL_OFFSET + 100)
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    assert isinstance(record, KeyRecord)
    assert listed.json()["keys"][-1] == {
        "id": record.id,
        "kind": "client",
        "name": "ci",
        "tenant": "blue",
        "group": "blue",
        "created": WALL_OFFSET + 100,
        "expires": WALL_OFFSET + 160,
        "debug": True,
        "scopes": [],
        "models": [],
        "limits": {
            "requests_per_minute": 5,
            "tokens_per_minute": None,
            "parallel_requests": None,
            "tokens_per_day": None,
            "usd_per_day": None,
        },
        "revoked": False,
        "source": "api",
    }
    assert text not in listed.text
    assert record.digest not in listed.text


async def test_a_revoked_key_is_refused_at_once(admin: Admin) -> None:
    made = (await admin.call("POST", "/admin/v1/keys", json={"name": "second", "kind": "admin"})).json()

    revoked = await admin.call("DELETE", f"/admin/v1/keys/{made['id']}")

    assert revoked.json()["revoked"]
    assert (await admin.call("GET", "/admin/v1/keys", key=made["key"])).status_code == 401
    assert (await admin.call("DELETE", "/admin/v1/keys/nobody")).status_code == 404


async def made_key(admin: Admin, **fields: Any) -> dict[str, Any]:
    answer = await admin.call("POST", "/admin/v1/keys", json={"name": "ci"} | fields)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_a_patched_key_is_changed_in_what_was_named(admin: Admin) -> None:
    made = await made_key(admin, limits={"requests_per_minute": 5, "tokens_per_day": 9}, models=["a"], expires_in_s=60)
    patch = {
        "limits": {"tokens_per_day": None, "usd_per_day": 2},
        "scopes": ["chat"],
        "models": [],
        "expires_in_s": None,
    }

    answer = await admin.call("PATCH", f"/admin/v1/keys/{made['id']}", json=patch)
    shown = await admin.call("GET", f"/admin/v1/keys/{made['id']}")

    limits = {"requests_per_minute": 5, "tokens_per_minute": None, "parallel_requests": None, "tokens_per_day": None}
    assert answer.status_code == 200
    assert answer.json() == shown.json()
    assert shown.json() | {"created": 0} == {
        **{name: value for name, value in made.items() if name != "key"},
        "limits": {**limits, "usd_per_day": 2.0},
        "scopes": ["chat"],
        "models": [],
        "expires": None,
        "created": 0,
    }


@pytest.mark.parametrize(
    "patch",
    [
        {"limits": {"requests_per_minute": 0}},
        {"limits": {"requests_per_minute": True}},
        {"limits": {"requests": 1}},
        {"limits": None},
        {"scopes": ["all"]},
        {"name": "a b"},
        {"tenant": "other"},
        {"kind": "admin"},
        {"expires_in_s": 0},
        {"revoked": False},
    ],
)
async def test_an_odd_patch_of_a_key_changes_nothing(admin: Admin, patch: dict[str, Any]) -> None:
    made = await made_key(admin)

    answer = await admin.call("PATCH", f"/admin/v1/keys/{made['id']}", json=patch)

    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")
    assert (await admin.call("GET", f"/admin/v1/keys/{made['id']}")).json() == {
        name: value for name, value in made.items() if name != "key"
    }


async def test_a_rotated_key_has_a_successor_and_ends_after_the_overlap(admin: Admin) -> None:
    made = await made_key(admin, kind="admin")

    rotated = await admin.call("POST", f"/admin/v1/keys/{made['id']}/rotate", json={"overlap_s": 60})
    again = await admin.call("POST", f"/admin/v1/keys/{made['id']}/rotate", json={})

    new = rotated.json()
    assert rotated.status_code == 201
    assert (new["name"], new["kind"]) == ("ci", "admin")
    assert new["id"] != made["id"]
    assert (again.status_code, error_of(again)["code"]) == (409, "too_many_live_keys")
    assert (await admin.call("GET", "/admin/v1/keys", key=made["key"])).status_code == 200
    admin.now[0] += 60
    assert (await admin.call("GET", "/admin/v1/keys", key=made["key"])).status_code == 401
    assert (await admin.call("GET", "/admin/v1/keys", key=new["key"])).status_code == 200


async def test_a_key_of_the_settings_is_shown_and_changed_there_only(admin: Admin) -> None:
    admin.context.keys.give([GivenKey(kind="client", name="team", text="wp-team-" + "s" * 32)])

    assert (await admin.call("GET", "/admin/v1/keys/team")).json()["source"] == "settings"
    for method, path, body in (("DELETE", "", None), ("PATCH", "", {}), ("POST", "/rotate", {})):
        answer = await admin.call(method, f"/admin/v1/keys/team{path}", json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "key_from_settings")


async def test_a_call_sent_again_makes_one_key(admin: Admin) -> None:
    headers = {"idempotency-key": "once"}
    body = {"name": "ci"}

    first, at_once = await asyncio.gather(
        *(admin.call("POST", "/admin/v1/keys", json=body, headers=headers) for _ in range(2))
    )
    later = await admin.call("POST", "/admin/v1/keys", json={"tenant": "default", "name": "ci"}, headers=headers)
    other = await admin.call("POST", "/admin/v1/keys", json={"name": "cd"}, headers=headers)
    second_admin = await made_key(admin, kind="admin")
    theirs = await admin.call("POST", "/admin/v1/keys", key=second_admin["key"], json=body, headers=headers)

    assert first.status_code == at_once.status_code == later.status_code == 201
    assert first.json() == at_once.json() == later.json()
    assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_conflict")
    assert theirs.json()["id"] != first.json()["id"]
    for odd in ("", "a b", "x" * 256):
        answer = await admin.call("POST", "/admin/v1/keys", json=body, headers={"idempotency-key": odd})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")


async def test_a_call_that_failed_may_be_sent_again(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"idempotency-key": "once"}
    with monkeypatch.context() as broken:

        async def full(*_: object) -> bool:
            raise KeyStoreError("the disk is full")

        broken.setattr(FileStorage, "replace", full)
        failed = await admin.call("POST", "/admin/v1/keys", json={"name": "ci"}, headers=headers)

    again = await admin.call("POST", "/admin/v1/keys", json={"name": "ci"}, headers=headers)

    assert (failed.status_code, failed.headers["x-should-retry"]) == (503, "false")
    assert again.status_code == 201


async def test_an_answer_that_made_room_for_another_is_nowhere_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admin.idempotency._MAX_KEPT", 1)

    class Answer:
        pass

    async def answer() -> Answer:
        return Answer()

    calls: Idempotency[Answer] = Idempotency()
    first = weakref.ref(await calls.once("me", b"1", b"", answer))
    await calls.once("me", b"2", b"", answer)
    gc.collect()

    assert first() is None


async def test_answers_to_repeated_calls_are_few_and_forgotten() -> None:
    calls: Idempotency[int] = Idempotency(kept_s=0.05)
    made = iter(range(10_000))

    async def make() -> int:
        return next(made)

    answers = [await calls.once("me", b"%d" % number, b"", make) for number in range(200)]
    kept = len(calls)
    await eventually(lambda: len(calls) == 0)

    assert answers == list(range(200))
    assert kept <= 128
    assert await calls.once("me", b"199", b"", make) == 200


async def test_the_last_admin_key_cannot_lock_everybody_out(admin: Admin) -> None:
    (mine,) = admin.context.keys.ring.usable("admin", WALL_OFFSET + 100)

    answer = await admin.call("DELETE", f"/admin/v1/keys/{mine.id}")

    assert (answer.status_code, error_of(answer)["code"]) == (409, "last_admin_key")
    assert (await admin.call("GET", "/admin/v1/keys")).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "a\n"},
        {"name": "x" * 64},
        {"tenant": "../x"},
        {"kind": "root"},
        {"limits": {"requests_per_minute": 0}},
        {"limits": {"requests_per_minute": 1.5}},
        {"limits": {"requests": 1}},
        {"scopes": ["everything"]},
        {"models": ["a b"]},
        {"models": ["a\n"]},
        {"source": "settings"},
        {"revoked": False},
        {"expires_in_s": -1},
        {"id": "mine"},
        {"digest": "00"},
    ],
)
async def test_an_odd_key_is_refused(admin: Admin, change: dict[str, Any]) -> None:
    answer = await admin.call("POST", "/admin/v1/keys", json={"name": "x"} | change)

    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")
    assert len(admin.context.keys.ring.records()) == 3


async def test_keys_made_at_the_same_time_are_all_kept(admin: Admin) -> None:
    async with admin.client("admin") as client:
        made = await asyncio.gather(*(client.post("/admin/v1/keys", json={"name": f"k{n}"}) for n in range(10)))

    assert {answer.status_code for answer in made} == {201}
    assert len(admin.context.keys.ring.records()) == 13


async def test_a_full_disk_is_a_503_in_shape_and_makes_no_key(
    admin: Admin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys.json").unlink()
    (tmp_path / "keys.json").mkdir()  # cannot be replaced by a file

    answer = await admin.call("POST", "/admin/v1/keys", json={"name": "x"})

    assert (answer.status_code, error_of(answer)["code"]) == (503, "storage_unavailable")
    assert "keys.json" in caplog.text
    assert len(admin.context.keys.ring.records()) == 3


# --- how it decides, how it is


async def test_explain_shows_every_candidate_and_the_reason(admin: Admin) -> None:
    body = json.dumps(
        {"model": "m", "prompt": "x" * 100_000}
    ).encode()  # a prompt may be longer than other admin bodies

    answer = await admin.call(
        "POST", "/admin/v1/explain?group=blue", content=body, headers={"content-type": "application/json"}
    )

    assert admin.asked == [(body, "blue")]
    assert answer.json() == {
        "chosen": "w1",
        "policy": "cost",
        "w": 2.0,
        "reason": "longest_match",
        "queued": False,
        "candidates": [
            {
                "replica": "w1",
                "eligible": True,
                "why_not": "",
                "matched_tokens": 32,
                "uncached_tokens": 68,
                "wait_s": 0.5,
                "own_s": 0.1,
                "cost_s": 0.6,
                "trust": "exact",
                "inflight": 3,
                "away_s": 0.0,
                "delayed": 0,
            }
        ],
    }


async def test_an_explanation_that_is_refused_keeps_its_status(admin: Admin) -> None:
    answer = await admin.call("POST", "/admin/v1/explain", json={"model": "unknown"})

    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


async def test_a_bug_is_a_500_that_tells_nothing(admin: Admin) -> None:
    answer = await admin.call("POST", "/admin/v1/explain", json={"model": "bug"})

    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
    assert "s3cret" not in answer.text


async def test_decisions_tell_how_recent_requests_were_routed(admin: Admin) -> None:
    routed = Record(request_id="r1", endpoint="/v1/completions", started_at=90.0, model="m", key_id="k")
    routed.decision, routed.tries, routed.status = a_decision(), 1, 200
    admin.records += [routed, Record(request_id="r2", endpoint="/v1/completions", started_at=91.0)]

    (decision,) = (await admin.call("GET", "/admin/v1/decisions")).json()["decisions"]

    assert decision["request_id"] == "r1"
    assert decision["time"] == WALL_OFFSET + 90
    assert (decision["chosen"], decision["reason"], decision["status"]) == ("w1", "longest_match", 200)
    assert (decision["prompt_tokens"], decision["matched_tokens"], decision["cached_tokens"]) == (100, 32, None)
    assert decision["candidates"][0]["replica"] == "w1"


async def test_the_settings_in_force_are_shown_without_secrets(tmp_path: Path) -> None:
    admin = await build(
        tmp_path,
        load_settings(flags={"admin": {"key": "s3cret"}, "replicas": [{"url": "http://h:1", "credential": "s3cret"}]}),
    )

    answer = await admin.call("GET", "/admin/v1/config")

    assert answer.json()["server"]["port"] == 8000
    assert answer.json()["replicas"][0]["url"] == "http://h:1"
    assert "s3cret" not in answer.text


async def test_health_ready_and_metrics_need_no_key(admin: Admin) -> None:
    await admin.register()
    health = await admin.call("GET", "/health", key=None)
    ready = await admin.call("GET", "/ready", key=None)
    metrics = await admin.call("GET", "/metrics", key=None)

    assert (health.status_code, ready.status_code) == (200, 200)
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'warmpath_replica_healthy{model="m",replica="w1"} 0.0' in metrics.text
    assert "warmpath_requests_in_flight 3.0" in metrics.text
    assert "s3cret" not in metrics.text


async def test_a_gateway_that_should_get_no_requests_says_why(admin: Admin) -> None:
    admin.not_ready.append("No replica is healthy.")

    answer = await admin.call("GET", "/ready", key=None)

    assert (answer.status_code, error_of(answer)["message"]) == (503, "No replica is healthy.")
    assert answer.headers["retry-after"] == "1"
    assert (await admin.call("GET", "/health", key=None)).status_code == 200


async def test_head_is_get_without_a_body(admin: Admin) -> None:
    assert (await admin.call("HEAD", "/health", key=None)).status_code == 200
    assert (await admin.call("HEAD", "/admin/v1/keys", key=None)).status_code == 401


# --- the document


def documented(endpoint: Endpoint[AdminContext]) -> str:
    return endpoint.path.replace(":path}", "}")


async def test_the_document_describes_every_endpoint_and_only_those(admin: Admin) -> None:
    document = (await admin.call("GET", "/openapi.json", key=None)).json()

    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(endpoint.method, documented(endpoint)) for endpoint in ENDPOINTS}
    assert document["info"]["version"] == "1.2.3"
    for endpoint in ENDPOINTS:
        operation = document["paths"][documented(endpoint)][endpoint.method.lower()]
        assert ("security" in operation) == (endpoint.needs is not Needs.NO_KEY)
        assert ("requestBody" in operation) == (endpoint.body is not None)
        assert set(operation["responses"]) == {str(endpoint.status), "4XX", *map(str, endpoint.failures)}


async def test_every_reference_in_the_document_leads_somewhere(admin: Admin) -> None:
    document = (await admin.call("GET", "/openapi.json", key=None)).json()
    schemas = document["components"]["schemas"]

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [found for inner in value.values() for found in references(inner)]
        return [found for inner in value for found in references(inner)] if isinstance(value, list) else []

    found = references(document)
    assert "#/components/schemas/ReplicaSpec" in found
    assert all(reference.removeprefix("#/components/schemas/") in schemas for reference in found)


async def test_a_scrape_of_a_thousand_replicas_leaves_the_loop_its_time(admin: Admin) -> None:
    """In CPU time of the loop's own thread, since another process may take that off the machine at any moment.

    What it shares with others, caches and cores, makes it only longer: the best of some counts.
    """
    for number in range(1024):
        admin.context.router.add(
            f"w{number}", ReplicaSpec(url=f"http://127.0.0.1:{10_000 + number}", model="m"), now=0.0
        )

    async def longest_step_s() -> float:
        steps: list[float] = []
        scraping = asyncio.create_task(admin.call("GET", "/metrics", key=None))
        while not scraping.done():
            began = time.thread_time()
            await asyncio.sleep(0)
            steps.append(time.thread_time() - began)
        assert (await scraping).text.count("warmpath_replica_healthy{") == 1024
        assert len(steps) > 8, "there were turns for others"
        return max(steps)

    assert (
        min([await longest_step_s() for _ in range(3)]) < 0.02
    )  # 1 ms on an idle machine; all of it in one turn would be 40
