"""Traces, as a collector of OpenTelemetry receives them from real gateways and replicas."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tracing import Tracer
from router.prompt import TokenizerFiles
from router.trace_context import TraceContext, parse_traceparent
from tests.gateway.stub import (
    DONE,
    MODEL,
    USAGE,
    StubReplica,
    event,
    gateway,
    hangs,
    response,
    says,
    streams,
    stub,
    writes,
)
from tests.otlp import Collector, Span, collecting
from tests.replicas import CREDENTIAL, running, simulated_engine
from workers.tracing import otlp_tracer

CALLER = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)
SERVER, CLIENT, INTERNAL = 2, 3, 1


def tracing(collector: Collector, **more: Any) -> dict[str, Any]:
    return {"tracing": {"exporter": "otlp", "endpoint": collector.url, **more}}


async def traced(
    tmp_path: Path, replica: StubReplica, *, headers: dict[str, str] | None = None, **settings: Any
) -> tuple[Collector, int]:
    """One streamed request through a gateway that records by `settings`."""
    with collecting() as collector:
        async with gateway(tmp_path, replica, **tracing(collector, **settings)) as running_gateway:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
            answer = await running_gateway.client.post(
                "/v1/chat/completions", json=body, headers={**running_gateway.auth, **(headers or {})}
            )
    return collector, answer.status_code


# --- the header


def test_a_traceparent_is_read_and_written_the_same() -> None:
    assert parse_traceparent(CALLER.traceparent) == CALLER


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        b"00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        b"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",
        "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01".encode(),
    ],
)
def test_what_is_no_traceparent_is_none(value: bytes) -> None:
    assert parse_traceparent(value) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    later = parse_traceparent(b"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03-more")

    assert later is not None
    assert later.sampled


@given(st.binary(max_size=80))
def test_no_bytes_break_the_parser(value: bytes) -> None:
    found = parse_traceparent(value)

    assert found is None or parse_traceparent(found.traceparent) == found


# --- what a replica is told


async def test_without_traces_the_callers_headers_pass_as_they_are(tmp_path: Path) -> None:
    given_headers = {"traceparent": CALLER.traceparent.decode(), "tracestate": "a=b", "baggage": "c=d"}
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running_gateway:
        await running_gateway.client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
            headers={**running_gateway.auth, **given_headers},
        )
        await running_gateway.chat()

    first, second = replica.seen
    assert {name: first.headers.get(name) for name in given_headers} == given_headers
    assert "traceparent" not in second.headers


async def test_what_is_no_traceparent_is_not_passed_on_nor_is_its_tracestate(tmp_path: Path) -> None:
    async with stub(streams(event("a", "stop"), USAGE, DONE)) as replica:
        await traced(tmp_path, replica, headers={"traceparent": "junk", "tracestate": "a=b", "baggage": "c=d"})

    (seen,) = replica.seen
    assert parse_traceparent(seen.headers["traceparent"].encode()) is not None
    assert "tracestate" not in seen.headers
    assert seen.headers["baggage"] == "c=d"


async def test_a_trace_that_its_caller_does_not_record_passes_unchanged(tmp_path: Path) -> None:
    given_header = TraceContext(CALLER.trace_id, CALLER.span_id, sampled=False).traceparent.decode()
    async with stub(streams(event("a", "stop"), USAGE, DONE)) as replica:
        collector, _ = await traced(tmp_path, replica, headers={"traceparent": given_header}, sample_ratio=1.0)

    assert replica.seen[0].headers["traceparent"] == given_header
    assert collector.spans == []


async def test_who_is_not_sampled_gets_a_traceparent_that_says_so(tmp_path: Path) -> None:
    async with stub(streams(event("a", "stop"), USAGE, DONE)) as replica:
        collector, _ = await traced(tmp_path, replica, sample_ratio=0.0)

    told = parse_traceparent(replica.seen[0].headers["traceparent"].encode())
    assert told is not None
    assert not told.sampled
    assert collector.spans == []


async def test_a_caller_that_always_records_can_be_ignored(tmp_path: Path) -> None:
    async with stub(streams(event("a", "stop"), USAGE, DONE)) as replica:
        collector, _ = await traced(
            tmp_path,
            replica,
            headers={"traceparent": CALLER.traceparent.decode()},
            sample_ratio=0.0,
            follow_caller=False,
        )

    assert collector.spans == []


def test_one_in_so_many_is_sampled() -> None:
    draws = iter([0.0, 0.2, 0.24, 0.25, 0.3, 0.99])
    tracer = Tracer(_Nowhere(), sample_ratio=0.25, draw=lambda: next(draws))

    assert [tracer.begin([]).sampled for _ in range(6)] == [True, True, True, False, False, False]


def test_no_two_requests_share_a_trace_whether_sampled_or_not() -> None:
    tracer = Tracer(_Nowhere(), sample_ratio=0.5)

    traces = [tracer.begin([(b"accept", b"*/*")]) for _ in range(1000)]

    told = [parse_traceparent(dict(trace.headers(None))[b"traceparent"]) for trace in traces]
    assert told == [trace.context for trace in traces]
    assert len({trace.trace_id for trace in traces}) == 1000


def test_what_a_client_says_beside_its_trace_goes_to_no_other_request() -> None:
    tracer = Tracer(_Nowhere(), sample_ratio=0.0)
    baggage = (b"baggage", b"a=b")

    with_baggage = tracer.begin([baggage])
    without = [tracer.begin([]) for _ in range(200)]

    assert baggage in with_baggage.headers(None)
    assert not any(baggage in trace.headers(None) for trace in without)
    assert Tracer().begin([baggage, (b"tracestate", b"c=d")]).headers(None) == [baggage]
    assert Tracer().begin([]).headers(None) == ()


class _Nowhere:
    def emit(self, name: str, **_: Any) -> None:
        raise AssertionError("nothing ended")

    def close(self) -> None:
        pass


# --- spans


async def test_a_try_that_fails_and_one_that_answers_are_spans_of_their_own(tmp_path: Path) -> None:
    broken = writes(response(500, b"{}"))
    async with stub(broken) as first, stub(broken) as second, collecting_gateway(tmp_path, first, second) as seen:
        collector, running_gateway = seen
        await running_gateway.chat()

    tries = [span for span in collector.spans if span.kind == CLIENT]
    server = collector.named("POST /v1/chat/completions")
    assert [span.parent_id for span in tries] == [server.span_id] * 2
    assert all(span.failed and span.attributes["error.type"] == "bad_upstream" for span in tries)
    assert {span.attributes["server.port"] for span in tries} == {first.port, second.port}
    assert server.failed
    assert server.attributes["http.response.status_code"] == 502
    assert server.attributes["error.type"] == "bad_upstream"
    parents = {parse_traceparent(seen.headers["traceparent"].encode()) for seen in (*first.seen, *second.seen)}
    assert {parent.span_id for parent in parents if parent is not None} == {span.span_id for span in tries}


async def test_a_whole_answer_tells_its_id_model_reasons_and_usage(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, collecting_gateway(tmp_path, replica) as (collector, running_gateway):
        await running_gateway.chat(max_tokens=7, temperature=0.5, top_p=0.9, seed=3, n=2)

    about = collector.named(f"chat {MODEL}").attributes
    assert about == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "c",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "server.address": "127.0.0.1",
        "server.port": replica.port,
        "warmpath.replica": about["warmpath.replica"],
        "warmpath.decision.policy": "cost",
        "warmpath.decision.reason": about["warmpath.decision.reason"],
        "warmpath.predicted_cached_tokens": 0,
        "warmpath.outcome": "ok",
    }


async def test_a_request_that_is_refused_has_a_span_and_no_try(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, collecting_gateway(tmp_path, replica) as (collector, running_gateway):
        await running_gateway.client.post("/v1/chat/completions", json={}, headers={"authorization": "Bearer no"})

    (span,) = collector.spans
    assert span.attributes["http.response.status_code"] == 401
    assert span.attributes["error.type"] == "invalid_api_key"
    assert not span.failed, "a client's mistake is no fault of the server"


async def test_content_is_never_recorded(tmp_path: Path) -> None:
    canary = "canary-4711"
    secret_fields: dict[str, Any] = {
        "temperature": canary,
        "seed": 1,
        "max_tokens": [canary],
        "n": {canary: canary},
        "user": canary,
        "stop": [canary],
        "tools": [{"type": "function", "function": {"name": canary, "parameters": {}}}],
        "metadata": {canary: canary},
    }
    headers = {
        "user-agent": canary,
        "cookie": canary,
        "x-secret": canary,
        "tracestate": f"a={canary}",
        "baggage": canary,
    }
    answers = [
        says(canary),
        streams(event(canary), event(canary, "stop"), USAGE, DONE),
        streams(event(canary), b'data: {"error": {"message": "canary-4711"}}\n\n'),
    ]
    async with stub(answers[0]) as replica, collecting_gateway(tmp_path, replica) as (collector, running_gateway):
        for number, answer in enumerate(answers):
            replica.answer = answer
            body = {"model": MODEL, "messages": [{"role": "user", "content": canary}], **secret_fields}
            await running_gateway.client.post(
                f"/v1/chat/completions?key={canary}",
                json={**body, "stream": number > 0},
                headers={**running_gateway.auth, **headers},
            )
        await running_gateway.client.post(
            "/v1/chat/completions", json={"model": canary, "messages": []}, headers=running_gateway.auth
        )

    assert len(collector.spans) >= 7
    assert canary.encode() not in collector.raw
    assert running_gateway.key.encode() not in collector.raw


async def test_gateway_and_replica_make_one_trace(tmp_path: Path) -> None:
    prompt = "say something that no span repeats"
    with collecting() as collector:
        tracer = otlp_tracer(collector.url, unix_offset=lambda: time.time() - time.monotonic())
        async with running(simulated_engine(), TokenizerFiles(kind="trivial"), tracer=tracer) as replica:
            fleet = [{"url": replica.base_url, "kind": "warmpath", "credential": CREDENTIAL, "model": replica.model}]
            settings = tracing(collector, sample_ratio=0.0)
            async with gateway(tmp_path, **{**settings, "replicas": fleet}) as running_gateway:
                body = {"model": replica.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 5}
                answer = await running_gateway.client.post(
                    "/v1/chat/completions",
                    json={**body, "stream": True, "stream_options": {"include_usage": True}},
                    headers={**running_gateway.auth, "traceparent": CALLER.traceparent.decode()},
                )
                assert answer.status_code == 200, answer.text
        tracer.close()

    server, client = collector.named("POST /v1/chat/completions"), collector.named(f"chat {replica.model}")
    stages = [collector.named(name) for name in ("queue", "prefill", "decode")]
    assert len(collector.spans) == 5
    assert {span.trace_id for span in collector.spans} == {CALLER.trace_id}
    assert [server.parent_id, client.parent_id] == [CALLER.span_id, server.span_id]
    assert {span.parent_id for span in stages} == {client.span_id}
    assert [server.kind, client.kind, *(span.kind for span in stages)] == [SERVER, CLIENT, *[INTERNAL] * 3]
    assert [server.service, client.service, *(span.service for span in stages)] == [
        *["warmpath"] * 2,
        *["warmpath-worker"] * 3,
    ]
    assert_in_order(server, client, *stages)
    about, (_, prefill, decode) = client.attributes, stages
    assert about["gen_ai.provider.name"] == "warmpath"
    assert about["gen_ai.usage.output_tokens"] == decode.attributes["gen_ai.usage.output_tokens"] == 5
    assert about["gen_ai.usage.input_tokens"] == prefill.attributes["gen_ai.usage.input_tokens"]
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert str(about["gen_ai.response.id"]).startswith("chatcmpl-")
    assert 0 < float(str(about["gen_ai.response.time_to_first_chunk"])) < 60
    assert server.attributes["warmpath.request_id"] == prefill.attributes["warmpath.request_id"]
    assert not any(word.encode() in collector.raw for word in prompt.split() if len(word) > 4)


def assert_in_order(server: Span, client: Span, queue: Span, prefill: Span, decode: Span) -> None:
    assert server.begin_ns <= client.begin_ns <= queue.begin_ns
    assert queue.end_ns == prefill.begin_ns
    assert prefill.end_ns == decode.begin_ns
    assert decode.end_ns <= client.end_ns + 10**9, "it ends on its own, perhaps after its reader"
    assert client.end_ns <= server.end_ns


async def test_a_collector_that_is_not_there_costs_no_request(tmp_path: Path) -> None:
    nowhere = {"tracing": {"exporter": "otlp", "endpoint": "http://127.0.0.1:9/v1/traces", "sample_ratio": 1.0}}
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, **nowhere) as running_gateway:
        answers = [(await running_gateway.chat()).status_code for _ in range(3)]
        began = time.monotonic()

    assert answers == [200] * 3
    assert time.monotonic() - began < 8, "its end is bounded"


async def test_a_client_that_leaves_ends_its_spans(tmp_path: Path) -> None:
    async with stub(hangs) as replica, collecting_gateway(tmp_path, replica) as (collector, running_gateway):
        with pytest.raises(httpx.ReadTimeout):
            await running_gateway.client.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
                headers=running_gateway.auth,
                timeout=0.2,
            )
        await replica.seen[0].gone.wait()

    tried, server = collector.named(f"chat {MODEL}"), collector.named("POST /v1/chat/completions")
    assert (tried.attributes["error.type"], tried.attributes["warmpath.outcome"]) == ("client_gone", "cancelled")
    assert server.attributes["http.response.status_code"] == 499
    assert server.begin_ns <= tried.begin_ns <= tried.end_ns <= server.end_ns


def test_without_traces_the_sdk_is_not_imported() -> None:
    program = (
        "import sys, gateway.app, workers.__main__\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert msgspec.json.decode(done.stdout.replace("'", '"')) == []


class collecting_gateway:  # noqa: N801
    """A gateway that records every request, and its collector, complete when the block has ended."""

    def __init__(self, state_dir: Path, *replicas: StubReplica) -> None:
        self._state_dir = state_dir
        self._replicas = replicas

    async def __aenter__(self) -> tuple[Collector, Any]:
        self._collecting = collecting()
        self._collector = self._collecting.__enter__()
        self._gateway = gateway(self._state_dir, *self._replicas, **tracing(self._collector, sample_ratio=1.0))
        return self._collector, await self._gateway.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._gateway.__aexit__(*error)
        finally:
            self._collecting.__exit__(*error)


# --- the exporter, by what OpenTelemetry's own variables say


def exported(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[Span]:
    from gateway.otlp import OtlpExport

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with collecting() as collector:
        export = OtlpExport(endpoint=collector.url, service_name="s", version="1")
        for parent in (None, CALLER):
            export.emit(
                "span",
                client=parent is not None,
                context=TraceContext("a" * 32, "b" * 16, sampled=True),
                parent=parent,
                attributes={"long": "abcdef", "number": 7, "reasons": ["stop", "length"]},
                failed=parent is not None,
                began_at=1.5,
                ended_at=2.0,
            )
        export.close()
    return collector.spans


def test_a_span_arrives_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = exported(monkeypatch)

    assert first.attributes == {"long": "abcdef", "number": 7, "reasons": ["stop", "length"]}
    assert (first.trace_id, first.span_id, first.parent_id) == ("a" * 32, "b" * 16, "")
    assert (first.kind, first.failed, second.kind, second.failed) == (SERVER, False, CLIENT, True)
    assert (first.begin_ns, first.end_ns) == (1_500_000_000, 2_000_000_000)
    assert second.parent_id == CALLER.span_id


def test_limits_of_attributes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = exported(monkeypatch, OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT="3", OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT="2")

    assert first.attributes == {"number": 7, "reasons": ["sto", "len"]}


def test_an_sdk_that_is_disabled_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exported(monkeypatch, OTEL_SDK_DISABLED="true") == []
