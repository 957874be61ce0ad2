import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

import httpx
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.upstream.contract import (
    ConnectFailed,
    Header,
    Origin,
    UpstreamClosed,
    UpstreamError,
)
from gateway.upstream.http1 import Http1Upstream
from tests.gateway.scripted import Peer, Script, answer_each, scripted_replica
from tests.gateway.splits import split
from tests.gateway.upstreams import OK, STREAM_HEAD, call, connected, forever, request
from tests.serving import eventually

LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

native = partial(Http1Upstream, keep_idle_s=60.0)


# --- the request


async def test_a_request_is_written_as_it_was_given() -> None:
    async with connected(answer_each(OK), native) as (upstream, replica):
        sent = request(replica.origin, path="/v1/x?a=1", headers=[(b"x-request-id", b"7")], body=b'{"a":1}')

        assert await call(upstream, sent) == (200, b"ok")

        host = f"127.0.0.1:{replica.origin.port}".encode()
        assert replica.requests == [
            b"POST /v1/x?a=1 HTTP/1.1\r\nhost: " + host + b"\r\naccept-encoding: identity\r\n"
            b'x-request-id: 7\r\ncontent-length: 7\r\n\r\n{"a":1}'
        ]


async def test_a_large_body_arrives_whole_and_the_connection_is_kept() -> None:
    body = random.Random(1).randbytes(8 << 20)
    async with connected(answer_each(OK), native) as (upstream, replica):
        for _ in range(2):
            assert await call(upstream, request(replica.origin, body=body)) == (200, b"ok")

        assert all(received.endswith(body) for received in replica.requests)
        assert replica.accepted == 1


# --- the pool


async def test_requests_one_after_another_share_a_connection() -> None:
    async with connected(answer_each(OK[:25], OK[25:]), native) as (upstream, replica):
        for _ in range(5):
            assert await call(upstream, request(replica.origin)) == (200, b"ok")

        assert replica.accepted == 1
        assert (upstream.in_use, upstream.idle) == (0, 1)


async def test_requests_at_once_have_a_connection_each_and_the_newest_idle_one_is_used_next() -> None:
    async def answer_with_number(peer: Peer) -> None:
        while True:
            await peer.request()
            await asyncio.sleep(0.005 * peer.number)
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n%d" % peer.number)

    async with connected(answer_with_number, native) as (upstream, replica):
        answers = await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(3)))
        assert sorted(answers) == [(200, b"1"), (200, b"2"), (200, b"3")]

        assert await call(upstream, request(replica.origin)) == (200, b"3")


async def test_the_connection_is_free_for_the_next_request_before_the_answer_is_read() -> None:
    async with connected(answer_each(OK), native) as (upstream, replica):
        first = await upstream.send(request(replica.origin))
        await eventually(lambda: upstream.idle == 1)
        second = await upstream.send(request(replica.origin))

        assert await second.read(10) == b"ok"
        assert await first.read(10) == b"ok"
        assert replica.accepted == 1


async def test_bytes_on_an_idle_connection_close_it() -> None:
    speak = asyncio.Event()

    async def answer_then_speak(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        await speak.wait()
        peer.write(OK)

    async with connected(answer_then_speak, native) as (upstream, replica):
        await call(upstream, request(replica.origin))
        assert upstream.idle == 1

        speak.set()

        await eventually(lambda: upstream.idle == 0 and replica.open == 0)


async def test_an_idle_connection_is_not_used_after_its_time_and_is_closed() -> None:
    async with connected(answer_each(OK), partial(Http1Upstream, keep_idle_s=0.02)) as (upstream, replica):
        await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(3)))

        await eventually(lambda: upstream.idle == 0 and replica.open == 0)

        assert not upstream._idle  # replicas that went away are forgotten
        assert await call(upstream, request(replica.origin)) == (200, b"ok")
        assert replica.accepted == 4


async def test_a_connection_that_is_idle_too_long_is_not_used_even_if_it_is_still_open() -> None:
    async with connected(answer_each(OK), partial(Http1Upstream, keep_idle_s=0.05)) as (upstream, replica):
        await call(upstream, request(replica.origin))
        await asyncio.sleep(0.03)
        await call(upstream, request(replica.origin))  # idle anew from here; the sweeper comes at 0.05 and 0.1
        accepted = replica.accepted

        await asyncio.sleep(0.055)

        await call(upstream, request(replica.origin))
        assert replica.accepted == accepted + 1


