from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.stages import is_staged
from gateway.upstream.http1 import Http1Upstream
from router import Router
from tests.gateway.stub import MODEL, Running, gateway, says, stub


@pytest.mark.parametrize(
    ("num_running", "num_bytes", "expected"), [(1, 10, False), (4, 10, True), (32, 1 << 20, False)]
)
def test_who_is_alone_does_not_pause_and_nobody_waits_for_a_long_one(
    num_running: int, num_bytes: int, expected: bool
) -> None:
    assert is_staged(num_running, num_bytes) is expected


async def test_requests_that_are_under_way_together_are_all_decided_on_before_the_next_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        assert (await running.chat()).status_code == 200
        happened: list[str] = []
        note(monkeypatch, Router, "begin", happened)
        note(monkeypatch, Http1Upstream, "send", happened)

        answers = await at_once(running, 8)

        assert answers == [b"HTTP/1.1 200 OK"] * 8
        fourth = [place for place, what in enumerate(happened) if what == "begin"][3]
        assert happened[fourth : fourth + 5] == ["begin"] * 5


def note(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, happened: list[str]) -> None:
    original = getattr(kind, name)

    def noted(*args: Any, **more: Any) -> Any:
        happened.append(name)
        return original(*args, **more)

    monkeypatch.setattr(kind, name, noted)


async def at_once(running: Running, count: int) -> list[bytes]:
    """The first lines of the answers to requests that all lie in sockets before the loop looks at one of them."""
    url = running.client.base_url
    pairs = [await asyncio.open_connection(url.host, url.port) for _ in range(count)]
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {running.key}\r\n"
    for _, writer in pairs:
        writer.write(
            head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
    lines = [(await reader.readline()).strip() for reader, _ in pairs]
    for _, writer in pairs:
        writer.close()
    return lines
