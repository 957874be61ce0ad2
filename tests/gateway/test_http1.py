import asyncio
import os
import random
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.upstream.contract import (
    ConnectFailed,
    Header,
    Origin,
    ProtocolViolation,
    Timeouts,
    Upstream,
    UpstreamClosed,
    UpstreamError,
    UpstreamRequest,
    UpstreamTimeout,
)
from gateway.upstream.http1 import Http1Upstream
from tests.gateway.scripted import Peer, Script, ScriptedReplica, answer_each, scripted_replica
from tests.gateway.splits import split
from tests.serving import eventually

LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=5.0, idle_s=5.0)


def request(
    origin: Origin,
    *,
    method: str = "POST",
    path: str = "/v1/completions",
    headers: list[Header] | None = None,
    body: bytes = b"{}",
    timeouts: Timeouts = TIMEOUTS,
) -> UpstreamRequest:
    return UpstreamRequest(method=method, origin=origin, path=path, headers=headers or [], body=body, timeouts=timeouts)


async def call(upstream: Upstream, sent: UpstreamRequest) -> tuple[int, bytes]:
    response = await upstream.send(sent)
    try:
        return response.status, await response.read(1 << 26)
    finally:
        await response.aclose()


@asynccontextmanager
async def connected(
    script: Script, *, keep_idle_s: float = 60.0
) -> AsyncIterator[tuple[Http1Upstream, ScriptedReplica]]:
    """A client and its replica. At the end nothing may be in use."""
    async with scripted_replica(script) as replica:
        upstream = Http1Upstream(keep_idle_s=keep_idle_s)
        try:
            yield upstream, replica
            assert upstream.in_use == 0
        finally:
            await upstream.aclose()
        for peer in replica.peers:
            peer.resume_reading()  # who does not read does not see the end either
        await eventually(lambda: replica.open == 0)


async def forever(peer: Peer) -> None:
    """Read requests, answer nothing."""
    while True:
        await peer.request()


# --- the request


async def test_a_request_is_written_as_it_was_given() -> None:
    async with connected(answer_each(OK)) as (upstream, replica):
        sent = request(replica.origin, path="/v1/x?a=1", headers=[(b"x-request-id", b"7")], body=b'{"a":1}')

        assert await call(upstream, sent) == (200, b"ok")

        host = f"127.0.0.1:{replica.origin.port}".encode()
        assert replica.requests == [
            b"POST /v1/x?a=1 HTTP/1.1\r\nhost: " + host + b"\r\naccept-encoding: identity\r\n"
            b'x-request-id: 7\r\ncontent-length: 7\r\n\r\n{"a":1}'
        ]


async def test_a_get_has_no_content_length_and_an_empty_post_has_one() -> None:
    async with connected(answer_each(OK)) as (upstream, replica):
        await call(upstream, request(replica.origin, method="GET", body=b""))
        await call(upstream, request(replica.origin, method="POST", body=b""))

        get, post = replica.requests
        assert b"content-length" not in get
        assert b"content-length: 0\r\n" in post


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/a\r\nx: y", []),
        ("/a b", []),
        ("a", []),
        ("/é", []),
        ("/", [(b"x", b"a\r\nhost: evil")]),
        ("/", [(b"x", b"a\nb")]),
        ("/", [(b"x\r", b"a")]),
        ("/", [(b"x", b"\0")]),
        ("/", [(b"host", b"other")]),
        ("/", [(b"transfer-encoding", b"chunked")]),
    ],
)
async def test_a_request_that_would_smuggle_is_never_written(path: str, headers: list[Header]) -> None:
    async with connected(answer_each(OK)) as (upstream, replica):
        await call(upstream, request(replica.origin))

        with pytest.raises(ValueError, match=r"path|header|ascii"):
            await upstream.send(request(replica.origin, path=path, headers=headers))

        assert len(replica.requests) == 1
        assert upstream.idle == 1


async def test_a_large_body_arrives_whole_and_the_connection_is_kept() -> None:
    body = random.Random(1).randbytes(8 << 20)
    async with connected(answer_each(OK)) as (upstream, replica):
        for _ in range(2):
            assert await call(upstream, request(replica.origin, body=body)) == (200, b"ok")

        assert all(received.endswith(body) for received in replica.requests)
        assert replica.accepted == 1


# --- the pool


async def test_requests_one_after_another_share_a_connection() -> None:
    async with connected(answer_each(OK[:25], OK[25:])) as (upstream, replica):
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

    async with connected(answer_with_number) as (upstream, replica):
        answers = await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(3)))
        assert sorted(answers) == [(200, b"1"), (200, b"2"), (200, b"3")]

        assert await call(upstream, request(replica.origin)) == (200, b"3")


