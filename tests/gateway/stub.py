"""A foreign replica over raw sockets that does what a test tells it, and a gateway over real sockets in front of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.app import Gateway, build_gateway
from gateway.keys.opening import open_key_store
from gateway.server.listener import Listener
from gateway.settings import Settings
from tests.serving import serving

MODEL = "stub-model"

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Seen:
    """One generation request, as it reached the stub."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway closed the connection before the answer was complete."""

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class StubReplica:
    """Serves /v1/models by itself, and every generation by `answer`, which writes raw bytes."""

    def __init__(self, answer: Answer, models: list[str], host: str = "127.0.0.1") -> None:
        self.host = host
        self.answer = answer
        self.models = models
        self.card: dict[str, Any] = {}
        """What it says of its models besides their ids."""
        self.seen: list[Seen] = []
        self.asked: list[str] = []
        """Paths of all requests."""
        self.credentials: list[str] = []
        """Of all requests that had one."""
        self.health: list[int] = [404]
        """Statuses of its next answers to /health, the last one for good; 0 for none."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *fields = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (text.partition(": ") for text in fields if text)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = line.split(" ")
                await self._route(method, path, headers, body, reader, writer)
                if writer.is_closing():
                    break
        writer.close()
        self._open.discard(writer)

    async def _route(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.asked.append(path)
        if "authorization" in headers:
            self.credentials.append(headers["authorization"])
        if path == "/v1/models":
            models = {"object": "list", "data": [{"id": model, **self.card} for model in self.models]}
            writer.write(response(200, msgspec.json.encode(models)))
        elif path == "/health":
            status = self.health.pop(0) if len(self.health) > 1 else self.health[0]
            if not status:
                await asyncio.Event().wait()
            writer.write(response(status, b"{}"))
        else:
            seen = Seen(method, path, headers, body)
            self.seen.append(seen)
            answering = asyncio.ensure_future(self.answer(reader, writer))
            watching = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                seen.gone.set()
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
        await writer.drain()


def response(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str = "", finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return b"data: " + msgspec.json.encode({"id": "c", "choices": [choice]}) + b"\n\n"


USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def writes(*pieces: bytes, close: bool = False) -> Answer:
    """An answer that is these bytes, each in a write of its own."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return answer


def streams(*events: bytes) -> Answer:
    return writes(STREAM_HEAD, *map(chunked, events), b"0\r\n\r\n")


def says(text: str) -> Answer:
    body = {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    return writes(response(200, msgspec.json.encode(body)))


async def hangs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def dies(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@contextlib.asynccontextmanager
async def stub(answer: Answer, models: list[str] | None = None) -> AsyncIterator[StubReplica]:
    replica = StubReplica(answer, models or [MODEL])
    await replica.listen()
    try:
        yield replica
    finally:
        await replica.stop()


@dataclass
class Running:
    gateway: Gateway
    client: httpx.AsyncClient
    """Speaks to the client listener; has no key of its own."""
    admin: httpx.AsyncClient
    """Speaks to the admin listener with an admin key."""
    key: str
    """A client key that may see decisions."""

    @property
    def auth(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    async def chat(self, content: str = "hello", *, can_wait: bool = False, **fields: Any) -> httpx.Response:
        """`can_wait`: of the lowest priority."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        headers = {**self.auth, "x-warmpath-priority": "batch"} if can_wait else self.auth
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


@contextlib.asynccontextmanager
async def gateway(state_dir: Path, *replicas: StubReplica, **settings: Any) -> AsyncIterator[Running]:
    """A gateway over sockets of its own, ready: every replica that is up has been found healthy."""
    values: dict[str, Any] = {
        "state_dir": state_dir,
        "replicas": [{"url": replica.url} for replica in replicas],
        "log": {"access": "off"},
        **settings,
    }
    read = Settings.model_validate(values)
    built = build_gateway(read, await open_key_store(read))
    _, key = await built.keys.create("client", name="test", debug=True)
    _, admin_key = await built.keys.create("admin", name="test")
    async with (
        built.background(),
        serving(built.public, http=Listener().protocol) as url,
        serving(built.admin, http=Listener().protocol) as admin_url,
        _http(url) as client,
        _http(admin_url, authorization=f"Bearer {admin_key}") as admin,
    ):
        running = Running(built, client, admin, key)
        async with asyncio.timeout(60):
            while not await _all_healthy(running, len(values["replicas"])):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield running


def _http(base_url: str, **headers: str) -> httpx.AsyncClient:
    # Reading the system's certificates takes 0.1 s and serves nobody here.
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=30, verify=False)


async def _all_healthy(running: Running, expected: int) -> bool:
    replicas = (await running.admin.get("/admin/v1/replicas")).json()["replicas"]
    return len([replica for replica in replicas if replica["healthy"]]) == expected
