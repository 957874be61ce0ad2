import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.trivial import TrivialTokenizer
from workers.api_error import ApiError
from workers.choice import AnswerEnd, Delta
from workers.message import CallArguments, CallStart, Content, Piece, Reasoning
from workers.protocol import TokenLogprob
from workers.shapes import Opening, Shape, Usage, error_event, model_card, model_list

USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=0)
USAGE_JSON = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def shape(*, chat: bool, **options: bool) -> Shape:
    return Shape(
        chat=chat,
        response_id="r1",
        created=123,
        model='m"/\\x',
        fingerprint="fp",
        token_bytes=TrivialTokenizer().token_bytes,
        **options,
    )


def delta(
    *pieces: Piece,
    num_told: int = 0,
    ids: Sequence[int] = (),
    logprobs: Sequence[TokenLogprob] = (),
    end: AnswerEnd | None = None,
) -> Delta:
    return Delta(pieces, num_told, ids, logprobs, [0] * len(logprobs), end)


def event(data: bytes, *, id_line: bytes = b"") -> Any:
    assert data.startswith(id_line + b"data: ")
    data = data.removeprefix(id_line)
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2, "one event, one line"
    return json.loads(data[6:])


@given(text=st.text(), index=st.integers(0, 1000))
def test_any_text_is_carried_unharmed(text: str, index: int) -> None:
    chat = event(shape(chat=True).event(index, delta(Content(text)), numbered=False))
    plain = event(shape(chat=False).event(index, delta(Content(text)), numbered=False))

    assert chat["choices"] == [{"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert plain["choices"] == [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]


@pytest.mark.parametrize("chat", [True, False])
def test_every_chunk_has_the_same_head(chat: bool) -> None:
    writer = shape(chat=chat)
    end = delta(Content("x"), end=AnswerEnd("stop"))
    chunks = [writer.event(0, delta(Content("x")), numbered=False), writer.event(0, end, numbered=False)]
    chunks.append(writer.usage(USAGE))

    heads = [
        {name: value for name, value in event(chunk).items() if name not in ("choices", "usage")} for chunk in chunks
    ]

    assert heads == [
        {
            "id": "r1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 123,
            "model": 'm"/\\x',
            "system_fingerprint": "fp",
        }
    ] * len(chunks)


def test_an_event_numbers_the_ids_that_it_tells() -> None:
    writer = shape(chat=True)

    one = writer.event(0, delta(Content("x"), num_told=7, ids=[300]), numbered=True)
    several = writer.event(0, delta(Content("x"), num_told=8, ids=[1, 2, 3]), numbered=True)
    none = writer.event(0, delta(Content("x"), num_told=8), numbered=True)
    unnumbered = writer.event(0, delta(Content("x"), num_told=7, ids=[300]), numbered=False)

    event(one, id_line=b"id: 7:300\n")
    event(several, id_line=b"id: 8:1,2,3\n")
    event(none)
    event(unnumbered)


@pytest.mark.parametrize(
    ("end", "reason", "stopped_by"),
    [
        (AnswerEnd("length"), "length", None),
        (AnswerEnd("stop", "END"), "stop", "END"),
        (AnswerEnd("stop", 7), "stop", 7),
        (AnswerEnd("tool_calls"), "tool_calls", None),
    ],
)
def test_the_last_chunk_says_why_with_the_last_text(end: AnswerEnd, reason: str, stopped_by: str | int | None) -> None:
    (choice,) = event(shape(chat=True).event(0, delta(Content("x"), end=end), numbered=False))["choices"]

    assert choice["delta"] == {"content": "x"}
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stopped_by)


def test_a_chat_opens_with_the_role_and_a_completion_with_its_prompt_if_at_all() -> None:
    opening = event(shape(chat=True).opening(2, Opening(prompt_ids=[1, 2])))
    echo = event(shape(chat=False).opening(2, Opening(echo=delta(Content("so")), prompt_ids=[1, 2])))

    assert opening["choices"][0]["index"] == 2
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["prompt_token_ids"] == [1, 2]
    assert echo["choices"][0]["text"] == "so"
    assert echo["choices"][0]["prompt_token_ids"] == [1, 2]
    assert shape(chat=False).opening(2, Opening()) == b""


def test_the_usage_chunk_has_no_choices() -> None:
    chunk = event(shape(chat=True).usage(USAGE))

    assert chunk["choices"] == []
    assert chunk["usage"] == USAGE_JSON


def test_every_chunk_can_tell_the_usage_so_far() -> None:
    writer = shape(chat=True)

    assert event(writer.opening(0, Opening(), USAGE))["usage"] == USAGE_JSON
    assert event(writer.event(0, delta(Content("x")), numbered=False, usage=USAGE))["usage"] == USAGE_JSON


def test_pieces_that_come_together_are_one_delta() -> None:
    pieces = (
        Reasoning("hm"),
        Content("I "),
        Content("look"),
        CallStart(0, "c0", "f"),
        CallArguments(0, '{"a":'),
        CallArguments(0, "1}"),
        CallStart(1, "c1", "g"),
    )

    (choice,) = event(shape(chat=True).event(0, delta(*pieces), numbered=False))["choices"]

    assert choice["delta"] == {
        "reasoning": "hm",
        "content": "I look",
        "tool_calls": [
            {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }


def test_arguments_that_come_alone_name_their_call_by_its_index() -> None:
    (choice,) = event(shape(chat=True).event(0, delta(CallArguments(1, "{")), numbered=False))["choices"]

    assert choice["delta"] == {"tool_calls": [{"index": 1, "function": {"arguments": "{"}}]}


def test_a_whole_message_joins_the_pieces() -> None:
    pieces: list[Piece] = [CallStart(0, "c0", "f"), CallArguments(0, '{"a":'), CallArguments(0, "1}")]
    pieces.append(CallStart(1, "c1", "g"))
    deltas = [delta(Reasoning("h")), delta(Reasoning("m")), delta(*pieces, end=AnswerEnd("tool_calls"))]

    (choice,) = json.loads(shape(chat=True).whole([(Opening(), deltas)], USAGE))["choices"]

    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "hm",
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "c1", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }


def test_a_whole_answer_has_its_choices_in_order() -> None:
    choices = [
        (Opening(), [delta(Content("a")), delta(Content("b"), end=AnswerEnd("stop", "c"))]),
        (Opening(), [delta(end=AnswerEnd("length"))]),
    ]

    chat = json.loads(shape(chat=True).whole(choices, USAGE))
    plain = json.loads(shape(chat=False).whole(choices, USAGE))

    assert [choice["message"]["content"] for choice in chat["choices"]] == ["ab", ""]
    assert [choice["text"] for choice in plain["choices"]] == ["ab", ""]
    assert [choice["index"] for choice in chat["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in chat["choices"]] == ["stop", "length"]
    assert [choice["stop_reason"] for choice in chat["choices"]] == ["c", None]
    assert chat["usage"] == USAGE_JSON


def test_ids_are_told_where_they_are_asked_for() -> None:
    deltas = [delta(Content("a"), ids=[7]), delta(ids=[8, 9], end=AnswerEnd("length"))]
    opening = Opening(prompt_ids=[1, 2])

    chat = json.loads(shape(chat=True, token_ids=True).whole([(opening, deltas)], USAGE))
    plain = json.loads(shape(chat=False, token_ids=True).whole([(opening, deltas)], USAGE))
    chunk = event(shape(chat=True, token_ids=True).event(0, deltas[1], numbered=False))

    assert chat["prompt_token_ids"] == plain["choices"][0]["prompt_token_ids"] == [1, 2]
    assert chat["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"] == [7, 8, 9]
    assert chunk["choices"][0]["token_ids"] == [8, 9]


def test_a_chunks_logprobs_are_those_of_its_ids() -> None:
    told = [TokenLogprob(-1.0, [])]
    writer = shape(chat=True, logprobs=True)

    with_ids = event(writer.event(0, delta(Content("x"), ids=[120], logprobs=told), numbered=False))
    without = event(writer.event(0, delta(Content("x")), numbered=False))

    assert [each["token"] for each in with_ids["choices"][0]["logprobs"]["content"]] == ["x"]
    assert without["choices"][0]["logprobs"] is None


def test_an_error_can_end_a_stream() -> None:
    assert event(error_event(ApiError(500, "engine_error", "it broke\nbadly")))["error"]["code"] == "engine_error"


def test_a_model_is_listed_as_vllm_does() -> None:
    card = model_card(model="m", created=1, max_model_len=8192)

    (listed,) = json.loads(model_list([card]))["data"]

    assert listed["id"] == "m"
    assert listed["max_model_len"] == 8192
