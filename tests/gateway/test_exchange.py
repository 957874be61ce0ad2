import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.alarm import Alarm
from gateway.upstream.contract import (
    Origin,
    ProtocolViolation,
    Ready,
    Timeouts,
    UpstreamClosed,
    UpstreamError,
    UpstreamRequest,
    UpstreamTimeout,
)
from gateway.upstream.exchange import HIGH_WATER_BYTES, MAX_HEAD_BYTES, MAX_HEADERS, Exchange
from gateway.upstream.known_head import KnownHead
from tests.gateway.splits import split

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


class Recorder:
    """A carrier without a socket."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.alarm = Alarm(self.loop)
        self.known_head = KnownHead()
        self.flow: list[str] = []
        self.ended: list[str] = []

    def pause_reading(self) -> None:
        self.flow.append("pause")

    def resume_reading(self) -> None:
        self.flow.append("resume")

    def finish(self, *, reusable: bool) -> None:
        self.ended.append("reusable" if reusable else "finished")

    def close(self) -> None:
        self.ended.append("closed")


def request_of(
    method: str = "POST", *, first_byte_s: float = 5.0, idle_s: float = 5.0, ready: Ready = "head"
) -> UpstreamRequest:
    return UpstreamRequest(
        method=method,
        origin=Origin("http", "replica", 80),
        path="/",
        headers=[],
        timeouts=Timeouts(connect_s=5.0, first_byte_s=first_byte_s, idle_s=idle_s),
        ready=ready,
    )


def start(
    method: str = "POST", *, first_byte_s: float = 5.0, idle_s: float = 5.0, ready: Ready = "head"
) -> tuple[Exchange, Recorder]:
    carrier = Recorder()
    return Exchange(carrier, request_of(method, first_byte_s=first_byte_s, idle_s=idle_s, ready=ready)), carrier


def feed(exchange: Exchange, carrier: Recorder, pieces: Sequence[bytes], *, eof: bool) -> None:
    """As a connection does: nothing more once the exchange has left it."""
    for piece in pieces:
        if piece and not carrier.ended:
            exchange.feed(piece)
    if eof and not carrier.ended:
        exchange.feed_eof()


async def outcome(
    pieces: Sequence[bytes], method: str = "POST", *, eof: bool = False
) -> tuple[Answer | type[UpstreamError], str]:
    """What the reader gets of these pieces, and what becomes of the connection."""
    exchange, carrier = start(method)
    feed(exchange, carrier, pieces, eof=eof)
    return await what_came(exchange, carrier)


async def what_came(exchange: Exchange, carrier: Recorder) -> tuple[Answer | type[UpstreamError], str]:
    got: Answer | type[UpstreamError]
    try:
        await exchange.wait_ready()
        got = (exchange.status, exchange.headers, await exchange.read(1 << 20))
    except UpstreamError as error:
        got = type(error)
    assert len(carrier.ended) == 1
    return got, carrier.ended[0]


@dataclass(frozen=True)
class Good:
    """An answer as bytes, what it means, and what becomes of its connection."""

    data: bytes
    means: Answer
    fate: str = "reusable"
    method: str = "POST"
    eof: bool = False


JSON = '{"a": "é😀"}'.encode()
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n" + JSON
LENGTH_MEANS: Answer = (200, [(b"content-type", b"application/json"), (b"content-length", b"15")], JSON)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
    b'5\r\nhello\r\n6;ext="1"\r\n world\r\n0\r\nx-trailer: 1\r\nx-other: 2\r\n\r\n'
)
OK_2: Answer = (200, [(b"content-length", b"2")], b"ok")

GOOD = {
    "content length": Good(LENGTH, LENGTH_MEANS),
    "chunked with extension and trailers": Good(CHUNKED, (200, [(b"transfer-encoding", b"Chunked")], b"hello world")),
    "read to close": Good(b"HTTP/1.1 200 OK\r\n\r\nto\r\nthe end", (200, [], b"to\r\nthe end"), "finished", eof=True),
    "connection close": Good(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        (200, [(b"content-length", b"2"), (b"connection", b"close")], b"ok"),
        "finished",
    ),
    "http 1.0": Good(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", OK_2, "finished"),
    "http 1.0 keep-alive": Good(
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\nok",
        (200, [(b"content-length", b"2"), (b"connection", b"keep-alive")], b"ok"),
    ),
    "no reason, empty body": Good(
        b"HTTP/1.1 503\r\ncontent-length: 0\r\nretry-after:\r\n\r\n",
        (503, [(b"content-length", b"0"), (b"retry-after", b"")], b""),
    ),
    "204": Good(b"HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n", (204, [(b"x", b"1")], b"")),
    "304 that describes a body": Good(
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", (304, [(b"content-length", b"9")], b""), method="GET"
    ),
    "head": Good(
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", (200, [(b"content-length", b"9")], b""), method="HEAD"
    ),
    "head of a chunked answer": Good(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        (200, [(b"transfer-encoding", b"chunked")], b""),
        method="HEAD",
    ),
    "interim answers": Good(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH, LENGTH_MEANS
    ),
    "interim answer with a length, then read to close": Good(
        b"HTTP/1.1 103 Early Hints\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nend",
        (200, [], b"end"),
        "finished",
        eof=True,
    ),
    "identity named": Good(
        b"HTTP/1.1 200 OK\r\ncontent-encoding: identity\r\ncontent-length: 1\r\n\r\nx",
        (200, [(b"content-encoding", b"identity"), (b"content-length", b"1")], b"x"),
    ),
}

GARBAGE = {
    "html without http": b"<html>no</html>\r\n\r\n",
    "tls record": b"\x15\x03\x03\x00\x02\x02\x46",
    "bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",
    "length and chunked": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok",
    "signed length": b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nok",
    "folded header": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 2\r\n\r\nok",
    "space before colon": b"HTTP/1.1 200 OK\r\nx : a\r\ncontent-length: 2\r\n\r\nok",
    "huge chunk size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "broken chunk end": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nokay\r\n",
    "gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok",
    "gzip as transfer encoding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "switched protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    "bare 101": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "interim answer with a body": b"HTTP/1.1 150 Odd\r\ncontent-length: 2\r\n\r\nok" + LENGTH,
    "status 099": b"HTTP/1.1 099 Odd\r\ncontent-length: 2\r\n\r\nok",
    "status 600": b"HTTP/1.1 600 Odd\r\ncontent-length: 2\r\n\r\nok",
}


@pytest.mark.parametrize("name", GOOD)
async def test_a_good_answer_is_the_same_for_every_split_of_its_bytes(name: str) -> None:
    good = GOOD[name]
    data, expected = good.data, (good.means, good.fate)

    for cut in range(len(data)):
        assert await outcome([data[:cut], data[cut:]], good.method, eof=good.eof) == expected, cut
    assert await outcome([data[i : i + 1] for i in range(len(data))], good.method, eof=good.eof) == expected


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_is_a_protocol_violation_for_every_split_of_its_bytes(name: str) -> None:
    data = GARBAGE[name]

    for cut in range(len(data)):
        assert await outcome([data[:cut], data[cut:]]) == (ProtocolViolation, "closed"), cut


@pytest.mark.parametrize("name", [name for name, good in GOOD.items() if not good.eof])
async def test_an_answer_cut_anywhere_is_closed_and_never_taken_for_whole(name: str) -> None:
    good = GOOD[name]

    for cut in range(len(good.data)):
        assert await outcome([good.data[:cut]], good.method, eof=True) == (UpstreamClosed, "closed"), cut


@pytest.mark.parametrize(
    "excess", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad", b"\r\nHTTP/1.1 200 OK\r\n\r\n"], ids=repr
)
@pytest.mark.parametrize("name", ["content length", "chunked with extension and trailers", "204", "head"])
async def test_bytes_after_the_end_of_an_answer_spoil_the_connection_but_not_the_answer(
    name: str, excess: bytes
) -> None:
    good = GOOD[name]

    assert await outcome([good.data + excess], good.method) == (good.means, "finished")


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
async def test_random_bytes_end_in_an_answer_or_an_upstream_error(noise: bytes, cuts: list[int]) -> None:
    data = b"HTTP/1.1 200 OK\r\n" + noise

    first = await outcome([data], eof=True)

    assert await outcome(split(data, cuts), eof=True) == first


@given(
    st.sampled_from(sorted(GOOD)), st.integers(0, 300), st.binary(min_size=1, max_size=3), st.lists(st.integers(0, 300))
)
async def test_a_damaged_answer_has_one_outcome_however_it_is_split(
    name: str, place: int, damage: bytes, cuts: list[int]
) -> None:
    good = GOOD[name]
    damaged = good.data[:place] + damage + good.data[place + len(damage) :]

    whole, _ = await outcome([damaged], good.method, eof=True)
    parts, _ = await outcome(split(damaged, cuts), good.method, eof=True)

    assert parts == whole


# --- known heads


def start_after(data: bytes, method: str = "POST") -> tuple[Exchange, Recorder]:
    """On a connection to a replica that has given the answer `data` before."""
    first, carrier = start()
    feed(first, carrier, [data], eof=False)
    carrier.ended.clear()
    return Exchange(carrier, request_of(method)), carrier


async def outcome_after(before: bytes, pieces: Sequence[bytes], method: str = "POST") -> object:
    exchange, carrier = start_after(before, method)
    feed(exchange, carrier, pieces, eof=True)
    return await what_came(exchange, carrier)


@pytest.mark.parametrize("cut", [None, -4, -3, -1])
async def test_an_answer_under_a_known_head_needs_no_parser(cut: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, carrier = start_after(LENGTH)
    monkeypatch.setattr("gateway.upstream.exchange.HttpResponseParser", None)
    data = LENGTH[: -len(JSON)].replace(b"Length: 15", b"Length: 4") + b"true"

    feed(exchange, carrier, [data] if cut is None else [data[:cut], data[cut:]], eof=False)

    means = (200, [(b"content-type", b"application/json"), (b"content-length", b"4")], b"true")
    assert await what_came(exchange, carrier) == (means, "reusable")


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("excess", [b"x", b"\r\n", b"\r\nHTTP/1.1 200 OK\r\n\r\n"], ids=repr)
async def test_bytes_after_an_answer_under_a_known_head_count_as_ever(excess: bytes, method: str) -> None:
    for cut in range(len(LENGTH), len(LENGTH + excess)):
        pieces = [LENGTH[: cut - 5], LENGTH[cut - 5 :] + excess]
        assert await outcome_after(LENGTH, pieces, method) == await outcome(pieces, method, eof=True)


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("name", [*GOOD, *GARBAGE])
async def test_what_a_replica_answered_before_changes_no_answer(name: str, method: str) -> None:
    data = GOOD[name].data if name in GOOD else GARBAGE[name]
    expected = await outcome([data], method, eof=True)

    for before in (data, *(good.data for good in GOOD.values())):
        assert await outcome_after(before, [data], method) == expected


@given(st.integers(0, 100), st.integers(0, 3), st.binary(max_size=3), st.lists(st.integers(0, 100), max_size=2))
async def test_a_damaged_answer_under_a_known_head_is_what_it_would_be_without(
    place: int, removed: int, damage: bytes, cuts: list[int]
) -> None:
    pieces = split(LENGTH[:place] + damage + LENGTH[place + removed :], cuts)

    assert await outcome_after(LENGTH, pieces) == await outcome(pieces, eof=True)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.lists(st.integers(0, 600), max_size=12))
async def test_chunks_are_joined_without_loss(chunks: list[bytes], cuts: list[int]) -> None:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"

    got, fate = await outcome(split(data, cuts))

    assert got == (200, [(b"transfer-encoding", b"chunked")], b"".join(chunks))
    assert fate == "reusable"


async def test_what_came_before_a_fault_is_read_before_the_fault() -> None:
    exchange, carrier = start()

    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nnonsense")

    assert carrier.ended == ["closed"]
    assert await exchange.read_chunk() == b"ok"
    with pytest.raises(ProtocolViolation):
        await exchange.read_chunk()


async def test_pieces_that_came_while_the_reader_was_away_are_one_chunk() -> None:
    exchange, _ = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\na")
    exchange.feed(b"b")
    exchange.feed(b"c")

    assert await exchange.read_chunk() == b"abc"


async def test_a_waiting_reader_gets_each_piece_as_it_comes() -> None:
    exchange, _ = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")

    for piece in (b"a", b"b"):
        reading = asyncio.ensure_future(exchange.read_chunk())
        await asyncio.sleep(0)
        assert not reading.done()
        exchange.feed(piece)
        assert await reading == piece

    assert await exchange.read_chunk() is None


# --- waking up for what is of use


@pytest.mark.parametrize(("ready", "wakes_at"), [("head", 0), ("body", 1), ("whole", 3)])
async def test_a_caller_wakes_up_when_there_is_what_it_can_use(ready: Ready, wakes_at: int) -> None:
    exchange, carrier = start(ready=ready)
    waiting = asyncio.ensure_future(exchange.wait_ready())
    pieces = (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n", b"ab", b"cd", b"ef")

    for number, piece in enumerate(pieces):
        await asyncio.sleep(0)
        exchange.feed(piece)
        await asyncio.sleep(0)
        assert waiting.done() == (number >= wakes_at)

    assert await exchange.read(6) == b"abcdef"
    assert carrier.ended == ["reusable"]


async def test_a_refusal_wakes_its_caller_with_its_head() -> None:
    exchange, _ = start(ready="whole")
    waiting = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)

    exchange.feed(b"HTTP/1.1 429 Busy\r\nretry-after: 1\r\ncontent-length: 6\r\n\r\n")

    await waiting
    assert exchange.status == 429


async def test_what_must_not_wait_in_memory_wakes_its_caller_before_it_is_whole() -> None:
    exchange, carrier = start(ready="whole")
    waiting = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)

    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (2 * HIGH_WATER_BYTES) + b"x" * HIGH_WATER_BYTES)
    await asyncio.sleep(0)
    assert not waiting.done()
    exchange.feed(b"x")

    await waiting
    assert carrier.flow == ["pause"]


async def test_silence_within_a_body_that_is_wanted_whole_is_a_timeout_of_its_reader() -> None:
    exchange, carrier = start(first_byte_s=600.0, idle_s=0.2, ready="whole")
    waiting = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
    began = time.monotonic()

    while time.monotonic() < began + 0.3:
        exchange.feed(b"x")
        await asyncio.sleep(0.01)
    assert not waiting.done()

    await waiting
    with pytest.raises(UpstreamTimeout, match="silent"):
        await exchange.read(100)
    assert carrier.ended == ["closed"]


# --- forwarding


def keeping(taken: list[bytes], *, more: bool = True) -> Callable[[bytes], bool]:
    """A receiver of pieces that keeps them and says whether it wants more."""

    def take(piece: bytes) -> bool:
        taken.append(piece)
        return more

    return take


async def test_pieces_are_forwarded_inside_the_call_that_brought_them() -> None:
    exchange, carrier = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na")
    taken: list[bytes] = []
    forwarding = asyncio.ensure_future(exchange.forward(keeping(taken)))
    await asyncio.sleep(0)
    assert taken == [b"a"]

    for piece in (b"b", b"c", b"d"):
        exchange.feed(piece)
        assert taken[-1] == piece

    await forwarding
    assert carrier.ended == ["reusable"]


async def test_forwarding_stops_when_no_more_is_wanted_and_goes_on_where_it_stopped() -> None:
    exchange, _ = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n")
    taken: list[bytes] = []
    forwarding = asyncio.ensure_future(exchange.forward(keeping(taken, more=False)))
    await asyncio.sleep(0)

    exchange.feed(b"a")
    exchange.feed(b"b")
    assert taken == [b"a"]
    await forwarding
    exchange.feed(b"c")
    await exchange.forward(keeping(taken))

    assert taken == [b"a", b"bc"]


async def test_a_fault_comes_out_of_forwarding_after_what_came_before_it() -> None:
    exchange, carrier = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    taken: list[bytes] = []
    forwarding = asyncio.ensure_future(exchange.forward(keeping(taken)))
    await asyncio.sleep(0)

    exchange.feed(b"2\r\nok\r\nnonsense")

    with pytest.raises(ProtocolViolation):
        await forwarding
    assert (taken, carrier.ended) == ([b"ok"], ["closed"])


async def test_what_the_receiver_of_pieces_raises_comes_out_of_forwarding() -> None:
    exchange, _ = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")

    def refuse(piece: bytes) -> bool:
        raise ProtocolViolation(f"{piece!r} is nothing")

    forwarding = asyncio.ensure_future(exchange.forward(refuse))
    await asyncio.sleep(0)
    exchange.feed(b"a")

    with pytest.raises(ProtocolViolation, match="nothing"):
        await forwarding


async def test_each_forwarded_piece_ends_the_silence() -> None:
    exchange, carrier = start(idle_s=0.2)
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    forwarding = asyncio.ensure_future(exchange.forward(lambda piece: True))
    began = time.monotonic()

    while time.monotonic() < began + 0.3:
        await asyncio.sleep(0.01)
        exchange.feed(b"1\r\na\r\n")
    assert not forwarding.done()

    with pytest.raises(UpstreamTimeout):
        await forwarding
    assert carrier.ended == ["closed"]


async def test_a_cancelled_forwarding_closes_the_connection() -> None:
    exchange, carrier = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
    taken: list[bytes] = []
    forwarding = asyncio.ensure_future(exchange.forward(keeping(taken)))
    await asyncio.sleep(0)

    forwarding.cancel()
    exchange.feed(b"a")  # before the task has seen it
    with pytest.raises(asyncio.CancelledError):
        await forwarding

    assert (taken, carrier.ended) == ([], ["closed"])


# --- limits


async def test_headers_up_to_the_limits_pass_and_beyond_them_do_not() -> None:
    def with_headers(count: int, value_bytes: int) -> bytes:
        headers = b"".join(b"%04d: %b\r\n" % (i, b"v" * value_bytes) for i in range(count))
        return b"HTTP/1.1 204 No Content\r\n" + headers + b"\r\n"

    fits = MAX_HEAD_BYTES // 64 - 4
    assert (await outcome([with_headers(MAX_HEADERS, 10)]))[1] == "reusable"
    assert (await outcome([with_headers(64, fits)]))[1] == "reusable"
    assert await outcome([with_headers(MAX_HEADERS + 1, 10)]) == (ProtocolViolation, "closed")
    assert await outcome([with_headers(64, fits + 1)]) == (ProtocolViolation, "closed")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"", b"\r\n" * 500),
        (b"HTTP/1.1 200 ", b"very long reason " * 60),
        (b"HTTP/1.1 200 OK\r\nx-endless: ", b"x" * 1000),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 100),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
        (b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 40),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;", b"ext=1;" * 200),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n", b"trailer: x\r\n" * 100),
    ],
    ids=lambda value: repr(value[:30]),
)
async def test_what_never_becomes_a_body_is_cut_before_it_fills_the_memory(begin: bytes, more: bytes) -> None:
    exchange, carrier = start()
    fed = 0

    feed(exchange, carrier, [begin], eof=False)
    while not carrier.ended and fed < 1 << 20:
        exchange.feed(more)
        fed += len(more)

    assert carrier.ended == ["closed"]
    assert fed <= 2 * MAX_HEAD_BYTES + len(more)
    with pytest.raises(ProtocolViolation):
        await exchange.read(1 << 20)


async def test_a_stream_of_any_length_passes() -> None:
    exchange, carrier = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    for _ in range(100_000):
        exchange.feed(b"1\r\nx\r\n")
        await exchange.read_chunk()

    assert not carrier.ended


async def test_a_slow_reader_pauses_the_socket_and_a_reading_one_resumes_it() -> None:
    exchange, carrier = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (3 * HIGH_WATER_BYTES))

    exchange.feed(b"x" * HIGH_WATER_BYTES)
    assert carrier.flow == []
    exchange.feed(b"x")
    exchange.feed(b"x")
    assert carrier.flow == ["pause"]

    for _ in range(2):
        await exchange.read_chunk()
        assert carrier.flow == ["pause", "resume"]
        exchange.feed(b"x")


async def test_a_paused_socket_is_resumed_before_it_carries_the_next_exchange() -> None:
    exchange, carrier = start()
    size = HIGH_WATER_BYTES + 2
    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * (size - 1))
    assert carrier.flow == ["pause"]

    exchange.feed(b"x")  # TLS hands over what it had decrypted already

    assert carrier.flow == ["pause", "resume"]
    assert carrier.ended == ["reusable"]
    assert await exchange.read(size) == b"x" * size


async def test_an_answer_longer_than_the_reader_allows_is_cut() -> None:
    exchange, carrier = start()
    exchange.feed(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 11)

    with pytest.raises(ProtocolViolation, match="longer than 10 bytes"):
        await exchange.read(10)

    assert carrier.ended == ["closed"]


# --- time


async def test_no_head_in_time_is_a_timeout() -> None:
    exchange, carrier = start(first_byte_s=0.01)

    with pytest.raises(UpstreamTimeout, match="no first byte"):
        await exchange.wait_ready()

    assert carrier.ended == ["closed"]


async def test_a_head_without_a_body_in_time_is_the_same_timeout() -> None:
    exchange, carrier = start(first_byte_s=0.02)
    begun = asyncio.get_running_loop().time()
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    await exchange.wait_ready()

    with pytest.raises(UpstreamTimeout, match="no first byte"):
        await exchange.read_chunk()

    assert asyncio.get_running_loop().time() - begun < 2.0
    assert carrier.ended == ["closed"]


async def test_silence_within_a_body_is_a_timeout_however_long_the_first_byte_may_take() -> None:
    exchange, carrier = start(first_byte_s=600.0, idle_s=0.01)
    waiting = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
    await waiting
    assert await exchange.read_chunk() == b"ok"

    with pytest.raises(UpstreamTimeout, match="silent"):
        await exchange.read_chunk()

    assert carrier.ended == ["closed"]


async def test_a_stream_may_last_longer_than_its_silence_limit() -> None:
    exchange, carrier = start(idle_s=0.1)
    loop = asyncio.get_running_loop()
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
    end = loop.time() + 0.25

    while loop.time() < end:
        loop.call_later(0.005, exchange.feed, b"1\r\nx\r\n")
        await exchange.read_chunk()

    assert not carrier.ended


async def test_bytes_that_come_in_the_same_moment_as_the_deadline_are_in_time() -> None:
    exchange, carrier = start(idle_s=0.01)
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
    await exchange.read_chunk()
    reading = asyncio.ensure_future(exchange.read_chunk())
    await asyncio.sleep(0)

    asyncio.get_running_loop().call_later(0.005, exchange.feed, b"1\r\ny\r\n")
    time.sleep(0.03)  # noqa: ASYNC251 - a busy loop finds both due, the bytes first

    assert await reading == b"y"
    assert not carrier.ended


async def test_a_reader_that_is_away_causes_no_timeout() -> None:
    exchange, carrier = start(first_byte_s=0.02, idle_s=0.02)
    waiting = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)
    exchange.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
    await waiting

    await asyncio.sleep(0.06)

    assert not carrier.ended
    assert await exchange.read_chunk() == b"x"


# --- leaving early


async def test_a_cancelled_reader_closes_the_connection() -> None:
    exchange, carrier = start()
    reading = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)

    reading.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reading
    assert carrier.ended == ["closed"]


async def test_a_reader_cancelled_in_the_moment_its_data_came_closes_the_connection_too() -> None:
    exchange, carrier = start()
    reading = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)

    exchange.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
    reading.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reading
    assert carrier.ended == ["closed"]


async def test_an_answer_that_was_read_is_forgotten_at_once() -> None:
    exchange, _ = start(first_byte_s=600.0)
    waiting = asyncio.ensure_future(exchange.wait_ready())
    await asyncio.sleep(0)
    exchange.feed(LENGTH)
    await waiting
    assert await exchange.read(100) == JSON

    forgotten = weakref.ref(exchange)
    del exchange

    assert forgotten() is None  # no timer and no cycle keeps it for the garbage collector


async def test_closing_before_the_end_closes_the_connection_once_and_after_it_not_at_all() -> None:
    early, early_carrier = start()
    early.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
    whole, whole_carrier = start()
    whole.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    for exchange in (early, early, whole, whole):
        await exchange.aclose()

    assert early_carrier.ended == ["closed"]
    assert whole_carrier.ended == ["reusable"]
