import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai import Usage
from gateway.sse import MAX_EVENT_BYTES, SseRelay, error_event
from gateway.upstream.contract import ProtocolViolation, ReplicaError, UpstreamError
from tests.gateway.splits import relay_all, split


def chunk(content: str = "hi", finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **more,
    }


def event(body: dict[str, Any], **style: Any) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), **style).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "total_tokens": 14, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}
PLAIN = event(chunk())
FINISH = event(chunk("", "stop"))
USAGE_CHUNK = event({**chunk(), "choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"


def relayed(pieces: Iterable[bytes], *, strip_usage: bool = True) -> tuple[bytes, SseRelay, type[UpstreamError] | None]:
    """What comes out, what the relay knows then, and how it failed."""
    relay = SseRelay(strip_usage=strip_usage)
    out, error = relay_all(relay, pieces)
    return out, relay, error


def verdicts(relay: SseRelay) -> tuple[int, bool, bool, Usage | None]:
    return relay.events, relay.finished, relay.done, relay.usage


# --- a whole stream


@pytest.mark.parametrize("strip_usage", [True, False])
def test_a_stream_comes_out_as_it_went_in_without_the_usage_chunk_nobody_asked_for(strip_usage: bool) -> None:
    stream = [PLAIN, PLAIN, FINISH, USAGE_CHUNK, DONE]

    out, relay, error = relayed(stream, strip_usage=strip_usage)

    assert out == b"".join(piece for piece in stream if piece is not USAGE_CHUNK or not strip_usage)
    assert error is None
    assert (relay.events, relay.finished, relay.done) == (3, True, True)
    assert relay.usage is not None
    assert (relay.usage.prompt_tokens, relay.usage.completion_tokens, relay.usage.cached_tokens) == (9, 5, 0)


def test_the_first_event_is_told_from_comments_and_fields_before_it() -> None:
    relay = SseRelay(strip_usage=True)

    assert relay.feed(b": ping\n\nretry: 100\n\n") == b": ping\n\nretry: 100\n\n"
    assert relay.events == 0
    relay.feed(PLAIN)
    assert relay.events == 1


def test_usage_on_the_last_content_chunk_is_read_and_its_content_kept() -> None:
    last = event(chunk("end", "length", usage=USAGE))

    out, relay, _ = relayed([PLAIN, last, DONE])

    assert out == PLAIN + last + DONE
    assert relay.usage is not None
    assert relay.usage.completion_tokens == 5


def test_an_empty_choices_chunk_without_usage_is_kept() -> None:
    filter_results = event({"choices": [], "prompt_filter_results": []})

    out, relay, _ = relayed([filter_results, PLAIN])

    assert out == filter_results + PLAIN
    assert relay.events == 1


def test_cached_tokens_that_a_replica_does_not_report_are_none_and_not_zero() -> None:
    for details in ({}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {"cached_tokens": None}}):
        usage_chunk = event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, **details}})
        _, relay, _ = relayed([FINISH, usage_chunk, DONE])
        assert relay.usage is not None
        assert relay.usage.cached_tokens is None


TRAPS = [
    "data: [DONE]",
    '"usage":{',
    '"finish_reason":"stop"',
    "\n\ndata: [DONE]\n\n",
    '"error":{"message":"x"}',
    "\r\n\r\n",
]


@pytest.mark.parametrize("text", TRAPS)
@pytest.mark.parametrize("last_words", [False, True])
def test_text_that_looks_like_the_protocol_is_text(text: str, last_words: bool) -> None:
    spoken = event(chunk(text, "stop" if last_words else None), ensure_ascii=False)

    out, relay, error = relayed([PLAIN, spoken, PLAIN])

    assert out == PLAIN + spoken + PLAIN
    assert error is None
    assert verdicts(relay) == (3, last_words, False, None)


@pytest.mark.parametrize(
    "done",
    [b"data:[DONE]\n\n", b"data: [DONE] \n\n", b"data: [DONE]\r\n\r\n", b"id: 5\ndata: [DONE]\n\n", b": bye\n" + DONE],
)
def test_every_spelling_of_the_end_marker_is_the_end(done: bytes) -> None:
    out, relay, _ = relayed([FINISH, done])

    assert out == FINISH + done
    assert relay.done


def test_nothing_follows_the_end() -> None:
    out, relay, error = relayed([FINISH + DONE + PLAIN, PLAIN, b"half an ev"])

    assert out == FINISH + DONE
    assert error is None
    assert relay.events == 1


