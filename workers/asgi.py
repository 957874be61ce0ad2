"""What a replica's routes need of ASGI: a bounded body, one reply, and an end when the client leaves.

The routes that carry load are raw ASGI; Starlette serves the rest behind them (`workers.server`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Final

from starlette.types import Receive, Scope, Send

from workers.api_error import ApiError

__all__ = ["ClientGone", "Header", "Reply", "WhileConnected", "headers_named", "read_json_body"]

Header = tuple[bytes, bytes]

MAX_BODY_BYTES: Final = 16 << 20
"""Above the gateway's own limit, which counts before the ids of the prompt are added to the body."""

BODY_TIMEOUT_S: Final = 30.0

_JSON: Final = b"application/json"


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


def headers_named(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


async def read_json_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body of a JSON POST. Refuses a wrong type (415) and size (413, if it can before reading), or sloth (408), and
    what is no UTF-8 (400): a decoder looks no further into fields that it skips, and the next reader of them might trip.
    """
    _check_content_type(scope)
    announced = headers_named(scope, b"content-length")
    if announced:
        _check_size(int(announced[0]))
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(receive)
    except TimeoutError as error:
        raise ApiError(408, "request_timeout", f"The request body took over {BODY_TIMEOUT_S:.0f} s to come.") from error
    _check_encoding(body)
    return body


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data: bytes = message.get("body", b"")
        _check_size(len(body) + len(data))
        if not message.get("more_body"):
            return bytes(body) + data if body else data
        body += data


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise ApiError(413, "request_too_large", f"The request body is larger than {MAX_BODY_BYTES} bytes.")


def _check_encoding(body: bytes) -> None:
    if body.isascii():  # no copy is made, as it would be for decoding
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, "invalid_json", f"The request body is not valid UTF-8 (byte {error.start}).") from error


def _check_content_type(scope: Scope) -> None:
    if headers_named(scope, b"content-encoding"):
        raise ApiError(415, "unsupported_encoding", "A compressed request body is not supported.")
    types = headers_named(scope, b"content-type")
    if len(types) != 1 or types[0].partition(b";")[0].strip().lower() != _JSON:
        raise ApiError(415, "unsupported_media_type", "The content type must be application/json.")


class WhileConnected:
    """``async with WhileConnected(receive):`` runs its block as long as the client is there.

    When the client leaves, the block is cancelled where it waits and `ClientGone` comes out, so every `finally` inside has
    run. A cancellation from elsewhere passes unchanged: the accounting is that of `asyncio.timeout`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watch = asyncio.create_task(self._wait_for_disconnect())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


class Reply:
    """The one answer to a request: a start, chunks and an end, or all at once. Knows whether it has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.started = False
        """Until then every ending is possible, after it only the stream's own."""

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.started = True
        all_headers = [*headers, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def chunk(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def json(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [(b"content-type", _JSON), length, *headers])
        await self.end(body)

    async def error(self, error: ApiError, headers: Iterable[Header] = ()) -> None:
        retry = [] if error.retry_after_s is None else [(b"retry-after", str(error.retry_after_s).encode())]
        await self.json(error.status, error.body(), [*retry, *headers])
