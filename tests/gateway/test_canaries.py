"""Secrets and prompts stay out of logs, answers to others, metrics and files, whatever goes wrong.

Every secret of a gateway is a text that can be recognised; then forty things go wrong with logs at DEBUG, and nowhere that
anybody else reads is any of it: not whole, not as its tail, not as hex.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.gateway.stub import (
    MODEL,
    STREAM_HEAD,
    Answer,
    Running,
    StubReplica,
    chunked,
    dies,
    event,
    gateway,
    response,
    says,
    streams,
    stub,
    writes,
)

PEPPER, FLEET_SECRET = "0ca9a1" * 12, "0fee7f" * 12
SECRET: Final = "Canary" + "k" * 37
ADMIN_KEY, JOIN_TOKEN, STATIC_KEY = f"wpa-boss-{SECRET}", f"wpj-fleet-{SECRET}", f"wp-static-{SECRET}"
CREDENTIAL: Final = "canary-credential-0123456789"
PROMPT: Final = "canary-prompt-birdsong"
REPLICA_TEXT: Final = "canary-replica-secret"

CHAT: Final = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}

REPLICA_FAULTS: Final[dict[str, Answer]] = {
    "dies": dies,
    "refuses": writes(response(400, json.dumps({"error": {"message": f"bad {PROMPT}"}}).encode())),
    "fails": writes(response(500, REPLICA_TEXT.encode())),
    "busy": writes(response(503, REPLICA_TEXT.encode(), "retry-after: 1")),
    "no HTTP": writes(REPLICA_TEXT.encode() + b"\r\n\r\n", close=True),
    "no JSON": writes(response(200, REPLICA_TEXT.encode())),
    "redirects": writes(response(307, b"", f"location: http://x/?key={REPLICA_TEXT}")),
    "breaks off": writes(STREAM_HEAD, chunked(event("hi")), close=True),
    "an error in the stream": streams(event("hi"), b'data: {"error": {"message": "%b"}}\n\n' % REPLICA_TEXT.encode()),
    "odd headers": writes(response(200, b"{}", f"set-cookie: {REPLICA_TEXT}")),
}
BAD_BODIES: Final[dict[str, bytes]] = {
    "no JSON": PROMPT.encode(),
    "cut off": json.dumps(CHAT).encode()[:-3],
    "twice a name": b'{"model": "%b", "model": "%b"}' % (PROMPT.encode(), PROMPT.encode()),
    "a number": json.dumps({**CHAT, "temperature": PROMPT}).encode(),
    "a role": json.dumps({**CHAT, "messages": [{"role": PROMPT, "content": "x"}]}).encode(),
    "a salt": json.dumps({**CHAT, "cache_salt": PROMPT}).encode(),
    "a tool": json.dumps({**CHAT, "tools": [{"type": PROMPT}]}).encode(),
    "stop": json.dumps({**CHAT, "stop": [PROMPT] * 99}).encode(),
    "surrogates": b'{"model": "m", "prompt": "%b\\ud800"}' % PROMPT.encode(),
    "deep": b'{"a":' * 200 + b'"%b"' % PROMPT.encode() + b"}" * 200,
}


def spelled(secret: str) -> set[str]:
    """How it could be written down."""
    return {secret, secret[-12:], secret.encode().hex()}


async def ask(running: Running, body: bytes, **headers: str) -> httpx.Response:
    sent = {"content-type": "application/json", **headers}
    try:
        return await running.client.post("/v1/chat/completions", content=body, headers=sent)
    except httpx.TransportError:  # a stream that ended as it should not
        return httpx.Response(599)


async def go_wrong(running: Running, replica: StubReplica, new_key: str) -> list[str]:
    """Everything that is answered to somebody who did not send what is in it."""
    told: list[str] = []
    good = {"authorization": f"Bearer {STATIC_KEY}"}
    for answer in REPLICA_FAULTS.values():
        replica.answer = answer
        for stream in (False, True):
            # The client's own prompt may come back in an error, a replica's own text may not.
            answered = await ask(running, json.dumps({**CHAT, "stream": stream}).encode(), **good)
            told.append(answered.text.replace(PROMPT, ""))
    replica.answer = says("hi")
    for body in BAD_BODIES.values():
        await ask(running, body, **good)
    wrong_keys = (
        STATIC_KEY[:-1] + "x",
        ADMIN_KEY,
        JOIN_TOKEN,
        f"{STATIC_KEY}' OR 1=1",
        STATIC_KEY + "%s%n",
        new_key[:-1],
    )
    for key in wrong_keys:
        told.append((await ask(running, json.dumps(CHAT).encode(), authorization=f"Bearer {key}")).text)
        answered = await running.admin.get("/admin/v1/keys", headers={"authorization": f"Bearer {key[:-1]}"})
        told.append(answered.text)
    cookie = {"cookie": f"key={STATIC_KEY}"}
    paths = (f"/v1/models?api_key={STATIC_KEY}", f"/v1/{STATIC_KEY}", f"/v1/models/{STATIC_KEY}?x#y")
    told += [(await running.client.get(path, headers=cookie)).text for path in paths]
    bad_admin: list[Any] = [
        {"name": "good", "tenant": "canary"},
        {"name": PROMPT + " "},
        {"name": "x", "digest": SECRET},
        {"name": "x", "limits": {SECRET: 1}},
        {"name": "x", "scopes": [SECRET]},
        SECRET,
    ]
    for body in bad_admin:
        await running.admin.post("/admin/v1/keys", json=body)
    views = ("keys", "replicas", "decisions", "settings", "config")
    told += [(await running.admin.get(f"/admin/v1/{path}")).text for path in views]
    told += [(await running.admin.get(path)).text for path in ("/metrics", "/openapi.json", "/ready", "/health")]
    return told


async def test_whatever_goes_wrong_nothing_secret_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().slow_callback_duration = 60
    settings: dict[str, Any] = {
        "log": {"access": str(tmp_path / "access.log")},
        "admin": {"key": ADMIN_KEY, "join_token": JOIN_TOKEN},
        "keys": {
            "pepper": PEPPER,
            "fleet_secret": FLEET_SECRET,
            "static": [{"name": "static", "key": STATIC_KEY, "debug": True}],
        },
    }
    async with stub(says("hi")) as replica:
        replicas = [{"url": replica.url, "credential": CREDENTIAL}]
        async with gateway(tmp_path / "state", replicas=replicas, **settings) as running:
            record, new_key = await running.gateway.keys.create("client", name="new", tenant="blue")
            running.admin.headers["authorization"] = f"Bearer {ADMIN_KEY}"
            told = await go_wrong(running, replica, new_key)
            salts = [running.gateway.keys.salt_for(group) for group in ("default", "blue", "public")]

    out, err = capfd.readouterr()
    clients = ("httpx", "httpcore")  # of this test
    ours = [entry for entry in caplog.records if entry.name.partition(".")[0] not in clients]
    logs = [f"{entry.getMessage()} {entry.exc_text or ''} {entry.args}" for entry in ours]
    files = [file.read_text() for file in sorted((tmp_path / "state").rglob("*")) if file.is_file()]
    new_secret = new_key.rsplit("-", 1)[1]
    secrets = {PEPPER, FLEET_SECRET, SECRET, CREDENTIAL, new_secret, record.digest, REPLICA_TEXT, *salts}
    access_log = (tmp_path / "access.log").read_text()
    assert len(access_log.splitlines()) > 30
    assert logs
    assert len(told) > 40
    for place, texts in (("answers", told), ("logs", [*logs, access_log, out, err])):
        for text in texts:
            found = {secret for secret in secrets for spelling in spelled(secret) if spelling in text}
            assert not found, (place, text)
    assert not [text for text in (*logs, access_log, out, err, told[-4]) if PROMPT in text]
    kept = {PEPPER, FLEET_SECRET, SECRET, CREDENTIAL, new_secret, PROMPT, REPLICA_TEXT, *salts}
    assert not [text for text in files for secret in kept if secret in text]