# --- any split


@dataclass(frozen=True)
class Sent:
    """An event of a generated stream and what must become of it."""

    data: bytes
    kind: str


@st.composite
def events(draw: st.DrawFn) -> Sent:
    kind = draw(st.sampled_from(["part", "part", "part", "last", "comment", "other", "usage"]))
    newline = draw(st.sampled_from([b"\n", b"\n", b"\r\n"]))
    if kind in ("comment", "other"):
        lines = {"comment": [b": ping"], "other": [b"event: x", b"id: 1"]}[kind]
    else:
        body = chunk(draw(st.sampled_from([*TRAPS, "hello", "é😀", ""])), "stop" if kind == "last" else None)
        if kind == "usage":
            body = {**body, "choices": [], "usage": USAGE}
        elif draw(st.booleans()):
            body["usage"] = None
        separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
        text = json.dumps(body, separators=separators, ensure_ascii=draw(st.booleans()))
        lines = [draw(st.sampled_from([b"data: ", b"data:", b"data:  "])) + text.encode()]
        if draw(st.booleans()):
            lines.insert(draw(st.integers(0, 1)), draw(st.sampled_from([b"id: 7:1,2", b": note", b"event: message"])))
    return Sent(b"".join(line + newline for line in lines) + newline, kind)


@given(st.lists(events(), max_size=6), st.booleans(), st.booleans(), st.lists(st.integers(0, 2000), max_size=8))
def test_any_stream_in_any_split_comes_out_whole_with_the_same_verdicts(
    stream: list[Sent], done: bool, strip_usage: bool, cuts: list[int]
) -> None:
    kinds = [sent.kind for sent in stream]
    done = done and "last" in kinds
    data = b"".join(sent.data for sent in stream) + (DONE if done else b"")

    out, relay, error = relayed(split(data, cuts), strip_usage=strip_usage)

    assert error is None
    assert out == b"".join(s.data for s in stream if s.kind != "usage" or not strip_usage) + (DONE if done else b"")
    assert relay.events == kinds.count("part") + kinds.count("last")
    assert (relay.finished, relay.done) == ("last" in kinds, done)
    assert (relay.usage is not None) == ("usage" in kinds)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_every_split_in_two_and_byte_by_byte(newline: bytes) -> None:
    talk = [event(chunk("é😀"), ensure_ascii=False), FINISH, USAGE_CHUNK, DONE]
    stream = [piece.replace(b"\n", newline) for piece in talk]
    data = b"".join(stream)
    expected = b"".join((stream[0], stream[1], stream[3]))

    for cut in range(len(data)):
        out, relay, error = relayed([data[:cut], data[cut:]])
        assert (out, error) == (expected, None), cut
        assert (relay.events, relay.finished, relay.done) == (2, True, True)
    assert relayed([data[i : i + 1] for i in range(len(data))])[0] == expected


def test_events_with_different_line_ends_in_one_chunk_are_told_apart() -> None:
    for first, events in ((PLAIN, 2), (USAGE_CHUNK, 1)):
        out, relay, _ = relayed([first.replace(b"\n", b"\r\n") + PLAIN])

        assert out.endswith(PLAIN)
        assert relay.events == events


@given(
    st.lists(
        st.sampled_from(
            [
                PLAIN,
                FINISH,
                USAGE_CHUNK,
                DONE,
                b"\n",
                b"\r\n",
                b"data",
                b": x\n",
                b"data: {\n\n",
                b'data: {"error": {}}\n\n',
            ]
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 1500), max_size=8),
)
def test_broken_streams_have_one_outcome_however_they_are_split(stream: list[bytes], cuts: list[int]) -> None:
    data = b"".join(stream)

    out, relay, error = relayed([data])
    split_out, split_relay, split_error = relayed(split(data, cuts))

    assert (split_out, split_error) == (out, error)
    assert verdicts(split_relay) == verdicts(relay)


def test_only_whole_events_come_out() -> None:
    relay = SseRelay(strip_usage=True)

    assert relay.feed(PLAIN[:-1]) == b""
    assert relay.feed(PLAIN[-1:] + PLAIN[:10]) == PLAIN
    assert relay.feed(PLAIN[10:]) == PLAIN


