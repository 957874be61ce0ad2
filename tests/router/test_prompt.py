"""The public face: a request's body in, the ids that transformers would give out."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from router.prompt import Prompter, PromptError, TokenizerError, TokenizerFiles, load_prompter
from router.template import ChatTemplate
from router.tokenizer_files import TokenizerConfig
from router.trivial import TrivialTokenizer
from tests.router import tiny_tokenizer as tiny

GOLDEN = Path(__file__).parents[1] / "data" / "chat_golden"
NOW = datetime(2026, 3, 1)  # noqa: DTZ001 - templates print wall clocks
HELLO = {"messages": [{"role": "user", "content": "hello"}]}

TRIVIAL = load_prompter(TokenizerFiles(kind="trivial"))
TINY_FILES = TokenizerFiles.from_hf(tokenizer_json=tiny.byte_level_framed(), config_json=tiny.CONFIG)
TINY = load_prompter(TINY_FILES, cache_bytes=4000)

TRANSFORMERS: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
    tokenizer_object=Tokenizer.from_str(tiny.byte_level_framed()),
    chat_template=TokenizerConfig.parse(tiny.CONFIG).chat_templates["default"],
    bos_token="<|bos|>",
    eos_token="<|im_end|>",
)

PIECES = st.sampled_from([*tiny.SPECIAL_TOKENS, "the fox", " ", "\n", "日本", "12"])
CONTENTS = st.lists(PIECES, max_size=6).map("".join)


@settings(deadline=None)
@given(
    contents=st.lists(CONTENTS, min_size=1, max_size=6),
    add_generation_prompt=st.booleans(),
    continue_final_message=st.booleans(),
)
def test_ids_equal_those_of_apply_chat_template(
    contents: list[str], add_generation_prompt: bool, continue_final_message: bool
) -> None:
    messages = [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]
    options = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
    }
    body = {"model": "tiny", "temperature": 0, "messages": messages, **options}

    expected = TRANSFORMERS.apply_chat_template(messages, return_dict=False, **options)

    assert TINY.encode_chat(body, NOW).tolist() == expected


def test_a_plain_prompt_gets_what_the_model_wants_around_it_unless_told_otherwise() -> None:
    assert TINY.encode_text("the fox").tolist() == TRANSFORMERS("the fox")["input_ids"]
    assert TINY.encode_text("the fox", add_special_tokens=False).tolist() == TINY.encode_text("the fox").tolist()[1:-1]


def test_ids_are_u32_in_an_array_that_can_be_hashed_and_sent_as_it_is() -> None:
    for prompter in (TINY, TRIVIAL):
        ids = prompter.encode_chat(HELLO, NOW)
        assert isinstance(ids, array)
        assert (ids.typecode, ids.itemsize) == ("I", 4)


def test_a_prompter_says_what_a_detokenizer_must_know() -> None:
    whole = Tokenizer.from_str(TINY_FILES.tokenizer_json)

    assert TINY.digest == TINY_FILES.digest
    assert TINY.vocab_size == whole.get_vocab_size() == TINY.max_id + 1
    assert TINY.bos_id == whole.token_to_id("<|bos|>")
    assert TINY.eos_ids == {whole.token_to_id("<|im_end|>")}
    assert TINY.special_ids == {whole.token_to_id(token) for token in tiny.SPECIAL_TOKENS[:4]}
    assert TINY.decode(TINY.encode_text("the fox")) == "the fox"
    assert TINY.decode(TINY.encode_text("the fox"), skip_special_tokens=False) == "<|bos|>the fox<|im_end|>"


def test_the_trivial_prompter_renders_chats_of_every_shape() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "weather "}, {"type": "text", "text": "in Paris?"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "sunny"},
        ],
        "tools": [{"type": "function"}],
    }

    assert TRIVIAL.render_chat(body, NOW) == (
        '<|im_start|>tools\n[{"type": "function"}]<|im_end|>\n'
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nweather in Paris?<|im_end|>\n"
        '<|im_start|>assistant\n[{"id": "1"}]<|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert TRIVIAL.decode(TRIVIAL.encode_chat(body, NOW)) == TRIVIAL.render_chat(body, NOW)


@pytest.mark.parametrize("prompter", [TINY, TRIVIAL], ids=["hf", "trivial"])
def test_a_final_message_can_be_left_open(prompter: Prompter) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Well, "}]

    text = prompter.render_chat({"messages": messages, "continue_final_message": True}, NOW)

    assert text.endswith("<|im_start|>assistant\nWell, ")


@pytest.mark.parametrize("prompter", [TINY, TRIVIAL], ids=["hf", "trivial"])
def test_half_a_surrogate_pair_is_the_clients_mistake(prompter: Prompter) -> None:
    with pytest.raises(PromptError):
        prompter.encode_chat({"messages": [{"role": "user", "content": "\ud800"}]}, NOW)


def test_a_model_without_a_chat_template_still_completes_text() -> None:
    prompter = load_prompter(TokenizerFiles.from_hf(tokenizer_json=tiny.byte_level(), config_json="{}"))

    assert prompter.decode(prompter.encode_text("the fox")) == "the fox"
    with pytest.raises(PromptError, match="no chat template"):
        prompter.encode_chat(HELLO, NOW)


@pytest.mark.parametrize(
    "files",
    [
        TokenizerFiles(kind="hf"),
        TokenizerFiles(kind="hf", tokenizer_json=tiny.byte_level(), config_json="nonsense"),
        TokenizerFiles(kind="hf", tokenizer_json=tiny.byte_level(), config_json='{"chat_template": "{% nonsense %}"}'),
    ],
)
def test_unusable_files_are_refused_at_load(files: TokenizerFiles) -> None:
    with pytest.raises(TokenizerError):
        load_prompter(files)


def test_a_simulated_fleet_needs_no_tokenizer_library() -> None:
    program = """if True:
        import sys
        from router.prompt import TokenizerFiles, load_prompter
        load_prompter(TokenizerFiles(kind="trivial"))
        sys.exit("tokenizers" in sys.modules)"""

    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


@pytest.mark.parametrize("model", ["smollm2", "qwen3"])
def test_what_openai_clients_send_beside_plain_text_is_read_by_templates_that_only_know_strings(model: str) -> None:
    golden = json.loads((GOLDEN / f"{model}.json").read_text())
    template = ChatTemplate({"default": golden["chat_template"]}, golden["special_tokens"])
    prompter = Prompter("digest", template, TrivialTokenizer())
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    def render(content: object, answer: object) -> str:
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer, "tool_calls": [call]},
        ]
        return prompter.render_chat({"messages": messages}, NOW)

    assert render(parts, None) == render("one\ntwo", "")


def test_a_template_that_knows_parts_gets_them_as_they_are() -> None:
    source = "{% for m in messages %}{% for p in m.content %}<{{ p.type }}>{{ p.text }}{% endfor %}{% endfor %}"
    prompter = Prompter("digest", ChatTemplate({"default": source}, {}), TrivialTokenizer())
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    assert prompter.render_chat({"messages": [{"role": "user", "content": parts}]}, NOW) == "<text>one<text>two"


def test_a_picture_for_a_text_model_is_refused() -> None:
    prompter = load_prompter(TokenizerFiles(kind="trivial"))
    parts = [{"type": "image_url", "image_url": {"url": "http://example.test/x.png"}}]

    with pytest.raises(PromptError, match="text only"):
        prompter.render_chat({"messages": [{"role": "user", "content": parts}]}, NOW)
