from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.response_events import ResponseRelay, response_error_event
from gateway.upstream.contract import ProtocolViolation, ReplicaError, UpstreamError
from tests.gateway.splits import relay_all, split


def event(kind: str, *, named: bool = True, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}).encode()
    return (b"event: %b\n" % kind.encode() if named else b"") + b"data: " + data + b"\n\n"


RESPONSE = {"id": "resp_1", "object": "response", "status": "in_progress", "instructions": "be brief", "usage": None}
USAGE = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3, "total_tokens": 12}
CREATED = event("response.created", response=RESPONSE, sequence_number=0)
IN_PROGRESS = event("response.in_progress", response=RESPONSE, sequence_number=1)
DELTAS = [
    event("response.output_text.delta", delta=text, sequence_number=2) for text in ("Hel", "data: [DONE]\n\n", "o")
]
COMPLETED = event("response.completed", response={**RESPONSE, "usage": USAGE}, sequence_number=5)
STREAM = b"".join((CREATED, IN_PROGRESS, b": ping\n\n", *DELTAS, COMPLETED))


def relayed(pieces: Iterable[bytes]) -> tuple[bytes, ResponseRelay, type[UpstreamError] | None]:
    relay = ResponseRelay()
    out, error = relay_all(relay, pieces)
    return out, relay, error


CUTS = st.lists(st.integers(0, len(STREAM)), max_size=8)


@given(CUTS)
def test_a_response_passes_byte_for_byte_however_it_is_cut(cuts: list[int]) -> None:
    out, relay, error = relayed(split(STREAM, cuts))

    assert (out, error) == (STREAM, None)
    assert relay.done
    assert relay.response_id == "resp_1"
    assert relay.events == 4, "what opens the stream is no part of the answer"
    assert relay.usage is not None
    assert (relay.usage.prompt_tokens, relay.usage.completion_tokens, relay.usage.cached_tokens) == (9, 3, 4)


@given(CUTS)
def test_windows_line_ends_are_the_same(cuts: list[int]) -> None:
    stream = STREAM.replace(b"\n", b"\r\n")

    out, relay, error = relayed(split(stream, cuts))

    assert (out, error, relay.done) == (stream, None, True)


@pytest.mark.parametrize("end", ["response.completed", "response.incomplete", "response.failed"])
@pytest.mark.parametrize("named", [True, False])
def test_each_end_is_one_and_nothing_follows_it(end: str, named: bool) -> None:
    stream = CREATED + event(end, named=named, response=RESPONSE)

    out, relay, error = relayed([stream + DELTAS[0]])

    assert (out, relay.done, error) == (stream, True, None)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (event("error", code="server_error", message="secret"), ReplicaError),
        (b'data: {"error":{"message":"secret"}}\n\n', ReplicaError),
        (b"data: [DONE]\n\n", ProtocolViolation),
        (b"data: <html>\n\n", ProtocolViolation),
        (b"data: {}\n\n", ProtocolViolation),
        (b"event: response.completed\ndata: {\n\n", ProtocolViolation),
    ],
)
def test_a_fault_is_kept_from_the_client_after_all_that_came_before_it(
    tail: bytes, expected: type[UpstreamError]
) -> None:
    relay = ResponseRelay()

    assert relay.feed(CREATED + DELTAS[0] + tail) == CREATED + DELTAS[0]
    with pytest.raises(expected):
        relay.feed(b"")


def test_a_stream_that_is_cut_is_not_done() -> None:
    out, relay, error = relayed([CREATED + DELTAS[0]])

    assert (out, relay.done, error) == (CREATED + DELTAS[0], False, None)
    assert json.loads(relay.error_event("gone", code="upstream_lost").split(b"data: ")[1]) == {
        "type": "error",
        "code": "upstream_lost",
        "message": "gone",
        "param": None,
        "sequence_number": 2,
    }


def test_an_error_before_anything_is_number_zero() -> None:
    assert b'"sequence_number":0' in response_error_event("no", code="no_replica")