async def test_the_connection_is_free_for_the_next_request_before_the_answer_is_read() -> None:
    async with connected(answer_each(OK)) as (upstream, replica):
        first = await upstream.send(request(replica.origin))
        await eventually(lambda: upstream.idle == 1)
        second = await upstream.send(request(replica.origin))

        assert await second.read(10) == b"ok"
        assert await first.read(10) == b"ok"
        assert replica.accepted == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
    ],
    ids=["connection close", "http 1.0", "an answer nobody asked for"],
)
async def test_a_connection_that_cannot_be_trusted_with_another_request_is_closed(answer: bytes) -> None:
    async with connected(answer_each(answer)) as (upstream, replica):
        for _ in range(2):
            assert await call(upstream, request(replica.origin)) == (200, b"ok")

        assert replica.accepted == 2
        assert upstream.idle == 0
        await eventually(lambda: replica.open == 0)


async def test_bytes_on_an_idle_connection_close_it() -> None:
    speak = asyncio.Event()

    async def answer_then_speak(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        await speak.wait()
        peer.write(OK)

    async with connected(answer_then_speak) as (upstream, replica):
        await call(upstream, request(replica.origin))
        assert upstream.idle == 1

        speak.set()

        await eventually(lambda: upstream.idle == 0 and replica.open == 0)


async def test_an_idle_connection_is_not_used_after_its_time_and_is_closed() -> None:
    async with connected(answer_each(OK), keep_idle_s=0.02) as (upstream, replica):
        await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(3)))

        await eventually(lambda: upstream.idle == 0 and replica.open == 0)

        assert not upstream._idle  # replicas that went away are forgotten
        assert await call(upstream, request(replica.origin)) == (200, b"ok")
        assert replica.accepted == 4


async def test_a_connection_that_is_idle_too_long_is_not_used_even_if_it_is_still_open() -> None:
    async with connected(answer_each(OK), keep_idle_s=0.05) as (upstream, replica):
        await call(upstream, request(replica.origin))
        await asyncio.sleep(0.03)
        await call(upstream, request(replica.origin))  # idle anew from here; the sweeper comes at 0.05 and 0.1
        accepted = replica.accepted

        await asyncio.sleep(0.055)

        await call(upstream, request(replica.origin))
        assert replica.accepted == accepted + 1


async def test_what_a_burst_leaves_idle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.upstream.http1._MAX_IDLE", 2)
    async with connected(answer_each(OK)) as (upstream, replica):
        await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(5)))

        assert (replica.accepted, upstream.idle) == (5, 2)
        await eventually(lambda: replica.open == 2)


async def test_origins_do_not_share_connections() -> None:
    async with scripted_replica(answer_each(OK)) as other, connected(answer_each(OK)) as (upstream, replica):
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
    async with connected(answer_once_then(end)) as (upstream, replica):
        await call(upstream, request(replica.origin))

        assert await call(upstream, request(replica.origin)) == (200, b"ok")
        assert replica.accepted == 2


async def test_a_connection_that_the_replica_closed_while_idle_is_forgotten() -> None:
    async def answer_and_close(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        peer.close()

    async with connected(answer_and_close) as (upstream, replica):
        for number in (1, 2):
            assert await call(upstream, request(replica.origin)) == (200, b"ok")
            await eventually(lambda: upstream.idle == 0)
            assert replica.accepted == number


async def test_many_requests_against_a_replica_that_closes_at_the_worst_moment_all_succeed() -> None:
    async def close_on_reuse(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        with suppress(asyncio.CancelledError):
            await peer.request()
        peer.close()

    async with connected(close_on_reuse) as (upstream, replica):
        for _ in range(5):
            answers = await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(10)))
            assert answers == [(200, b"ok")] * 10


async def test_a_request_is_not_sent_again_once_a_byte_of_an_answer_came() -> None:
    def answer_a_byte(peer: Peer) -> None:
        peer.write(b"H")
        peer.close()

    async with connected(answer_once_then(answer_a_byte)) as (upstream, replica):
        await call(upstream, request(replica.origin))

        with pytest.raises(UpstreamClosed):
            await upstream.send(request(replica.origin))
        assert replica.accepted == 1


async def test_a_request_is_not_sent_again_when_its_connection_was_fresh() -> None:
    async def close(peer: Peer) -> None:
        await peer.request()
        peer.close()

    async with connected(close) as (upstream, replica):
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

    async with connected(answer_then_die) as (upstream, replica):
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

    async with connected(script) as (upstream, replica):
        for method, _, status in answers:
            assert await call(upstream, request(replica.origin, method=method, body=b"")) == (status, b"")
        assert replica.accepted == 1


