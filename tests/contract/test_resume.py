"""A stream that broke goes on at any replica of equal numerics: joined, no seam.

`tests/workers/test_resume.py` shows it of each kind of answer, with scripted tokens; this of engines, whose tokens must follow.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import httpx
import pytest

from router.wire import encode_ids, pack_ids
from tests.contract.asking import CHAT, TEXT, chat, error_of, text
from tests.streams import events_in, is_usage, resumption_of, told_ids

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, chat(max_tokens=8, **USAGE)),
    "seeded": (CHAT, chat(max_tokens=8, temperature=1.2, top_p=0.9, min_p=0.01)),
    "penalties": (
        CHAT,
        chat(max_tokens=8, temperature=0.5, repetition_penalty=1.3, frequency_penalty=1, presence_penalty=1),
    ),
    "logprobs": (CHAT, chat(max_tokens=6, logprobs=True, top_logprobs=2, **USAGE)),
    "echo": (TEXT, text("Once upon a time", max_tokens=6, echo=True, logprobs=1)),
    "stop": (TEXT, text("Once upon a time", max_tokens=8, stop=["e", "a"], min_tokens=3)),
}

_salts = count()


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any], **field: Any) -> list[str]:
    """With a salt of its own, so that nothing is in its cache."""
    field |= {"seed": 7, "salt": f"resume-{next(_salts)}"}
    answer = await http.post(path, json={**body, "stream": True, "warmpath": field})
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_goes_on_after_any_of_its_events(http: httpx.AsyncClient, name: str) -> None:
    path, body = CASES[name]
    whole = await stream(http, path, body)

    for cut in range(1, len(whole)):
        seen = whole[:cut]
        rest = await stream(http, path, body, resume=resumption_of(seen))
        # Who resumes after the usage, with nothing but the end missing, has it already.
        assert seen + (rest[1:] if is_usage(seen[-1]) else rest) == whole, f"cut after event {cut}"


async def test_what_has_ended_has_nothing_left_to_say(http: httpx.AsyncClient) -> None:
    body = chat(max_tokens=4, **USAGE)
    whole = await stream(http, CHAT, body)
    assert len(told_ids(whole)) == 4

    rest = await stream(http, CHAT, body, resume=resumption_of(whole))

    assert rest == whole[-2:], "usage and end"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"ids": "!"}, "warmpath.resume.ids"),
        ({"ids": encode_ids(pack_ids([300] * 9))}, "warmpath.resume.ids"),
        ({"response_id": "a b"}, "warmpath.resume.response_id"),
        ({"created": -1}, "warmpath.resume.created"),
    ],
)
async def test_a_resumption_that_cannot_be_is_a_400(http: httpx.AsyncClient, change: Any, param: str) -> None:
    resume = {"ids": "", "response_id": "chatcmpl-1", "created": 1} | change

    answer = await http.post(CHAT, json=chat(max_tokens=8, stream=True, warmpath={"resume": resume}))

    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_only_a_gateway_can_resume(stranger: httpx.AsyncClient) -> None:
    resume = {"ids": "", "response_id": "chatcmpl-1", "created": 1}

    answer = await stranger.post(CHAT, json=chat(stream=True, warmpath={"resume": resume}))

    assert (answer.status_code, error_of(answer)["param"]) == (400, "warmpath")
