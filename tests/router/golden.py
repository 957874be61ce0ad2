"""What `apply_chat_template` gave for six well-known tokenizers (tests/data/chat_golden), and prompters made of their files."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from router.prompt import Prompter, TokenizerFiles, load_prompter
from tests.default_model import default_model
from tests.npm_tokenizers import npm_tokenizer
from workers.tokenizer_files import load_tokenizer_files

__all__ = ["MODELS", "body_of", "golden", "golden_files", "golden_prompter"]

MODELS: Final = ("smollm2", "qwen3", "gemma3", "llama3", "llama3_1", "deepseek_v3")

_FOLDER: Final = Path(__file__).parents[1] / "data" / "chat_golden" / "ids"


@cache
def golden(name: str) -> Any:
    return json.loads(gzip.decompress((_FOLDER / f"{name}.json.gz").read_bytes()))


@cache
def golden_files(model: str) -> TokenizerFiles:
    """Skips the test where they cannot be had."""
    if model == "smollm2":
        return load_tokenizer_files(default_model())
    recorded = golden(model)
    return npm_tokenizer(model, recorded["tokenizer_json_sha256"], recorded["tokenizer_config_json_sha256"])


@cache
def golden_prompter(model: str, *, native: bool) -> Prompter:
    return load_prompter(golden_files(model), native=native)


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    """The request that a case stands for."""
    options = case["options"]
    flags = {name: options[name] for name in ("add_generation_prompt", "continue_final_message")}
    conversation = golden("conversations")[case["conversation"]]
    return {**conversation, **flags, "chat_template_kwargs": options.get("template_kwargs")}
