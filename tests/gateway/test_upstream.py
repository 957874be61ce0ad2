"""What holds for every transport to replicas, over each of them; what only the native one does is in test_http1.py."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from gateway.upstream.contract import (
    ConnectFailed,
    ConnectRefused,
    Header,
    LocalExhaustion,
    Origin,
    ProtocolViolation,
    Timeouts,
    Upstream,
    UpstreamClosed,
    UpstreamRequest,
    UpstreamTimeout,
)
from gateway.upstream.exchange import MAX_HEAD_BYTES, MAX_HEADERS
from gateway.upstream.http1 import Http1Upstream
from gateway.upstream.httpx_upstream import HttpxUpstream
from tests.gateway.scripted import Peer, answer_each, scripted_replica
from tests.gateway.upstreams import OK, STREAM_HEAD, call, connected, forever, request
from tests.serving import eventually

LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

Transport = type[Http1Upstream] | type[HttpxUpstream]


@pytest.fixture(params=[Http1Upstream, HttpxUpstream], ids=["native", "httpx"])
def transport(request: pytest.FixtureRequest) -> Transport:
    made: Transport = request.param
    return made


# --- addresses


@pytest.mark.parametrize(
    ("url", "origin", "prefix"),
    [
        ("http://10.0.0.1:8000", Origin("http", "10.0.0.1", 8000), ""),
        ("http://replica", Origin("http", "replica", 80), ""),
        ("https://replica/", Origin("https", "replica", 443), ""),
        ("https://replica:8443/team/a/", Origin("https", "replica", 8443), "/team/a"),
        ("http://[::1]:8000", Origin("http", "::1", 8000), ""),
    ],
)
def test_a_replicas_url_is_an_origin_and_a_prefix(url: str, origin: Origin, prefix: str) -> None:
    assert Origin.parse(url) == (origin, prefix)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "replica:8000",
        "ftp://replica",
        "http://",
        "http://a@replica",
        "http://replica?x=1",
        "http://replica#x",
        "http://replica:0",
        "http://replica:99999",
        "http://replica:port",
    ],
)
def test_what_is_no_replicas_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        Origin.parse(url)


# --- calls


async def test_a_get_has_no_content_length_and_an_empty_post_has_one(transport: Transport) -> None:
    async with connected(answer_each(OK), transport) as (upstream, replica):
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
async def test_a_request_that_would_smuggle_is_never_written(
    path: str, headers: list[Header], transport: Transport
) -> None:
    async with connected(answer_each(OK), transport) as (upstream, replica):
        await call(upstream, request(replica.origin))

        with pytest.raises(ValueError, match=r"path|header|ascii"):
            await upstream.send(request(replica.origin, path=path, headers=headers))

        assert len(replica.requests) == 1
        assert upstream.in_use == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
    ],
    ids=["connection close", "http 1.0", "an answer nobody asked for"],
)
async def test_a_connection_that_cannot_be_trusted_with_another_request_is_closed(
    answer: bytes, transport: Transport
) -> None:
    async with connected(answer_each(answer), transport) as (upstream, replica):
        for _ in range(2):
            assert await call(upstream, request(replica.origin)) == (200, b"ok")

        assert replica.accepted == 2
        assert upstream.idle == 0
        await eventually(lambda: replica.open == 0)


async def test_many_requests_against_a_replica_that_closes_at_the_worst_moment_all_succeed(
    transport: Transport,
) -> None:
    async def close_on_reuse(peer: Peer) -> None:
        await peer.request()
        peer.write(OK)
        with suppress(asyncio.CancelledError):
            await peer.request()
        peer.close()

    async with connected(close_on_reuse, transport) as (upstream, replica):
        for _ in range(5):
            answers = await asyncio.gather(*(call(upstream, request(replica.origin)) for _ in range(10)))
            assert answers == [(200, b"ok")] * 10


async def test_a_request_is_not_sent_again_when_its_connection_was_fresh(transport: Transport) -> None:
    async def close(peer: Peer) -> None:
        await peer.request()
        peer.close()

    async with connected(close, transport) as (upstream, replica):
        with pytest.raises(UpstreamClosed):
            await upstream.send(request(replica.origin))
        assert replica.accepted == 1


async def test_a_body_that_ends_with_the_connection_is_whole(transport: Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.write_pieces([b"HTTP/1.1 200 OK\r\n\r\n", b"to the", b" end"])
        peer.close()

    async with connected(script, transport) as (upstream, replica):
        assert await call(upstream, request(replica.origin)) == (200, b"to the end")


async def test_chunks_are_handed_over_as_they_come(transport: Transport) -> None:
    wanted = asyncio.Event()
    pieces = (b"2\r\non\r\n", b"1\r\nx\r\n", b"0\r\n\r\n")

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD)
        for piece in pieces:
            await wanted.wait()
            wanted.clear()
            peer.write(piece)

    async with connected(script, transport) as (upstream, replica):
        response = await upstream.send(request(replica.origin))
        for chunk in (b"on", b"x", None):
            wanted.set()
            assert await response.read_chunk() == chunk


async def test_a_slow_reader_slows_the_replica_and_misses_nothing(transport: Transport) -> None:
    size = 48 << 20
    piece = bytes(range(256)) * 4096
    server: list[Peer] = []

    async def script(peer: Peer) -> None:
        server.append(peer)
        await peer.request()
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            peer.write(piece)

    async with connected(script, transport) as (upstream, replica):
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


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
@pytest.mark.parametrize(
    "begin",
    [b"", b"HTTP/1.1 200", STREAM_HEAD, STREAM_HEAD + b"2\r\nok\r\n", STREAM_HEAD + b"2\r\nok\r\n0\r\n", OK[:-1]],
)
async def test_a_connection_that_ends_before_its_answer_is_an_error(
    begin: bytes, end: Callable[[Peer], None], transport: Transport
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.write_pieces([begin])
        end(peer)

    async with connected(script, transport) as (upstream, replica):
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
async def test_garbage_is_an_error_and_closes_the_connection(answer: bytes, transport: Transport) -> None:
    async with connected(answer_each(answer), transport) as (upstream, replica):
        with pytest.raises(ProtocolViolation):
            await call(upstream, request(replica.origin))
        await eventually(lambda: replica.open == 0)


async def test_a_refused_connection_is_told_apart(transport: Transport) -> None:
    async with scripted_replica(forever) as replica:
        gone = replica.origin
    upstream = transport()

    with pytest.raises(ConnectRefused):
        await upstream.send(request(gone))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 64])
async def test_a_host_that_cannot_be_found_is_a_failed_connect(host: str, transport: Transport) -> None:
    with pytest.raises(ConnectFailed):
        await transport().send(request(Origin("http", host, 80)))


async def test_a_connect_that_takes_too_long_is_given_up(transport: Transport) -> None:
    async with connected(forever, transport) as (upstream, replica):
        unanswered = Origin("https", "127.0.0.1", replica.origin.port)  # no TLS there: the handshake waits
        hasty = Timeouts(connect_s=0.02, first_byte_s=5.0, idle_s=5.0)

        with pytest.raises(ConnectFailed, match=r"within 0\.02 s"):
            await upstream.send(request(unanswered, timeouts=hasty))

        await eventually(lambda: replica.open == 0)


async def test_a_silent_replica_is_given_up_and_its_connection_closed(transport: Transport) -> None:
    async def begin_only(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD + b"2\r\nok\r\n")

    hasty = Timeouts(connect_s=5.0, first_byte_s=0.02, idle_s=5.0)
    impatient = Timeouts(connect_s=5.0, first_byte_s=5.0, idle_s=0.02)
    async with connected(forever, transport) as (upstream, replica):
        with pytest.raises(UpstreamTimeout, match="no first byte"):
            await call(upstream, request(replica.origin, timeouts=hasty))
        await eventually(lambda: replica.open == 0)
    async with connected(begin_only, transport) as (upstream, replica):
        with pytest.raises(UpstreamTimeout, match="silent"):
            await call(upstream, request(replica.origin, timeouts=impatient))
        await eventually(lambda: replica.open == 0)


async def test_closing_an_answer_before_its_end_reaches_the_replica_at_once(transport: Transport) -> None:
    async def stream(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD)
        while True:
            peer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.001)

    async with connected(stream, transport) as (upstream, replica):
        response = await upstream.send(request(replica.origin))
        await response.read_chunk()
        assert (upstream.in_use, replica.open) == (1, 1)

        await response.aclose()

        assert upstream.in_use == 0
        await eventually(lambda: replica.open == 0, within_s=0.2)


async def test_stopping_ends_answers_that_had_begun(transport: Transport) -> None:
    async with scripted_replica(answer_each(STREAM_HEAD + b"2\r\nok\r\n")) as replica:
        upstream = transport()
        response = await upstream.send(request(replica.origin))

        await upstream.aclose()

        assert await response.read_chunk() == b"ok"
        with pytest.raises(UpstreamClosed):
            await response.read_chunk()


async def test_requests_cancelled_at_any_moment_leave_nothing_behind(transport: Transport) -> None:
    dice = random.Random(7)

    async def answer_slowly(peer: Peer) -> None:
        while True:
            await peer.request()
            for piece in (STREAM_HEAD, b"4\r\nso", b"me\r\n", b"3\r\nend\r\n", b"0\r\n\r\n"):
                await asyncio.sleep(dice.choice((0, 0, 0.001, 0.003)))
                peer.write(piece)

    async with connected(answer_slowly, transport) as (upstream, replica):
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
        assert (upstream.in_use, upstream.idle) == (0, 0)
        await eventually(lambda: replica.open == 0 and len(os.listdir("/proc/self/fd")) <= descriptors - 2)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_the_replica_gets_the_bytes_of_the_target_the_headers_and_the_body(transport: Transport) -> None:
    async with connected(answer_each(OK), transport) as (upstream, replica):
        path = "/v1/a//b/../%2e?x=%C3%A9&y=[1]"
        headers = [(b"x-request-id", b"7"), (b"x-seven", b" padded "), (b"x-seven", b"\xc3\xa9")]

        await call(upstream, request(replica.origin, path=path, headers=headers, body=b'{"a":1}'))

        head, _, body = replica.requests[0].partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        assert (line, body) == (f"POST {path} HTTP/1.1".encode(), b'{"a":1}')
        told = [(name, value.strip()) for name, _, value in (each.partition(b":") for each in lines)]
        assert dict(told)[b"host"] == f"127.0.0.1:{replica.origin.port}".encode()
        assert [value for name, value in told if name == b"x-seven"] == [b"padded", b"\xc3\xa9"]
        assert {name for name, _ in told} - {b"connection"} == {
            b"host",
            b"accept-encoding",
            b"x-request-id",
            b"x-seven",
            b"content-length",
        }


async def test_nothing_of_the_environment_or_of_earlier_answers_is_used(
    monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    redirect = b"HTTP/1.1 302 Found\r\nlocation: /other\r\nset-cookie: a=b\r\ncontent-length: 2\r\n\r\nno"
    async with connected(answer_each(redirect), transport) as (upstream, replica):
        for _ in range(2):
            assert await call(upstream, request(replica.origin)) == (302, b"no")

        assert len(replica.requests) == 2
        assert not [sent for sent in replica.requests if b"cookie" in sent.lower()]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (MAX_HEADERS + 1) + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (4 * MAX_HEAD_BYTES),
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        STREAM_HEAD + b"2;" + b"x" * (4 * MAX_HEAD_BYTES),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["many headers", "a large header", "a header without end", "an upgrade", "an endless extension", "encoded"],
)
async def test_what_a_replica_may_send_is_bounded(answer: bytes, transport: Transport) -> None:
    async with connected(answer_each(answer), transport) as (upstream, replica):
        with pytest.raises(ProtocolViolation):
            await call(upstream, request(replica.origin))
        await eventually(lambda: replica.open == 0)


async def test_an_answer_longer_than_its_reader_takes_is_an_error_and_closes(transport: Transport) -> None:
    async with connected(answer_each(OK), transport) as (upstream, replica):
        response = await upstream.send(request(replica.origin))
        with pytest.raises(ProtocolViolation, match="longer than 1 bytes"):
            await response.read(1)


async def test_a_call_that_is_cancelled_while_its_request_is_sent_leaves_nothing(transport: Transport) -> None:
    async def never_read(peer: Peer) -> None:
        peer.pause_reading()

    async with connected(never_read, transport) as (upstream, replica):
        sending = asyncio.ensure_future(upstream.send(request(replica.origin, body=bytes(32 << 20))))
        await eventually(lambda: replica.open == 1)

        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending

        await eventually(lambda: upstream.in_use == 0, within_s=0.5)


async def test_two_thousand_aborted_streams_leave_room_for_the_next_call(transport: Transport) -> None:
    """encode/httpcore#1093, twice cancelled as a server does it: ten slots were gone after 200 of them."""

    async def stream(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.write_pieces([STREAM_HEAD, b"2\r\nok\r\n"])

    async def abort(upstream: Upstream, sent: UpstreamRequest, turns: int) -> None:
        async def read() -> None:
            response = await upstream.send(sent)
            try:
                while await response.read_chunk() is not None:
                    pass
            finally:
                await response.aclose()

        reading = asyncio.ensure_future(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.sleep(0)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    async with connected(stream, transport) as (upstream, replica):
        tasks, descriptors = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        sent = request(replica.origin)
        is_production_loop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
        for _ in range(40 if is_production_loop else 4):
            await asyncio.gather(*(abort(upstream, sent, turns) for turns in range(50)))

        response = await upstream.send(sent)
        assert await response.read_chunk() == b"ok"
        await response.aclose()
        await eventually(lambda: upstream.in_use == upstream.idle == replica.open == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


async def test_pieces_are_forwarded_until_no_more_are_wanted_and_the_rest_can_be_read(transport: Transport) -> None:
    wanted = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.write_pieces([STREAM_HEAD, b"2\r\non\r\n"])
        await wanted.wait()
        await peer.write_pieces([b"1\r\nx\r\n", b"0\r\n\r\n"])

    taken: list[bytes] = []

    def take_one(chunk: bytes) -> bool:
        taken.append(chunk)
        wanted.set()
        return False

    def fail(chunk: bytes) -> bool:
        raise ValueError("not that")

    async with connected(script, transport) as (upstream, replica):
        response = await upstream.send(request(replica.origin))

        await response.forward(take_one)
        assert taken == [b"on"]
        with pytest.raises(ValueError, match="not that"):
            await response.forward(fail)
        await response.forward(take_one)
        assert await response.read_chunk() is None
        assert taken == [b"on"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL])
async def test_no_room_for_a_connection_is_no_failed_connect(
    monkeypatch: pytest.MonkeyPatch, number: int, transport: Transport
) -> None:
    async def exhausted(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", exhausted, raising=True)

    with pytest.raises(LocalExhaustion):
        await transport().send(request(Origin("http", "127.0.0.1", 9)))


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
    transport: Transport,
) -> None:
    server, client = tls_contexts
    large = bytes(range(256)) * 8192

    answers: Iterator[list[bytes]] = iter(
        [
            [OK],
            [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(large) + large],
            [STREAM_HEAD, b"2\r\nok\r\n", b"0\r\n\r\n"],
            [b"HTTP/1.1 200 OK\r\n\r\n", b"to the end"],
        ]
    )

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.write_pieces(pieces := next(answers))
            if b"end" in pieces[-1]:
                peer.close()

    async with scripted_replica(script, tls=server) as replica:
        upstream = transport(tls=client)
        assert await call(upstream, request(replica.origin, body=large)) == (200, b"ok")
        assert await call(upstream, request(replica.origin)) == (200, large)
        assert await call(upstream, request(replica.origin)) == (200, b"ok")
        assert await call(upstream, request(replica.origin)) == (200, b"to the end")
        await upstream.aclose()


async def test_https_to_whom_we_do_not_trust_is_a_failed_connect(
    tls_contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    transport: Transport,
) -> None:
    server, client = tls_contexts
    async with scripted_replica(forever, tls=server) as replica:
        other_name = Origin("https", "127.0.0.1", replica.origin.port)
        for upstream, origin in ((transport(), replica.origin), (transport(tls=client), other_name)):
            with pytest.raises(ConnectFailed):
                await upstream.send(request(origin))
        assert not replica.requests


async def test_closing_an_https_answer_early_reaches_the_replica_at_once(
    tls_contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    transport: Transport,
) -> None:
    server, client = tls_contexts

    async def begin(peer: Peer) -> None:
        await peer.request()
        peer.write(STREAM_HEAD + b"2\r\nok\r\n")

    async with scripted_replica(begin, tls=server) as replica:
        upstream = transport(tls=client)
        response = await upstream.send(request(replica.origin))
        assert await response.read_chunk() == b"ok"

        await response.aclose()

        await eventually(lambda: replica.open == 0, within_s=0.5)