async def test_a_connection_that_is_old_is_not_kept_however_busy_it_is() -> None:
    """A replica's name may have been given to another address meanwhile."""
    async with connected(answer_each(OK), partial(Http1Upstream, max_age_s=0.02)) as (upstream, replica):
        await call(upstream, request(replica.origin))
        await asyncio.sleep(0.03)

        await call(upstream, request(replica.origin))
        assert upstream.idle == 0
        await call(upstream, request(replica.origin))

        assert replica.accepted == 2


async def test_what_a_burst_leaves_idle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.upstream.http1._MAX_IDLE", 2)
    async with connected(answer_each(OK), native) as (upstream, replica):
        await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(5)))

        assert (replica.accepted, upstream.idle) == (5, 2)
        await eventually(lambda: replica.open == 2)


async def test_origins_do_not_share_connections() -> None:
    async with scripted_replica(answer_each(OK)) as other, connected(answer_each(OK), native) as (upstream, replica):
        for origin in (replica.origin, other.origin, replica.origin, other.origin):
            await call(upstream, request(origin))

        assert (replica.accepted, other.accepted) == (1, 1)
        assert upstream.idle == 2


# --- the keep-alive race


def answer_once_then(end: Callable[[Peer], None]) -> Script:
    """The first connection answers once and ends as its second request arrives; the others answer."""

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        if peer.number == 1:
            await peer.request()
            end(peer)
        else:
            await answer_each(OK)(peer)

    return script


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
async def test_a_request_that_met_a_closed_idle_connection_is_sent_again_on_a_fresh_one(
    end: Callable[[Peer], None],
) -> None:
    async with connected(answer_once_then(end), native) as (upstream, replica):
        await call(upstream, request(replica.origin))

        assert await call(upstream, request(replica.origin)) == (200, b"ok")
        assert replica.accepted == 2


