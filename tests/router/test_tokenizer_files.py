"""The files as one value: their digest, and what is read out of tokenizer_config.json."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.prompt_errors import TokenizerError
from router.tokenizer_files import TokenizerConfig, TokenizerFiles


def test_the_digest_covers_each_field_and_the_borders_between_them() -> None:
    several = [
        TokenizerFiles(kind="trivial"),
        TokenizerFiles(kind="hf"),
        TokenizerFiles(kind="hf", tokenizer_json="ab"),
        TokenizerFiles(kind="hf", tokenizer_json="a", config_json="b"),
        TokenizerFiles(kind="hf", config_json="ab"),
    ]

    assert len({files.digest for files in several}) == len(several)
    assert all(files.digest == msgspec.structs.replace(files).digest for files in several)


def test_the_digest_stays_what_it_was() -> None:
    """Gateways and workers of different releases compare it."""
    files = TokenizerFiles(kind="hf", tokenizer_json='{"é": 1}', config_json="{}")

    assert files.digest == "d143f71a84f084f2846873feb1801bb38661b09c714ddcb96f43971723971741"


def test_files_survive_the_wire() -> None:
    files = TokenizerFiles(kind="hf", tokenizer_json='{"é": "\\ud800"}', config_json="{}")

    assert msgspec.json.decode(msgspec.json.encode(files), type=TokenizerFiles) == files


def test_a_template_file_of_its_own_wins_over_the_configuration() -> None:
    config_json = json.dumps({"eos_token": "</s>", "chat_template": "old"})

    files = TokenizerFiles.from_hf(tokenizer_json="{}", config_json=config_json, chat_template="new é")
    config = TokenizerConfig.parse(files.config_json)

    assert config.chat_templates == {"default": "new é"}
    assert config.special_tokens == {"eos_token": "</s>"}
    assert TokenizerFiles.from_hf(tokenizer_json="{}", config_json=config_json).config_json == config_json


@pytest.mark.parametrize(
    ("config", "named", "unnamed"),
    [
        ({}, {}, ()),
        ({"bos_token": None, "eos_token": "</s>", "model_max_length": 1e30}, {"eos_token": "</s>"}, ()),
        ({"bos_token": {"content": "<s>", "lstrip": False}}, {"bos_token": "<s>"}, ()),
        ({"additional_special_tokens": ["<a>", {"content": "<b>"}, None, 3]}, {}, ("<a>", "<b>")),
        ({"extra_special_tokens": {"image_token": "<image>"}}, {"image_token": "<image>"}, ()),
        ({"extra_special_tokens": ["<a>"]}, {}, ("<a>",)),
    ],
)
def test_special_tokens_are_found_in_every_form_they_are_written_in(
    config: dict[str, Any], named: dict[str, str], unnamed: tuple[str, ...]
) -> None:
    parsed = TokenizerConfig.parse(json.dumps(config))

    assert parsed.special_tokens == named
    assert parsed.unnamed_special_tokens == unnamed


def test_several_templates_keep_their_names() -> None:
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]

    assert TokenizerConfig.parse(json.dumps({"chat_template": templates})).chat_templates == {
        "default": "a",
        "tool_use": "b",
    }


def test_no_configuration_is_an_empty_one() -> None:
    assert TokenizerConfig.parse("").chat_templates == {}


@pytest.mark.parametrize(
    "config_json",
    [
        "not json",
        "[]",
        "[" * 100_000,
        '{"chat_template": 3}',
        '{"chat_template": ["a"]}',
        '{"chat_template": [{"name": "a"}]}',
        '{"chat_template": [{"name": "a", "template": 1}]}',
    ],
)
def test_a_bad_configuration_is_refused(config_json: str) -> None:
    with pytest.raises(TokenizerError):
        TokenizerConfig.parse(config_json)
