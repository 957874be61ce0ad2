"""Small tokenizers of the kinds that real models have, trained in milliseconds, as tokenizer.json texts."""

from __future__ import annotations

import json
from functools import cache
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS: Final = (
    "the quick brown fox jumps over the lazy dog. " * 3,
    "def run(self, batch):\n    return [token for token in batch]\n",
    "It's 12345, isn't it? naïve café, 日本語, emoji 👩‍🚀.\n\nuser assistant system tool",
)

SPECIAL_TOKENS: Final = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|im_end|>>", "<think>", "</think>")
"""One is the start of another, and two are not `special`."""

NORMALIZED_TOKEN: Final = "é<|im"
"""Looks like the start of a special token, which is found first."""

GREEDY_TOKEN: Final = "<|end|>"

CONFIG: Final = json.dumps(
    {
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "model_max_length": 1000000000000000019884624838656,
        "chat_template": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    }
)


@cache
def byte_level() -> str:
    """As GPT-2, SmolLM2, Llama 3."""
    return _byte_level().to_str()


@cache
def byte_level_nfc() -> str:
    """As Qwen: text is normalized, and its pre-tokenizer looks ahead over spaces. With a token that is looked for only in
    normalized text, so after the others."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(
        Regex(r"\p{N}|\s+(?!\S)|\s*[\r\n]+| ?[^\s\p{L}\p{N}]+|[^\r\n\p{L}\p{N}]?\p{L}+"), "isolated"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.add_tokens([AddedToken(NORMALIZED_TOKEN, normalized=True)])
    return tokenizer.to_str()


@cache
def byte_level_framed() -> str:
    """Puts a token before a text and one after it, where special tokens are wanted."""
    tokenizer = _byte_level()
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<|bos|>", "<|im_end|>")]
    template = processors.TemplateProcessing(single="<|bos|> $A <|im_end|>", special_tokens=ends)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer.to_str()


@cache
def spaced_words() -> str:
    """As Gemma: spaces become a character of their own, and runs of line ends are added tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Replace("▁", " ")
    _train(
        tokenizer, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL_TOKENS], show_progress=False)
    )
    tokenizer.add_tokens([AddedToken("\n" * length, normalized=False) for length in (1, 2, 3)])
    return tokenizer.to_str()


@cache
def first_word_prefixed() -> str:
    """As newer Llama 2 conversions: only the first word of a whole text gets a prefix, so cutting would change ids."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    _train(
        tokenizer, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL_TOKENS], show_progress=False)
    )
    return tokenizer.to_str()


@cache
def space_after_swallowed() -> str:
    """As Phi-3: a special token swallows the spaces after it, so what follows does not stand alone."""
    return _with_greedy_token(rstrip=True)


@cache
def space_before_swallowed() -> str:
    """As RoBERTa's mask."""
    return _with_greedy_token(lstrip=True)


@cache
def whole_words_only() -> str:
    """Whether a token is one depends on the characters beside it."""
    return _with_greedy_token(single_word=True)


def _with_greedy_token(**how: bool) -> str:
    tokenizer = _byte_level()
    tokenizer.add_special_tokens([f"<|unused_{number}|>" for number in range(8)])
    tokenizer.add_special_tokens([AddedToken(GREEDY_TOKEN, normalized=False, special=True, **how)])
    return tokenizer.to_str()


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL_TOKENS[:4]), initial_alphabet=alphabet, show_progress=False
    )
    _train(tokenizer, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS[4:]])
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: trainers.BpeTrainer) -> None:
    tokenizer.train_from_iterator(CORPUS, trainer)
