"""The files that say how a model's text becomes token ids, as one value.

`TokenizerFiles` is what a worker serves at ``GET /tokenizer`` and what its digest in `router.wire.Hello` is a digest of: a
gateway and a replica with the same digest agree on every id of every prompt. `TokenizerConfig` is what we read out of
``tokenizer_config.json``; everything else in that file is for other programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import msgspec

from router.prompt_errors import TokenizerError

__all__ = ["TokenizerConfig", "TokenizerFiles"]

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens with a role of their own. Templates see them under these names."""


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Either a Hugging Face tokenizer or the built-in trivial one (`router.trivial`), which needs no files."""

    kind: Literal["hf", "trivial"]
    tokenizer_json: str = ""
    """``tokenizer.json``: vocabulary, merges, normalizer, pre-tokenizer, added tokens."""
    config_json: str = ""
    """``tokenizer_config.json``: names of special tokens and the chat template."""

    @classmethod
    def from_hf(cls, *, tokenizer_json: str, config_json: str, chat_template: str | None = None) -> Self:
        """From the contents of a Hugging Face folder's files.

        `chat_template` is the text of ``chat_template.jinja``, where newer folders keep what older ones have in their
        ``tokenizer_config.json``; it wins when both are there.
        """
        if chat_template is not None:
            config_json = json.dumps(_json_object(config_json) | {"chat_template": chat_template}, ensure_ascii=False)
        return cls(kind="hf", tokenizer_json=tokenizer_json, config_json=config_json)

    @property
    def digest(self) -> str:
        """Hex SHA-256 over the length-prefixed fields. Hashes megabytes: ask once (`Prompter.digest` keeps it)."""
        sha = hashlib.sha256(b"warmpath-tokenizer/1")
        for field in (self.kind, self.tokenizer_json, self.config_json):
            # A lone surrogate in a foreign file must not stop the hash.
            data = field.encode("utf-8", "surrogatepass")
            sha.update(len(data).to_bytes(8, "little"))
            sha.update(data)
        return sha.hexdigest()


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    special_tokens: Mapping[str, str]
    """Name → text, for the names that templates may use."""
    unnamed_special_tokens: tuple[str, ...]
    chat_templates: Mapping[str, str]
    """Name → source. Most models have one, called ``default``."""

    @classmethod
    def parse(cls, config_json: str) -> Self:
        config = _json_object(config_json)
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        unnamed: list[str] = []
        # The first key is what transformers 5 writes, the second what earlier ones did; a mapping gives names of its own.
        for key in ("extra_special_tokens", "additional_special_tokens"):
            extra = config.get(key)
            if isinstance(extra, Mapping):
                special |= {name: text for name, token in extra.items() if (text := _token_text(token))}
            elif isinstance(extra, list):
                unnamed += filter(None, map(_token_text, extra))
        return cls(special, tuple(unnamed), _chat_templates(config.get("chat_template")))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer_config.json is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError("tokenizer_config.json is no JSON object")
    return value


def _token_text(token: Any) -> str | None:
    """A token is written as its text, or as an object that has it as ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _chat_templates(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise TokenizerError("chat_template is neither a text nor a list of named texts") from error
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise TokenizerError("chat_template is neither a text nor a list of named texts")
    return templates
