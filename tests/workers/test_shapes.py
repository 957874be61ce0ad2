import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.api_error import ApiError
from workers.shapes import FinishedChoice, Shape, Usage, error_event, model_card, model_list

USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=0)


def shape(*, chat: bool) -> Shape:
    return Shape(chat=chat, request_id="r1", created=123, model='m"/\\x', fingerprint="fp")


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2, "one event, one line"
    return json.loads(data[6:])


@given(text=st.text(), index=st.integers(0, 1000))
def test_any_text_is_carried_unharmed(text: str, index: int) -> None:
    chat = event(shape(chat=True).text(index, text))
    plain = event(shape(chat=False).text(index, text))

    assert chat["choices"] == [{"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert plain["choices"] == [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]


@pytest.mark.parametrize("chat", [True, False])
def test_every_chunk_has_the_same_head(chat: bool) -> None:
    writer = shape(chat=chat)
    chunks = [writer.text(0, "x"), writer.finish(0, "stop"), writer.usage(USAGE)]

    heads = [
        {name: value for name, value in event(chunk).items() if name not in ("choices", "usage")} for chunk in chunks
    ]

    assert heads == [
        {
            "id": "chatcmpl-r1" if chat else "cmpl-r1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 123,
            "model": 'm"/\\x',
            "system_fingerprint": "fp",
        }
    ] * len(chunks)


def test_only_a_chat_has_an_opening() -> None:
    opening = event(shape(chat=True).opening(2))

    assert opening["choices"][0]["index"] == 2
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert shape(chat=False).opening(2) == b""


def test_the_usage_chunk_has_no_choices() -> None:
    chunk = event(shape(chat=True).usage(USAGE))

    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_whole_answer_has_its_choices_in_order() -> None:
    choices = [FinishedChoice(0, "a", "stop"), FinishedChoice(1, "", "length")]

    chat = json.loads(shape(chat=True).whole(choices, USAGE))
    plain = json.loads(shape(chat=False).whole(choices, USAGE))

    assert [choice["message"]["content"] for choice in chat["choices"]] == ["a", ""]
    assert [choice["text"] for choice in plain["choices"]] == ["a", ""]
    assert [choice["finish_reason"] for choice in chat["choices"]] == ["stop", "length"]


def test_an_error_can_end_a_stream() -> None:
    assert event(error_event(ApiError(500, "engine_error", "it broke\nbadly")))["error"]["code"] == "engine_error"


def test_a_model_is_listed_as_vllm_does() -> None:
    card = model_card(model="m", created=1, max_model_len=8192)

    (listed,) = json.loads(model_list([card]))["data"]

    assert listed["id"] == "m"
    assert listed["max_model_len"] == 8192
