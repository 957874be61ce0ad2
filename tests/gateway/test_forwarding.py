"""A stream between a transport and a server that push; clients keep up, fall behind or are served by another server."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from gateway.forwarding import Forwarding
from gateway.server.exchange import Header
from gateway.server.reply import Reply
from gateway.sse import SseRelay
from gateway.upstream.contract import ProtocolViolation, UpstreamError

CHUNK = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Body:
    """An `UpstreamResponse` whose body is here already."""

    status = 200

    def __init__(self, *pieces: bytes, then: UpstreamError | None = None) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces = list(pieces)
        self.then = then

    @property
    def ended(self) -> bool:
        return not self.pieces and self.then is None

    async def read_chunk(self) -> bytes | None:
        if self.pieces:
            return self.pieces.pop(0)
        if self.then is not None:
            raise self.then
        return None

    async def forward(self, take: Callable[[bytes], bool]) -> None:
        while (piece := await self.read_chunk()) is not None and take(piece):
            pass

    async def read(self, limit: int) -> bytes:
        raise NotImplementedError

    async def aclose(self) -> None: ...


class Client:
    """An `Exchange` that takes so many pieces at once before it has to be waited for; None: one that always must be."""

    def __init__(self, takes: int | None) -> None:
        self.takes = takes
        self.got: list[bytes] = []
        self.waits = 0
        self.gaps: list[float] = []
        self.now = 0.0
        relay = SseRelay(strip_usage=True)
        self.forwarding = Forwarding(
            relay, Reply(self, "id"), "m", self._clock, lambda model, gap: self.gaps.append(gap)
        )
        self.relay = relay

    def _clock(self) -> float:
        self.now += 1.0
        return self.now

    @property
    def task(self) -> asyncio.Task[None]:
        raise NotImplementedError

    def try_take_body(self, limit: int) -> bytes | None:
        raise NotImplementedError

    async def read_body(self, limit: int) -> bytes:
        raise NotImplementedError

    def watch(self, on_gone: Callable[[], None] | None) -> None: ...

    def try_answer(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        raise NotImplementedError

    def try_write(self, data: bytes) -> bool:
        if self.takes is None:
            return False
        if not self.takes:
            self.takes = 1
            return False
        self.takes -= 1
        self.got.append(data)
        return True

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        raise NotImplementedError

    async def write(self, data: bytes, *, more: bool) -> None:
        self.waits += 1
        self.got.append(data)


@pytest.mark.parametrize("takes", [100, 1, 0, None])
async def test_every_client_gets_every_event_once_and_in_order(takes: int | None) -> None:
    client = Client(takes)
    events = [CHUNK.replace(b'"a"', b'"%d"' % number) for number in range(6)]

    await client.forwarding.run(Body(*events, LAST, DONE, b"data: never\n\n"))

    assert client.got == [*events, LAST, DONE]
    assert client.relay.done
    assert client.gaps == [1.0] * 8
    assert (client.waits == 0) == (takes == 100)


async def test_what_is_kept_from_the_client_is_neither_sent_nor_timed() -> None:
    client = Client(100)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'

    await client.forwarding.run(Body(CHUNK[:9], CHUNK[9:] + LAST, usage, DONE))

    assert client.got == [CHUNK + LAST, DONE]
    assert len(client.gaps) == 2


async def test_a_body_that_ends_too_early_leaves_the_relay_undone() -> None:
    client = Client(100)

    await client.forwarding.run(Body(CHUNK, LAST, DONE[:-1]))

    assert client.got == [CHUNK, LAST, DONE]
    assert client.relay.done

    client = Client(100)
    await client.forwarding.run(Body(CHUNK))
    assert (client.got, client.relay.done) == ([CHUNK], False)


async def test_a_fault_comes_after_what_was_good() -> None:
    client = Client(100)

    with pytest.raises(ProtocolViolation):
        await client.forwarding.run(Body(CHUNK + b"data: nonsense\n\n", CHUNK))
    assert client.got == [CHUNK]