async def test_a_body_that_ends_with_the_connection_is_whole() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.write_pieces([b"HTTP/1.1 200 OK\r\n\r\n", b"to the", b" end"])
        peer.close()

    async with connected(script) as (upstream, replica):
        assert await call(upstream, request(replica.origin)) == (200, b"to the end")


async def test_chunks_are_handed_over_as_they_come() -> None:
    wanted = asyncio.Event()
    pieces = (b"2\r\non\r\n", b"1\r\nx\r\n", b"0\r\n\r\n")

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD)
        for piece in pieces:
            await wanted.wait()
            wanted.clear()
            peer.write(piece)

    async with connected(script) as (upstream, replica):
        response = await upstream.send(request(replica.origin))
        for chunk in (b"on", b"x", None):
            wanted.set()
            assert await response.read_chunk() == chunk


async def test_a_slow_reader_slows_the_replica_and_misses_nothing() -> None:
    size = 48 << 20
    piece = bytes(range(256)) * 4096
    server: list[Peer] = []

    async def script(peer: Peer) -> None:
        server.append(peer)
        await peer.request()
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            peer.write(piece)

    async with connected(script) as (upstream, replica):
        response = await upstream.send(request(replica.origin))
        unsent = size
        while server[0].unsent_bytes < unsent:  # until nothing moves any more
            unsent = server[0].unsent_bytes
            await asyncio.sleep(0.05)
        assert unsent > size // 2

        read = 0
        while (chunk := await response.read_chunk()) is not None:
            assert chunk[0] == read % 256
            read += len(chunk)
        assert read == size


async def test_an_early_answer_is_seen_while_the_request_is_still_being_sent() -> None:
    async def refuse(peer: Peer) -> None:
        peer.pause_reading()
        peer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")

    async with connected(refuse) as (upstream, replica):
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

    async with connected(refuse) as (upstream, replica):
        assert await call(upstream, request(replica.origin, body=bytes(32 << 20))) == (413, b"big")


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
@pytest.mark.parametrize(
    "begin",
    [b"", b"HTTP/1.1 200", STREAM_HEAD, STREAM_HEAD + b"2\r\nok\r\n", STREAM_HEAD + b"2\r\nok\r\n0\r\n", OK[:-1]],
)
async def test_a_connection_that_ends_before_its_answer_is_an_error(begin: bytes, end: Callable[[Peer], None]) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.write_pieces([begin])
        end(peer)

    async with connected(script) as (upstream, replica):
        with pytest.raises(UpstreamClosed):
            await call(upstream, request(replica.origin))


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>\r\n\r\n",
        b"\x00\x01\x02",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok",
        STREAM_HEAD + b"zz\r\n",
    ],
)
async def test_garbage_is_an_error_and_closes_the_connection(answer: bytes) -> None:
    async with connected(answer_each(answer)) as (upstream, replica):
        with pytest.raises(ProtocolViolation):
            await call(upstream, request(replica.origin))
        await eventually(lambda: replica.open == 0)


# --- connecting, waiting, leaving


async def test_a_refused_connection_is_told_apart() -> None:
    async with scripted_replica(forever) as replica:
        gone = replica.origin
    upstream = Http1Upstream()

    with pytest.raises(ConnectFailed):
        await upstream.send(request(gone))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 64])
async def test_a_host_that_cannot_be_found_is_a_failed_connect(host: str) -> None:
    with pytest.raises(ConnectFailed):
        await Http1Upstream().send(request(Origin("http", host, 80)))


async def test_a_connect_that_takes_too_long_is_given_up() -> None:
    async with connected(forever) as (upstream, replica):
        unanswered = Origin("https", "127.0.0.1", replica.origin.port)  # no TLS there: the handshake waits
        hasty = Timeouts(connect_s=0.02, first_byte_s=5.0, idle_s=5.0)

        with pytest.raises(ConnectFailed, match=r"within 0\.02 s"):
            await upstream.send(request(unanswered, timeouts=hasty))

        await eventually(lambda: replica.open == 0)


async def test_a_silent_replica_is_given_up_and_its_connection_closed() -> None:
    async def begin_only(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD + b"2\r\nok\r\n")

    hasty = Timeouts(connect_s=5.0, first_byte_s=0.02, idle_s=0.02)
    async with connected(forever) as (upstream, replica):
        with pytest.raises(UpstreamTimeout, match="no first byte"):
            await call(upstream, request(replica.origin, timeouts=hasty))
        await eventually(lambda: replica.open == 0)
    async with connected(begin_only) as (upstream, replica):
        with pytest.raises(UpstreamTimeout, match="silent"):
            await call(upstream, request(replica.origin, timeouts=hasty))
        await eventually(lambda: replica.open == 0)


