from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import httpx
import pytest

from tests.gateway.stub import (
    DONE,
    MODEL,
    STREAM_HEAD,
    USAGE,
    Answer,
    Running,
    StubReplica,
    chunked,
    dies,
    event,
    gateway,
    hangs,
    response,
    says,
    streams,
    stub,
    writes,
)
from tests.serving import eventually

NO_QUEUE = {"max_queued": 0}
ANSWER = (event("Hel"), event("lo"), event("", "stop"), USAGE, DONE)


async def test_a_whole_answer_passes_through_byte_for_byte(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        answer = await running.chat(weird_field={"kept": [1, 2]})

        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "hi"
        assert replica.seen[0].path == "/v1/chat/completions"
        assert replica.seen[0].json["weird_field"] == {"kept": [1, 2]}
        assert answer.headers["x-request-id"] == replica.seen[0].headers["x-request-id"]


async def test_usage_is_asked_for_in_every_stream_and_stripped_for_those_who_did_not(tmp_path: Path) -> None:
    async with stub(streams(*ANSWER)) as replica, gateway(tmp_path, replica) as running:
        silent = await running.chat(stream=True)
        asked = await running.chat(stream=True, stream_options={"include_usage": True})
        refused = await running.chat(stream=True, stream_options={"include_usage": False})

        assert silent.content == b"".join((*ANSWER[:3], DONE)) == refused.content
        assert asked.content == b"".join(ANSWER)
        assert [seen.json["stream_options"] for seen in replica.seen] == [{"include_usage": True}] * 3
        assert silent.headers["content-type"].startswith("text/event-stream")


async def test_a_replica_that_takes_priorities_is_told_who_goes_first(tmp_path: Path) -> None:
    """Milliseconds since 1970 at which its own prefill would end, and one class of tenants before the other."""
    async with (
        stub(says("hi")) as told,
        stub(says("hi")) as not_told,
        gateway(tmp_path, told, replicas=[{"url": told.url, "priority": True}]) as running,
        gateway(tmp_path / "other", not_told) as other,
    ):
        before = time.time()
        await running.chat()
        await running.chat("long " * 50_000, priority=-5)
        await running.chat(can_wait=True, priority=-5)
        await other.chat(priority=-5)

        short, later, batch = (seen.json["priority"] for seen in told.seen)
        assert 1000 * before <= short <= 1000 * (time.time() + 1)
        assert later > short + 5000
        assert short < later < 1 << 42 < 2 << 42 < batch
        assert [seen.body.count(b'"priority"') for seen in told.seen] == [1, 1, 1]
        assert not_told.seen[0].json["priority"] == -5


@pytest.mark.parametrize(("path", "told"), [("/v1/embeddings", True), ("/tokenize", False)])
async def test_priorities_are_for_what_is_computed(tmp_path: Path, path: str, told: bool) -> None:
    async with (
        stub(says("hi")) as replica,
        gateway(tmp_path, replica, replicas=[{"url": replica.url, "priority": True}]) as running,
    ):
        body = {"model": MODEL, "input": "x", "prompt": "x", **({"priority": -5} if told else {})}
        await running.client.post(path, json=body, headers=running.auth)

        assert (replica.seen[0].json.get("priority", 0) > 0) is told


async def test_the_decision_is_shown_to_debug_keys_only(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        shown = await running.chat()
        _, running.key = await running.gateway.keys.create("client", name="plain")
        hidden = await running.chat()

        assert 'replica="127-0-0-1-' in shown.headers["x-warmpath-decision"]
        assert "x-warmpath-decision" not in hidden.headers


@pytest.mark.parametrize(
    "broken",
    [
        dies,
        writes(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n", close=True),
        writes(STREAM_HEAD, b"0\r\n\r\n"),
        writes(response(200, b"<html>no</html>")),
        writes(response(200, b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
        writes(response(500, b'{"error":{"message":"secret inner text"}}')),
        writes(b"garbage\r\n\r\n", close=True),
    ],
    ids=["dies", "dies in its headers", "empty stream", "html", "nested deeply", "500", "garbage"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_fails_before_its_first_byte_costs_the_client_nothing(
    tmp_path: Path, broken: Answer, stream: bool
) -> None:
    good = streams(*ANSWER) if stream else says("Hello")
    async with stub(broken) as bad, stub(good) as other, gateway(tmp_path, bad, other) as running:
        for number in range(50):  # equal replicas are chosen at random
            answer = await running.chat(f"try {number}", stream=stream)
            assert answer.status_code == 200
            assert "secret" not in answer.text
            if bad.seen:
                return
        pytest.fail("the broken replica was never tried, so this shows nothing")


async def test_a_refused_connection_goes_to_another_replica(tmp_path: Path) -> None:
    async with stub(says("hi")) as leaving, stub(says("hi")) as staying, gateway(tmp_path, leaving, staying) as running:
        await leaving.stop()

        answers = [await running.chat(f"try {number}") for number in range(6)]

        assert [answer.status_code for answer in answers] == [200] * 6


async def test_all_replicas_failing_is_a_502_without_their_text(tmp_path: Path) -> None:
    broken = writes(response(500, b'{"error":{"message":"secret inner text"}}'))
    async with stub(broken) as one, stub(broken) as two, gateway(tmp_path, one, two) as running:
        answer = await running.chat()

        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "bad_upstream"
        assert "secret" not in answer.text
        assert len(one.seen) + len(two.seen) == 2, "each replica is tried once"


async def test_who_has_tried_in_vain_asks_the_client_not_to(tmp_path: Path) -> None:
    """OpenAI's SDKs try three times by themselves, each of which would be two here."""
    async with stub(writes(response(500, b"{}"))) as one, gateway(tmp_path, one, admission=NO_QUEUE) as running:
        failed = await running.chat()
        one.answer = writes(response(429, b"{}", "retry-after: 1"))
        busy = await running.chat()

        assert failed.headers["x-should-retry"] == "false"
        assert "x-should-retry" not in busy.headers


async def test_a_gateway_that_knows_no_replica_yet_asks_its_clients_to_come_back(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        answer = await running.chat()

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert float(answer.headers["retry-after"]) >= 1


async def test_replicas_that_refuse_connections_are_passed_over_without_being_tries(tmp_path: Path) -> None:
    """Most of a fleet dies at once, and nobody has been told yet: each request may meet all of the dead."""
    async with contextlib.AsyncExitStack() as stack:
        *dead, alive = [await stack.enter_async_context(stub(says("hi"))) for _ in range(9)]
        running = await stack.enter_async_context(gateway(tmp_path, *dead, alive))
        for replica in dead:
            await replica.stop()
        answers = await asyncio.gather(*[running.chat(f"request {number}") for number in range(20)])

        assert [answer.status_code for answer in answers] == [200] * 20
        assert len(alive.seen) == 20


async def test_a_fleet_that_fails_is_not_sent_everything_twice(tmp_path: Path) -> None:
    async def fails_late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(response(500, b"{}"))

    async with stub(fails_late) as one, stub(fails_late) as two, gateway(tmp_path, one, two) as running:
        answers = await asyncio.gather(*[running.chat(f"request {number}") for number in range(60)])

        assert {answer.status_code for answer in answers} == {502}
        assert len(one.seen) + len(two.seen) <= 1.2 * 60 + 3


async def test_a_request_that_two_replicas_did_not_survive_is_not_tried_again(tmp_path: Path) -> None:
    async with stub(dies) as one, stub(dies) as two, stub(dies) as three, gateway(tmp_path, one, two, three) as running:
        replicas = (one, two, three)
        first = await running.chat("poison")
        tried = sum(bool(replica.seen) for replica in replicas)
        for replica in replicas:
            replica.answer = says("hi")
        again = await running.chat("poison")
        other = await running.chat("harmless")
        _, running.key = await running.gateway.keys.create("client", name="other", tenant="other")
        others = await running.chat("poison")

        assert (first.status_code, again.status_code) == (500, 422)
        assert first.json()["error"]["code"] == again.json()["error"]["code"] == "request_quarantined"
        assert first.headers["x-should-retry"] == "false"
        assert other.status_code == others.status_code == 200
        assert tried == 2


async def test_many_who_ask_the_same_of_a_replica_that_dies_get_their_answer_elsewhere(tmp_path: Path) -> None:
    async with stub(hangs) as one, stub(says("hi")) as two, gateway(tmp_path, one, two) as running:
        await cordon(running, two, True)
        asking = [asyncio.create_task(running.chat("the same")) for _ in range(3)]
        await eventually(lambda: len(one.seen) == 3)
        await cordon(running, two, False)
        await one.stop()

        assert [(await answer).status_code for answer in asking] == [200] * 3
        assert (await running.chat("the same")).status_code == 200


async def cordon(running: Running, replica: StubReplica, cordoned: bool) -> None:
    name = f"127-0-0-1-{replica.port}"
    (await running.admin.patch(f"/admin/v1/replicas/{name}", json={"cordoned": cordoned})).raise_for_status()


async def test_a_replica_lost_in_the_middle_of_a_stream_counts_too(tmp_path: Path) -> None:
    lost = writes(STREAM_HEAD, chunked(ANSWER[0]), close=True)
    async with stub(lost) as one, gateway(tmp_path, one) as running:
        answers = [await running.chat("poison", stream=True) for _ in range(3)]

        assert [answer.status_code for answer in answers] == [200, 200, 422]
        assert len(one.seen) == 2


def late(delay_s: float, *events: bytes) -> Answer:
    """A stream whose first token takes a while."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await asyncio.sleep(delay_s)
        await writes(*map(chunked, events), b"0\r\n\r\n", close=not events)(reader, writer)

    return answer


PATIENCE = {"stream": {"commit_after_s": 0.1, "ping_s": 0.1}}


async def test_a_stream_that_waits_long_is_kept_alive_by_comments(tmp_path: Path) -> None:
    async with stub(late(0.5, *ANSWER)) as replica, gateway(tmp_path, replica, **PATIENCE) as running:
        answer = await running.chat(stream=True)

        comments, _, rest = answer.content.partition(ANSWER[0])
        assert comments == b": ping\n\n" * comments.count(b"\n\n")
        assert comments
        assert rest == ANSWER[1] + ANSWER[2] + DONE


async def test_a_stream_that_begins_soon_has_no_comment(tmp_path: Path) -> None:
    events = [ANSWER[0]] * 5

    async def steady(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for each in (*events, *ANSWER[1:]):
            writer.write(chunked(each))
            await asyncio.sleep(0.06)
        writer.write(b"0\r\n\r\n")

    async with stub(steady) as replica, gateway(tmp_path, replica, **PATIENCE) as running:
        answer = await running.chat(stream=True)

        assert b"ping" not in answer.content


async def test_a_stream_that_was_kept_alive_may_still_go_elsewhere(tmp_path: Path) -> None:
    async with (
        stub(late(0.3)) as bad,
        stub(streams(*ANSWER)) as good,
        gateway(tmp_path, bad, good, **PATIENCE) as running,
    ):
        for number in range(50):
            answer = await running.chat(f"try {number}", stream=True)
            assert answer.content.endswith(b"".join(ANSWER[:3]) + DONE)
            if bad.seen:
                assert answer.content.startswith(b": ping")
                return
        pytest.fail("the late replica was never tried, so this shows nothing")


async def test_a_stream_that_was_kept_alive_in_vain_ends_with_an_error_event(tmp_path: Path) -> None:
    async with stub(late(0.3)) as replica, gateway(tmp_path, replica, **PATIENCE) as running:
        answer = await running.chat(stream=True)

        assert answer.status_code == 200
        last = answer.content.split(b"\n\n")[-2]
        assert last.startswith(b'data: {"error":')
        assert b"[DONE]" not in answer.content


async def test_no_replica_is_a_503_with_a_time_to_come_back(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        await running.admin.patch(f"/admin/v1/replicas/127-0-0-1-{replica.port}", json={"cordoned": True})

        answer = await running.chat()

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_replica"
        assert float(answer.headers["retry-after"]) >= 1


async def test_a_clients_mistake_passes_through_and_is_not_tried_again(tmp_path: Path) -> None:
    refusal = b'{"error":{"message":"too long","type":"invalid_request_error","code":"context_length_exceeded"}}'
    async with (
        stub(writes(response(400, refusal))) as one,
        stub(writes(response(400, refusal))) as two,
        gateway(tmp_path, one, two) as running,
    ):
        answers = [await running.chat() for _ in range(12)]

        assert {answer.status_code for answer in answers} == {400}
        assert answers[0].content == refusal
        assert len(one.seen) + len(two.seen) == 12
        states = (await running.admin.get("/admin/v1/replicas")).json()["replicas"]
        assert {state["breaker"] for state in states} == {"closed"}, "a client's mistakes eject nobody"


async def test_busy_replicas_are_left_alone_and_all_busy_is_a_429(tmp_path: Path) -> None:
    busy = writes(response(503, b"{}", "retry-after: 7"))
    async with stub(busy) as one, stub(busy) as two, gateway(tmp_path, one, two, admission=NO_QUEUE) as running:
        first = await running.chat()
        second = await running.chat()

        assert (first.status_code, second.status_code) == (429, 429)
        assert first.json()["error"]["code"] == "capacity"
        assert 1 <= float(second.headers["retry-after"]) <= 7
        assert len(one.seen) == len(two.seen) == 1, "the second request asked nobody"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "", "Fri, 31 Dec 1999 23:59:59 GMT"])
async def test_whatever_a_busy_replica_calls_a_time_the_client_is_told_one(tmp_path: Path, value: str) -> None:
    busy = writes(response(429, b"{}", f"retry-after: {value}"))
    async with stub(busy) as replica, gateway(tmp_path, replica, admission=NO_QUEUE) as running:
        answer = await running.chat()

        assert answer.status_code == 429
        assert 1 <= float(answer.headers["retry-after"]) <= 60


async def test_a_stream_that_breaks_ends_with_an_error_and_without_done(tmp_path: Path) -> None:
    breaks = writes(STREAM_HEAD, chunked(event("Hel")), close=True)
    async with stub(breaks) as replica, gateway(tmp_path, replica) as running:
        answer = await running.chat(stream=True)

        first, last = answer.content.strip().split(b"\n\n")
        assert first + b"\n\n" == event("Hel")
        assert b'"code":"upstream_lost"' in last
        assert b"[DONE]" not in answer.content


async def test_comments_before_the_first_event_commit_nothing(tmp_path: Path) -> None:
    pings = writes(STREAM_HEAD, chunked(b": ping\n\n"), chunked(b": ping\n\n"), close=True)
    async with stub(pings) as replica, gateway(tmp_path, replica) as running:
        assert (await running.chat(stream=True)).status_code == 502

        replica.answer = streams(b": ping\n\n", *ANSWER)
        assert (await running.chat(stream=True)).content == b"".join((b": ping\n\n", *ANSWER[:3], DONE))


async def test_an_answer_is_over_with_done_even_when_the_replica_keeps_the_socket_open(tmp_path: Path) -> None:
    async def stays(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(chunked, ANSWER)))
        await asyncio.Event().wait()

    async with stub(stays) as replica, gateway(tmp_path, replica) as running:
        answer = await running.chat(stream=True)

        assert answer.content == b"".join((*ANSWER[:3], DONE))
        await _idle(running)


async def test_streams_use_one_connection_after_another(tmp_path: Path) -> None:
    async with stub(streams(*ANSWER)) as replica, gateway(tmp_path, replica) as running:
        for _ in range(5):
            await running.chat(stream=True)

        assert running.gateway.upstream.idle == 1
        assert running.gateway.upstream.in_use == 0


async def test_an_answer_whose_last_bytes_come_late_is_whole_and_its_connection_stays(tmp_path: Path) -> None:
    client_has_all = asyncio.Event()

    async def ends_late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(chunked, ANSWER)))
        await client_has_all.wait()
        await asyncio.sleep(0.02)  # long enough for the server to tell that the client's part is over
        writer.write(b"0\r\n\r\n")

    async with stub(ends_late) as replica, gateway(tmp_path, replica) as running:
        answer = await running.chat(stream=True)
        client_has_all.set()
        await _idle(running)

        assert answer.content == b"".join((*ANSWER[:3], DONE))
        decisions = (await running.admin.get("/admin/v1/decisions")).json()["decisions"]
        assert [decision["status"] for decision in decisions] == [200]
        assert running.gateway.upstream.idle == 1


async def test_a_stream_that_ends_too_early_is_an_error_not_a_quiet_end(tmp_path: Path) -> None:
    async with stub(streams(event("Hel"))) as replica, gateway(tmp_path, replica) as running:
        answer = await running.chat(stream=True)

        assert b'"code":"upstream_lost"' in answer.content


async def test_a_replica_that_gives_no_first_byte_in_time_is_a_504(tmp_path: Path) -> None:
    settings = {"stream": {"first_byte_s": 0.2}}
    async with stub(hangs) as replica, gateway(tmp_path, replica, **settings) as running:
        answer = await running.chat(stream=True)

        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "upstream_timeout"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_replica_learns_at_once_that_the_client_left(tmp_path: Path, stream: bool) -> None:
    async with stub(hangs) as replica, gateway(tmp_path, replica) as running:
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream},
                headers=running.auth,
                timeout=0.3,
            )

        async with asyncio.timeout(10):
            await replica.seen[0].gone.wait()
        await _idle(running)


async def test_the_replica_learns_that_the_client_left_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunked(event("x")))
            await writer.drain()
            await asyncio.sleep(0.005)

    async with stub(endless) as replica, gateway(tmp_path, replica) as running:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body, headers=running.auth) as answer:
            async for _ in answer.aiter_raw():
                break

        async with asyncio.timeout(10):
            await replica.seen[0].gone.wait()
        await _idle(running)


async def _idle(running: Running) -> None:
    """Every promise is released when nobody waits any more."""
    async with asyncio.timeout(10):
        while True:
            states = (await running.admin.get("/admin/v1/replicas")).json()["replicas"]
            if all(state["inflight"] == 0 and state["promised_tokens"] == 0 for state in states):
                return
            await asyncio.sleep(0.01)


async def test_a_text_prompt_goes_back_to_the_replica_that_saw_it(tmp_path: Path) -> None:
    async with stub(says("hi")) as one, stub(says("hi")) as two, gateway(tmp_path, one, two) as running:
        talk = "tell me a long story about the sea. " * 60

        for turn in range(4):
            await running.chat(talk + "and then? " * turn)

        assert sorted((len(one.seen), len(two.seen))) == [0, 4]