async def test_a_connection_that_the_replica_closed_while_idle_is_forgotten() -> None:
    async def answer_and_close(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        peer.close()

    async with connected(answer_and_close, native) as (upstream, replica):
        for number in (1, 2):
            assert await call(upstream, request(replica.origin)) == (200, b"ok")
            await eventually(lambda: upstream.idle == 0)
            assert replica.accepted == number


async def test_a_request_is_not_sent_again_once_a_byte_of_an_answer_came() -> None:
    def answer_a_byte(peer: Peer) -> None:
        peer.write(b"H")
        peer.close()

    async with connected(answer_once_then(answer_a_byte), native) as (upstream, replica):
        await call(upstream, request(replica.origin))

        with pytest.raises(UpstreamClosed):
            await upstream.send(request(replica.origin))
        assert replica.accepted == 1


async def test_a_replica_that_dies_over_a_request_does_not_get_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.upstream.exchange._RACE_S", 0.02)

    async def answer_then_die(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        await peer.request()
        await asyncio.sleep(0.04)
        peer.reset()

    async with connected(answer_then_die, native) as (upstream, replica):
        await call(upstream, request(replica.origin))

        with pytest.raises(UpstreamClosed):
            await upstream.send(request(replica.origin))
        assert replica.accepted == 1


# --- answers


async def test_methods_and_statuses_without_a_body_keep_the_connection() -> None:
    answers = [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", 200),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 304),
        ("POST", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200),
    ]

    async def script(peer: Peer) -> None:
        for _, answer, _ in answers:
            await peer.request()
            peer.write(answer)

    async with connected(script, native) as (upstream, replica):
        for method, _, status in answers:
            assert await call(upstream, request(replica.origin, method=method, body=b"")) == (status, b"")
        assert replica.accepted == 1


async def test_an_early_answer_is_seen_while_the_request_is_still_being_sent() -> None:
    async def refuse(peer: Peer) -> None:
        peer.pause_reading()
        peer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")

    async with connected(refuse, native) as (upstream, replica):
        sent = request(replica.origin, body=bytes(32 << 20))

        assert await call(upstream, sent) == (413, b"big")

        assert upstream.idle == 0


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
async def test_an_early_answer_survives_that_the_replica_closes_without_reading(end: Callable[[Peer], None]) -> None:
    async def refuse(peer: Peer) -> None:
        peer.pause_reading()
        peer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await asyncio.sleep(0.01)
        end(peer)

    async with connected(refuse, native) as (upstream, replica):
        assert await call(upstream, request(replica.origin, body=bytes(32 << 20))) == (413, b"big")


# --- connecting, waiting, leaving


async def test_closing_does_not_wait_for_a_replica_that_stopped_reading() -> None:
    async def stall(peer: Peer) -> None:
        peer.pause_reading()
        peer.write(STREAM_HEAD + b"1\r\nx\r\n")

    async with connected(stall, native) as (upstream, replica):
        response = await upstream.send(request(replica.origin, body=bytes(32 << 20)))

        await response.aclose()

        await eventually(lambda: not upstream._connections, within_s=0.5)


async def test_stopping_ends_whoever_still_reads_and_closes_every_socket() -> None:
    async def answer_once(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        await forever(peer)

    async with scripted_replica(answer_once) as replica:
        upstream = Http1Upstream()
        await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(3)))
        waiting = [asyncio.ensure_future(upstream.send(request(replica.origin))) for _ in range(2)]
        await eventually(lambda: len(replica.requests) == 5)

        await upstream.aclose()

        for ended in (*waiting, upstream.send(request(replica.origin))):
            with pytest.raises(ConnectFailed, match="stopping"):
                await ended
        assert replica.accepted == 3
        await eventually(lambda: replica.open == 0)


# --- TLS


# --- the same answers through httpx


Outcome = tuple[int, list[Header], bytes] | str


async def native_outcome(origin: Origin, method: str) -> Outcome:
    upstream = Http1Upstream()
    try:
        response = await upstream.send(request(origin, method=method, body=b""))
        return response.status, response.headers, await response.read(1 << 20)
    except UpstreamError:
        return "error"
    finally:
        await upstream.aclose()


async def httpx_outcome(origin: Origin, method: str) -> Outcome:
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            response = await client.request(method, f"http://{origin.host}:{origin.port}/")
        except httpx.TransportError:
            return "error"
    return response.status_code, [(name.lower(), value) for name, value in response.headers.raw], response.content


async def both_outcomes(pieces: list[bytes], method: str = "POST") -> list[Outcome]:
    async def answer_and_close(peer: Peer) -> None:
        await peer.request()
        await peer.write_pieces(pieces)
        peer.close()

    clients: tuple[Callable[[Origin, str], Awaitable[Outcome]], ...] = (native_outcome, httpx_outcome)
    async with scripted_replica(answer_and_close) as replica:
        return [await client(replica.origin, method) for client in clients]


@pytest.mark.parametrize(
    ("answer", "method"),
    [
        (OK, "POST"),
        (OK[:-1], "POST"),
        (
            b"HTTP/1.1 200 OK\r\nX-Mixed: A\r\nx-mixed: b\r\nempty:\r\nspaced:   a b  \r\ncontent-length: 0\r\n\r\n",
            "POST",
        ),
        (b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok", "POST"),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", "POST"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "POST"),
        (STREAM_HEAD + b"A\r\n0123456789\r\n0\r\n\r\n", "POST"),
        (STREAM_HEAD + b"2;x=y\r\nok\r\n0\r\nx-trailer: 1\r\n\r\n", "POST"),
        (STREAM_HEAD + b"2\r\nok\r\n", "POST"),
        (STREAM_HEAD + b"2\r\nok\r\n0\r\n", "POST"),
        (STREAM_HEAD + b"2\r\nokay\r\n", "POST"),
        (STREAM_HEAD + b"nonsense\r\n", "POST"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "POST"),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", "GET"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n", "HEAD"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, "POST"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + OK, "POST"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\nconnection: close\r\n\r\noops", "POST"),
        (b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n", "POST"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: nine\r\n\r\n", "POST"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok", "POST"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "POST"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "POST"),
        (b"<html></html>\r\n\r\n", "POST"),
        (b"\x16\x03\x01\x00\x00", "POST"),
        (b"", "POST"),
        (b"HTTP/1.1 200 OK\r\n", "POST"),
    ],
)
async def test_httpx_sees_the_same_answer(answer: bytes, method: str) -> None:
    native, reference = await both_outcomes([answer], method)

    assert native == reference


@st.composite
def framed_answers(draw: st.DrawFn) -> list[bytes]:
    """An answer with any framing, in any pieces, now and then cut off."""
    status = draw(st.sampled_from([200, 201, 400, 429, 500, 503]))
    head = b"HTTP/1.1 %d Whatever\r\n" % status
    for name in draw(st.lists(st.sampled_from([b"X-Request-Id", b"date", b"Retry-After"]), max_size=3)):
        head += name + b": " + draw(st.text("abc /;=,", max_size=10)).strip().encode() + b"\r\n"
    chunks = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
    body = b"".join(chunks)
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif framing == "chunked":
        framed = b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    else:
        data = head + b"\r\n" + body
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    return split(data[:end], draw(st.lists(st.integers(0, end), max_size=4)))


@given(framed_answers())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_httpx_sees_the_same_of_any_framed_answer(pieces: list[bytes]) -> None:
    native, reference = await both_outcomes(pieces)

    assert native == reference