async def test_closing_an_answer_before_its_end_reaches_the_replica_at_once() -> None:
    async def stream(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD)
        while True:
            peer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.001)

    async with connected(stream) as (upstream, replica):
        response = await upstream.send(request(replica.origin))
        await response.read_chunk()
        assert (upstream.in_use, replica.open) == (1, 1)

        await response.aclose()

        assert upstream.in_use == 0
        await eventually(lambda: replica.open == 0, within_s=0.2)


async def test_closing_does_not_wait_for_a_replica_that_stopped_reading() -> None:
    async def stall(peer: Peer) -> None:
        peer.pause_reading()
        peer.write(STREAM_HEAD + b"1\r\nx\r\n")

    async with connected(stall) as (upstream, replica):
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


async def test_stopping_ends_answers_that_had_begun() -> None:
    async with scripted_replica(answer_each(STREAM_HEAD + b"2\r\nok\r\n")) as replica:
        upstream = Http1Upstream()
        response = await upstream.send(request(replica.origin))

        await upstream.aclose()

        assert await response.read_chunk() == b"ok"
        with pytest.raises(UpstreamClosed):
            await response.read_chunk()


async def test_requests_cancelled_at_any_moment_leave_nothing_behind() -> None:
    dice = random.Random(7)

    async def answer_slowly(peer: Peer) -> None:
        while True:
            await peer.request()
            for piece in (STREAM_HEAD, b"4\r\nso", b"me\r\n", b"3\r\nend\r\n", b"0\r\n\r\n"):
                await asyncio.sleep(dice.choice((0, 0, 0.001, 0.003)))
                peer.write(piece)

    async with connected(answer_slowly) as (upstream, replica):
        assert await call(upstream, request(replica.origin)) == (200, b"someend")
        descriptors = len(os.listdir("/proc/self/fd"))
        tasks = len(asyncio.all_tasks())

        async def cancelled_call() -> bool:
            task = asyncio.ensure_future(call(upstream, request(replica.origin, body=bytes(dice.choice((2, 1 << 18))))))
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            await asyncio.sleep(dice.uniform(0, 0.012))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return task.cancelled()

        outcomes = [
            cancelled for _ in range(10) for cancelled in await asyncio.gather(*(cancelled_call() for _ in range(30)))
        ]
        assert sum(outcomes) > 100

        assert upstream.in_use == 0
        await eventually(lambda: replica.open == upstream.idle)
        answers = await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(20)))
        assert answers == [(200, b"someend")] * 20
        await upstream.aclose()
        assert not upstream._connections
        await eventually(lambda: replica.open == 0 and len(os.listdir("/proc/self/fd")) <= descriptors - 2)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


# --- TLS


@pytest.fixture(scope="module")
def tls_contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate for localhost, and a client's that trusts it."""
    assert shutil.which("openssl"), "this test makes its certificate with the openssl command"
    folder: Path = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=str(certificate))


async def test_https_carries_requests_streams_and_large_bodies(
    tls_contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, client = tls_contexts
    large = bytes(range(256)) * 8192

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        await peer.request()
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(large) + large)
        await peer.request()
        await peer.write_pieces([STREAM_HEAD, b"2\r\nok\r\n", b"0\r\n\r\n"])
        await peer.request()
        await peer.write_pieces([b"HTTP/1.1 200 OK\r\n\r\n", b"to the end"])
        peer.close()

    async with scripted_replica(script, tls=server) as replica:
        upstream = Http1Upstream(tls=client)
        assert await call(upstream, request(replica.origin, body=large)) == (200, b"ok")
        assert await call(upstream, request(replica.origin)) == (200, large)
        assert await call(upstream, request(replica.origin)) == (200, b"ok")
        assert await call(upstream, request(replica.origin)) == (200, b"to the end")
        assert replica.accepted == 1
        await upstream.aclose()


async def test_https_to_whom_we_do_not_trust_is_a_failed_connect(
    tls_contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, client = tls_contexts
    async with scripted_replica(forever, tls=server) as replica:
        other_name = Origin("https", "127.0.0.1", replica.origin.port)
        for upstream, origin in ((Http1Upstream(), replica.origin), (Http1Upstream(tls=client), other_name)):
            with pytest.raises(ConnectFailed):
                await upstream.send(request(origin))
        assert not replica.requests


async def test_closing_an_https_answer_early_reaches_the_replica_at_once(
    tls_contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, client = tls_contexts

    async def begin(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD + b"2\r\nok\r\n")

    async with scripted_replica(begin, tls=server) as replica:
        upstream = Http1Upstream(tls=client)
        response = await upstream.send(request(replica.origin))
        assert await response.read_chunk() == b"ok"

        await response.aclose()

        await eventually(lambda: replica.open == 0, within_s=0.5)


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