@pytest.mark.parametrize(
    "usage",
    [{"prompt_tokens": "many"}, {"prompt_tokens": None}, {"prompt_tokens": 1.5}, {"prompt_tokens": -1}, [], 1e30],
)
def test_a_usage_that_cannot_be_true_is_none_and_harms_no_answer(usage: object) -> None:
    relay = SseRelay(strip_usage=True)
    finish, usage_chunk = event(chunk("", "stop")), event({"choices": [], "usage": usage})

    assert relay.feed(PLAIN + finish + usage_chunk + DONE) == PLAIN + finish + DONE

    assert relay.done
    assert relay.usage is None


# --- faults


@pytest.mark.parametrize(
    "bad",
    [
        b"data: <html>\n\n",
        b"data: {\n\n",
        b"data: \xff\xfe\n\n",
        b"data: null\n\n",
        b"data: []\n\n",
        b'data: {"id": "x"}\n\n',
        b'data: {"choices": 1}\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
        DONE,
    ],
    ids=lambda bad: repr(bad[:40]),
)
def test_what_is_no_completion_chunk_is_a_violation_after_all_that_was_good(bad: bytes) -> None:
    relay = SseRelay(strip_usage=True)

    assert relay.feed(PLAIN + bad + PLAIN) == PLAIN

    for _ in range(2):
        with pytest.raises(ProtocolViolation):
            relay.feed(PLAIN)
        with pytest.raises(ProtocolViolation):
            relay.flush()
    assert not relay.done
    with pytest.raises(ProtocolViolation):
        SseRelay(strip_usage=True).feed(bad)


def test_a_replicas_error_event_is_raised_and_not_relayed() -> None:
    error = b'data: {"error":{"message":"engine dead","code":500}}\n\n'

    out, relay, kind = relayed([PLAIN, error, DONE])

    assert (out, kind) == (PLAIN, ReplicaError)
    assert not relay.done
    with pytest.raises(ReplicaError) as caught:
        SseRelay(strip_usage=True).feed(error)
    assert json.loads(caught.value.data)["error"]["code"] == 500


def test_an_error_field_that_is_null_is_no_error() -> None:
    assert relayed([event(chunk("x", "stop", error=None))])[2] is None


def test_an_end_marker_without_a_finish_reason_is_no_good_end() -> None:
    out, relay, error = relayed([PLAIN, DONE])

    assert (out, error) == (PLAIN, ProtocolViolation)
    assert not relay.done


def test_a_stream_that_just_stops_is_not_done() -> None:
    for pieces in ([], [PLAIN], [FINISH], [FINISH, USAGE_CHUNK]):
        assert not relayed(pieces)[1].done


@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 16, MAX_EVENT_BYTES])
def test_an_event_is_held_up_to_the_limit_and_not_beyond(piece_bytes: int) -> None:
    relay = SseRelay(strip_usage=True)

    for _ in range(MAX_EVENT_BYTES // piece_bytes):
        assert relay.feed(b"x" * piece_bytes) == b""

    with pytest.raises(ProtocolViolation, match="longer than"):
        relay.feed(b"x")


def test_a_whole_event_may_not_be_longer_either() -> None:
    relay = SseRelay(strip_usage=True)
    at_the_limit = b": " + b"x" * (MAX_EVENT_BYTES - 4) + b"\n\n"

    assert relay.feed(at_the_limit) == at_the_limit
    with pytest.raises(ProtocolViolation, match="longer than"):
        relay.feed(b" " + at_the_limit)


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n"])
def test_a_last_event_that_only_lacks_its_blank_line_is_whole(tail: bytes) -> None:
    out, relay, error = relayed([FINISH + tail])

    assert out.startswith(FINISH + tail)
    assert out.endswith((b"\n\n", b"\n\r\n"))
    assert error is None
    assert relay.done
    assert relay.flush() == b""


@pytest.mark.parametrize("event", [PLAIN, FINISH, USAGE_CHUNK, DONE])
def test_a_last_event_that_is_cut_is_never_relayed(event: bytes) -> None:
    for cut in range(len(event.rstrip())):
        out, relay, error = relayed([FINISH, event[:cut]])

        assert out == FINISH
        assert error is (ProtocolViolation if cut > len(b"data: ") else None)
        assert not relay.done


def test_an_error_event_is_one_event_in_openais_shape() -> None:
    data = error_event("The replica was lost.", code="upstream_lost")

    assert data.startswith(b"data: ")
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
    assert json.loads(data[6:]) == {
        "error": {"message": "The replica was lost.", "type": "server_error", "param": None, "code": "upstream_lost"}
    }
