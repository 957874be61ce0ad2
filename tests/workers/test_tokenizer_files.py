from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from router.prompt import TokenizerFiles, load_prompter
from tests.default_model import default_model
from tests.workers.gguf_writing import write_metadata
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported
from workers.tokenizer_files import generation_eos_ids, load_tokenizer_files

BYTES = {"a": "a", "b": "b", "space": "Ġ", "newline": "Ċ", "digit": "1"}
"""Some of GPT-2's alphabet of visible bytes."""

BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "<|start|>", *BYTES.values(), "ab", "Ġab", "11", "<tool>", "[PAD1]"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 4, 5],
    "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 1"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
}

PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "ba"],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -1.0, -2.0, -0.5],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def load(tmp_path: Path, metadata: dict[str, Any]) -> TokenizerFiles:
    path = tmp_path / "model.gguf"
    write_metadata(path, metadata)
    return load_tokenizer_files(path)


def ids(files: TokenizerFiles, text: str, *, add_special_tokens: bool = True) -> list[int]:
    return list(load_prompter(files).encode_text(text, add_special_tokens=add_special_tokens))


def test_a_byte_level_vocabulary_gives_ids_and_text_back(tmp_path: Path) -> None:
    files = load(tmp_path, BYTE_LEVEL)
    prompter = load_prompter(files)

    found = ids(files, "ab ab11<tool>\n<|end|>")

    assert found == [7, 8, 6, 6, 10, 5, 0]  # digits stay single
    assert prompter.decode(found, skip_special_tokens=False) == "ab ab11<tool>\n<|end|>"
    assert prompter.special_ids == {0, 1}
    assert prompter.eos_ids == {0}
    assert files.kind == "hf"


def test_tokens_that_only_fill_up_the_matrix_mean_nothing(tmp_path: Path) -> None:
    assert load_prompter(load(tmp_path, BYTE_LEVEL)).max_id == 10


def test_llama_3_files_get_the_bos_they_do_not_ask_for(tmp_path: Path) -> None:
    metadata = {key: value for key, value in BYTE_LEVEL.items() if "add_bos" not in key}
    files = load(tmp_path, metadata | {"tokenizer.ggml.pre": "llama-bpe"})

    assert ids(files, "ab") == [1, 7]
    assert ids(files, "ab", add_special_tokens=False) == [7]
    assert ids(files, "11", add_special_tokens=False) == [9]  # up to three digits stay together


def test_qwen_text_is_normalized(tmp_path: Path) -> None:
    files = load(tmp_path, BYTE_LEVEL | {"tokenizer.ggml.pre": "qwen2"})

    assert json.loads(files.tokenizer_json)["normalizer"] == {"type": "NFC"}
    assert ids(files, "ab 11") == [7, 4, 6, 6]


def test_a_sentencepiece_vocabulary_joins_by_score(tmp_path: Path) -> None:
    files = load(tmp_path, PIECES)

    found = ids(files, "ab\nba")

    assert found == [1, 8, 3, 9]  # the space before the first word, a byte, and "ba" before "ab"
    assert load_prompter(files).decode(found, skip_special_tokens=True) == "ab\nba"


def test_a_sentencepiece_vocabulary_without_space_before_the_first_word(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}

    assert ids(load(tmp_path, PIECES | extra), "ab ab") == [7, 8]


def test_the_chat_template_comes_along(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    files = load(tmp_path, BYTE_LEVEL | {"tokenizer.chat_template": template})

    found = load_prompter(files).encode_chat({"messages": [{"role": "user", "content": "ab"}]}, datetime.now(UTC))

    assert list(found) == [1, 7, 0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tekken"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
    ],
)
def test_a_tokenizer_whose_rules_are_not_known_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=says):
        load(tmp_path, BYTE_LEVEL | changes)


@pytest.mark.parametrize("changes", [{"tokenizer.ggml.token_type": [1]}, {"tokenizer.ggml.scores": [0.5]}])
def test_a_vocabulary_with_holes_is_damage(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelDamaged):
        load(tmp_path, PIECES | changes)


def test_ids_that_end_an_answer_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_metadata(path, BYTE_LEVEL | {"tokenizer.ggml.eot_token_id": 1})

    assert generation_eos_ids(path) == {0, 1}


def test_a_folder_gives_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')

    files = load_tokenizer_files(tmp_path)

    assert files.tokenizer_json == '{"version": "1.0"}'
    assert json.loads(files.config_json) == {"bos_token": "<s>", "chat_template": "{{ messages }}"}
    assert generation_eos_ids(tmp_path) == {2, 5, 6}


@pytest.mark.parametrize(("vocab_size", "kept"), [(12, False), (13, True), (None, True)])
def test_an_image_token_beyond_the_embedding_is_none(vocab_size: int | None, kept: bool, tmp_path: Path) -> None:
    files = load(tmp_path, BYTE_LEVEL)
    tokenizer = json.loads(files.tokenizer_json)
    image = tokenizer["added_tokens"][0] | {"id": 12, "content": "<image_soft_token>"}
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], image]})
    )
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))

    found = load_tokenizer_files(folder)

    assert ("<image_soft_token>" in found.tokenizer_json) == kept
    assert ids(found, "<|end|>") == [0]


def test_a_folder_may_have_less(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        load_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    assert load_tokenizer_files(tmp_path) == TokenizerFiles(kind="hf", tokenizer_json="{}", config_json="{}")
    assert generation_eos_ids(tmp_path) == frozenset()


@pytest.mark.model
def test_the_default_models_prompt_is_the_one_it_was_trained_on() -> None:
    prompter = load_prompter(load_tokenizer_files(default_model()))

    found = prompter.encode_chat({"messages": [{"role": "user", "content": "What is 12+34?"}]}, datetime.now(UTC))

    assert prompter.decode(found, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12+34?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [prompter.decode([token], skip_special_tokens=False) for token in found[-15:-7]] == [
        "What", " is", " ", "1", "2", "+", "3", "4",
    ]  # fmt: skip
    assert generation_eos_ids(default_model()) == prompter.eos_ids == {2}
    assert prompter.vocab_size == 49_152
