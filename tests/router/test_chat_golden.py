"""Ids of real vocabularies, against what transformers gave for them.

The whole of it takes a minute, most of that to load vocabularies. By default the slow combinations are left out;
WARMPATH_TESTS_TOKENIZERS=all takes all six, with and without fastokens and minijinja.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat import Chat
from router.prompt import Prompter, PromptError
from router.wire import unpack_ids
from tests.router.golden import MODELS, body_of, golden, golden_prompter

pytestmark = pytest.mark.model

NOW = datetime(2026, 3, 1)  # noqa: DTZ001 - templates print wall clocks

QUICK = [("smollm2", True), ("qwen3", True), ("qwen3", False), ("gemma3", False)]
"""Gemma's vocabulary of 262,000 tokens takes fastokens four seconds to load."""
ALL = [(model, native) for model in MODELS for native in (True, False)]
COMBINATIONS = ALL if os.environ.get("WARMPATH_TESTS_TOKENIZERS") == "all" else QUICK

IN_SERVERS_FORM = {"tool_call_arguments_as_string_null_content", "content_parts_text", "content_parts_user_only"}
"""Where a prompter deviates from transformers on purpose, as inference servers do (`Chat.in_servers_form`)."""


@pytest.fixture(scope="module", params=COMBINATIONS, ids=lambda pair: f"{pair[0]}-{'native' if pair[1] else 'plain'}")
def loaded(request: pytest.FixtureRequest) -> tuple[str, Prompter]:
    model, native = request.param
    return model, golden_prompter(model, native=native)


@pytest.mark.parametrize(("model", "native"), COMBINATIONS)
def test_what_is_native_is_used(model: str, native: bool) -> None:
    assert golden_prompter(model, native=native).is_native == native


def test_ids_equal_those_of_apply_chat_template_cold_and_warm(loaded: tuple[str, Prompter]) -> None:
    model, prompter = loaded
    compared = 0

    for case in [*golden(model)["cases"], *golden(model)["cases"]]:
        if case["conversation"] in IN_SERVERS_FORM:
            continue
        escape = case["options"].get("sanitize_control_tokens", False)
        if "error" in case:
            with pytest.raises(PromptError):
                prompter.encode_chat(body_of(case), NOW, escape=escape)
        else:
            ids = prompter.encode_chat(body_of(case), NOW, escape=escape).tolist()
            assert ids == case["ids"], (case["conversation"], case["options"])
        compared += 1

    assert compared >= 2 * 54


def test_messages_as_transformers_takes_them_give_its_texts_and_ids_too(loaded: tuple[str, Prompter]) -> None:
    """The cases in which a prompter deviates, without what makes it do so."""
    model, prompter = loaded
    template, tokenizer = prompter._template, prompter._tokenizer
    cases = [case for case in golden(model)["cases"] if case["conversation"] in IN_SERVERS_FORM]
    assert cases

    for case in cases:
        chat = Chat.from_body(body_of(case))
        if "error" in case:
            with pytest.raises(PromptError):
                template.render(chat, NOW)
        else:
            text = template.render(chat, NOW)
            assert text == case["text"]
            assert unpack_ids(tokenizer.encode(text, add_special_tokens=False)).tolist() == case["ids"]


def test_null_content_is_empty_text_and_parts_are_one_text(loaded: tuple[str, Prompter]) -> None:
    _, prompter = loaded
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def ids(content: object, answer: object) -> list[int]:
        answering = {"role": "assistant", "content": answer, "tool_calls": [call]}
        body = {"messages": [{"role": "user", "content": content}, answering]}
        return prompter.encode_chat(body, NOW).tolist()

    joined = "onetwo" if prompter._template.reads_parts else "one\ntwo"
    assert ids(parts, None) == ids(joined, "")


def test_plain_prompts_get_what_the_model_wants_around_them(loaded: tuple[str, Prompter]) -> None:
    model, prompter = loaded

    for case in golden(model)["plain"]:
        assert prompter.encode_text(case["text"]).tolist() == case["ids"]
        assert prompter.encode_text(case["text"], add_special_tokens=False).tolist() == case["ids_no_special"]


NEUTRAL = {
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "x"},
    ]
}


@settings(max_examples=25)
@given(data=st.data())
def test_escaped_texts_never_give_special_ids(loaded: tuple[str, Prompter], data: st.DataObject) -> None:
    _, prompter = loaded
    special = prompter.special_ids
    names = sorted(text for text, is_special in prompter._tokenizer.added_tokens.items() if is_special)[:200]
    name = st.sampled_from(names)
    half = st.builds(lambda text, at: text[:at], name, st.integers(1, 12)) | st.builds(
        lambda text, at: text[at:], name, st.integers(1, 12)
    )
    texts = st.lists(name | half | st.sampled_from([" ", "\n", "a", "<", "|>"]), max_size=6).map("".join)
    part = st.builds(lambda text: {"type": "text", "text": text}, texts)
    contents = data.draw(st.tuples(*[texts | st.lists(part, min_size=1, max_size=3)] * 3))
    messages = [{**message, "content": content} for message, content in zip(NEUTRAL["messages"], contents, strict=True)]

    ids = prompter.encode_chat({"messages": messages}, NOW, escape=True)

    wanted = [id_ for id_ in prompter.encode_chat(NEUTRAL, NOW) if id_ in special]
    assert [id_ for id_ in ids if id_ in special] == wanted


def test_a_growing_talk_has_the_same_ids_with_and_without_what_is_remembered_of_it(
    loaded: tuple[str, Prompter],
) -> None:
    """smg#1637, smg#1680: a prefix cache that went wrong around special tokens."""
    model, prompter = loaded
    specials = list(prompter._tokenizer.added_tokens)[:40]
    library: Any = prompter._tokenizer._tokenizer  # type: ignore[attr-defined]
    text = ""

    for token in specials:
        for piece in (
            f" hello {token}",
            f"{token} \n",
            token[: len(token) // 2],
            f"{token}{token}é",
            f"{token[1:]} end",
        ):
            text += piece
            expected = library.encode(text, add_special_tokens=False).ids
            assert prompter.encode_text(text, add_special_tokens=False).tolist() == expected, model
