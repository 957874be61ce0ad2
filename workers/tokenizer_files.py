"""A model on disk → `router.prompt.TokenizerFiles`, and the ids that end its answers. No torch.

A Hugging Face folder has the files already. A GGUF file has their contents in another form: vocabulary, token types and merges
are there; the pre-tokenizer and the normalizer are only named, so their rules are written down here, and a name that is
not known is refused, for a near miss would give slightly wrong ids. SentencePiece vocabularies come with scores instead of
merges, from which these follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from router.prompt import TokenizerFiles
from workers.gguf_file import read_gguf
from workers.model_config import read_json
from workers.model_errors import ModelDamaged, ModelNotFound, ModelUnsupported

__all__ = ["count_tokens", "generation_eos_ids", "load_tokenizer_files"]


class _Type(IntEnum):
    """Of a token, as GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: Final = {
    "qwen2": _CONTRACTIONS + _WORDS + r"\p{N}" + _REST,
    "llama-bpe": _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,
}
"""Pre-tokenizers that are one regular expression, by the name in the file."""

_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

_SPACE: Final = "\u2581"
"""SentencePiece's visible space."""


_IMAGE: Final = "<image_soft_token>"
"""The small Gemma 3 models, which have no eyes, come with the tokenizer of the larger ones: its last id stands for images, and
their embedding ends before it."""


def load_tokenizer_files(path: Path) -> TokenizerFiles:
    """`path` is a Hugging Face folder or a .gguf file. Raises ModelError."""
    if not path.is_dir():
        return _from_gguf(read_gguf(path).metadata)
    template = path / "chat_template.jinja"
    config = path / "tokenizer_config.json"
    tokenizer = _read(path / "tokenizer.json")
    if f'"{_IMAGE}"' in tokenizer and (path / "config.json").is_file():
        tokenizer = _without_image_token(tokenizer, read_json(path / "config.json").get("vocab_size"))
    return TokenizerFiles.from_hf(
        tokenizer_json=tokenizer,
        config_json=_read(config) if config.is_file() else "{}",
        chat_template=_read(template) if template.is_file() else None,
    )


def _without_image_token(tokenizer_json: str, vocab_size: Any) -> str:
    """Unless the embedding has it. To such a model the name is text like any other."""
    try:
        tokenizer = json.loads(tokenizer_json)
        kept = [
            token
            for token in tokenizer["added_tokens"]
            if token["content"] != _IMAGE or not isinstance(vocab_size, int) or token["id"] < vocab_size
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelDamaged(f"tokenizer.json cannot be read: {error!r}") from error
    if len(kept) == len(tokenizer["added_tokens"]):
        return tokenizer_json
    return json.dumps(tokenizer | {"added_tokens": kept}, ensure_ascii=False)


def count_tokens(files: TokenizerFiles) -> int:
    """One more than the highest id. Raises ModelDamaged."""
    try:
        tokenizer = json.loads(files.tokenizer_json)
        vocab = tokenizer["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))  # by token, or in order with scores
        added = (token["id"] for token in tokenizer.get("added_tokens") or [])
        return 1 + max(int(token) for token in (*ids, *added))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelDamaged(f"tokenizer.json cannot be read: {error!r}") from error


def generation_eos_ids(path: Path) -> frozenset[int]:
    """Ids after which the model has nothing more to say. Chat models often have two: end of turn and end of text."""
    if not path.is_dir():
        metadata = read_gguf(path).metadata
        return _ids(metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            value = read_json(path / name).get("eos_token_id")
            found += value if isinstance(value, list) else [value]
    return _ids(found)


def _ids(values: Iterable[Any]) -> frozenset[int]:
    return frozenset(value for value in values if isinstance(value, int))


def _from_gguf(metadata: Mapping[str, Any]) -> TokenizerFiles:
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    if not tokens or len(types) != len(tokens):
        raise ModelDamaged("the file has no vocabulary, or not a type for each token of it")
    named = {name: _token(metadata, tokens, key) for name, key in _NAMED.items()}
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, types, named["bos_token"])
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types, named["bos_token"])
    else:
        raise ModelUnsupported(f"tokenizers of kind {kind!r} are not implemented; gpt2 and llama are")
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    config |= {name: token for name, token in named.items() if token is not None}
    if metadata.get("tokenizer.chat_template"):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return TokenizerFiles.from_hf(
        tokenizer_json=json.dumps(
            {"version": "1.0", "truncation": None, "padding": None} | tokenizer, ensure_ascii=False
        ),
        config_json=json.dumps(config, ensure_ascii=False),
    )


_NAMED: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _token(metadata: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int], bos: str | None) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre")
    if name == "smollm":
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]
    elif name == "gpt-2":
        steps = [_BYTE_LEVEL]
    elif name in _SPLITS:
        split = {"type": "Split", "pattern": {"Regex": _SPLITS[name]}, "behavior": "Isolated", "invert": False}
        steps = [split, _BYTE_LEVEL | {"use_regex": False}]
    else:
        raise ModelUnsupported(
            f"the pre-tokenizer {name!r} is not implemented; gpt-2, smollm, {', '.join(_SPLITS)} are"
        )
    # Files of Llama 3 do not say that they want a BOS; it goes with the pre-tokenizer.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", name == "llama-bpe")
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges") or []]
    return {
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _prepend(bos, tokens) if adds_bos and bos is not None else _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": _bpe(tokens, types, merges) | {"ignore_merges": name == "llama-bpe"},
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int], bos: str | None) -> dict[str, Any]:
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ModelDamaged("the file has no score for each token of its vocabulary")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", True)
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_visible = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    before = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    return {
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "Sequence", "normalizers": [*before, to_visible]},
        "pre_tokenizer": None,
        "post_processor": _prepend(bos, tokens) if adds_bos and bos is not None else None,
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
        "model": _bpe(tokens, types, _merges_from_scores(tokens, types, scores))
        | {
            "unk_token": next(
                (token for token, kind in zip(tokens, types, strict=True) if kind == _Type.UNKNOWN), None
            ),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _bpe(tokens: list[str], types: list[int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        # Added tokens are in it too: those that are not would be numbered anew behind it. Unused ones only fill up the matrix.
        "vocab": {token: index for index, token in enumerate(tokens) if types[index] != _Type.UNUSED},
        "merges": merges,
    }


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else happens to it."""
    special = (_Type.CONTROL, _Type.UNKNOWN)
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[index] in special,
        }
        for index, token in enumerate(tokens)
        if types[index] in (*special, _Type.USER_DEFINED)
    ]


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """Every way to join two tokens into a third, the best third first, as Hugging Face's own conversion does."""
    index = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, list[str]]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind not in (_Type.NORMAL, _Type.USER_DEFINED):
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = sorted((index[a], index[b], a, b) for a, b in halves if a in index and b in index)
        merges += [(-score, [a, b]) for _, _, a, b in pairs]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, pair in merges]


def _prepend(bos: str, tokens: list[str]) -> dict[str, Any]:
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelDamaged(f"{path} cannot be read: {error}") from error
