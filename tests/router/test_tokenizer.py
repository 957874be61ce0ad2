"""Ids through the segment cache against the tokenizers library on the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.prompt_errors import PromptError, TokenizerError
from router.tokenizer import HFTokenizer
from router.tokenizer_files import TokenizerConfig
from router.wire import unpack_ids
from tests.router import tiny_tokenizer as tiny

CONFIG = TokenizerConfig.parse(tiny.CONFIG)

CUTTABLE = [tiny.byte_level, tiny.byte_level_nfc, tiny.byte_level_framed, tiny.spaced_words]
WHOLE_ONLY = [
    tiny.first_word_prefixed,
    tiny.space_after_swallowed,
    tiny.space_before_swallowed,
    tiny.whole_words_only,
]

SPECIALS = (*tiny.SPECIAL_TOKENS, tiny.GREEDY_TOKEN, tiny.NORMALIZED_TOKEN)
PIECES = st.one_of(
    st.sampled_from(SPECIALS),
    st.sampled_from([token[:length] for token in SPECIALS for length in range(1, len(token))]),
    st.sampled_from(["the quick", " brown", "\n", "\n\n", "  ", "'s", "12", "e\u0301", "\u0301", "日本", "👩‍🚀", "▁"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@cache
def loaded(build: Callable[[], str], cache_bytes: int, native: bool = False) -> tuple[HFTokenizer, Tokenizer]:
    return HFTokenizer(build(), CONFIG, cache_bytes, native=native), Tokenizer.from_str(build())


def encode(tokenizer: HFTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    return unpack_ids(tokenizer.encode(text, add_special_tokens=add_special_tokens)).tolist()


@pytest.mark.parametrize("build", CUTTABLE)
@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
@settings(max_examples=60)
@given(data=st.data(), before=TEXTS, after=TEXTS)
def test_a_text_may_be_cut_before_some_tokens(
    build: Callable[[], str], native: bool, data: st.DataObject, before: str, after: str
) -> None:
    tokenizer, whole = loaded(build, 1 << 20, native)
    after = data.draw(st.sampled_from(tokenizer.cuts)) + after

    ids = [id_ for part in (before, after) for id_ in encode(tokenizer, part, add_special_tokens=False)]

    assert ids == whole.encode(before + after, add_special_tokens=False).ids


@pytest.mark.parametrize("build", WHOLE_ONLY)
def test_where_a_cut_would_change_an_id_there_is_none(build: Callable[[], str]) -> None:
    tokenizer, _ = loaded(build, 1 << 20)

    assert not tokenizer.cuts


@pytest.mark.parametrize("build", CUTTABLE + WHOLE_ONLY)
@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
@pytest.mark.parametrize("cache_bytes", [0, 2000, 1 << 20])
@settings(max_examples=30)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_ids_equal_those_of_the_whole_text_cold_and_warm(
    build: Callable[[], str], cache_bytes: int, native: bool, text: str, add_special_tokens: bool
) -> None:
    """smg#1637, smg#1680 among others: what a cache remembers changes no id, around special tokens either."""
    tokenizer, whole = loaded(build, cache_bytes, native)
    expected = whole.encode(text, add_special_tokens=add_special_tokens).ids

    assert encode(tokenizer, text, add_special_tokens=add_special_tokens) == expected
    assert encode(tokenizer, text, add_special_tokens=add_special_tokens) == expected


@pytest.mark.parametrize("build", CUTTABLE)
def test_tokenizers_that_cut_at_special_tokens_first_are_cut(build: Callable[[], str]) -> None:
    assert HFTokenizer(build(), CONFIG, 1 << 20)._segments is not None


@pytest.mark.parametrize("build", WHOLE_ONLY)
def test_tokenizers_for_which_a_cut_would_change_ids_are_not_cut(build: Callable[[], str]) -> None:
    assert HFTokenizer(build(), CONFIG, 1 << 20)._segments is None


@settings(deadline=None)
@given(text=TEXTS)
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer, _ = loaded(tiny.byte_level, 1 << 20)

    assert tokenizer.decode(encode(tokenizer, text, add_special_tokens=False), skip_special_tokens=False) == text


def test_decoding_leaves_special_tokens_out_when_told_so() -> None:
    tokenizer, _ = loaded(tiny.byte_level, 1 << 20)
    ids = encode(tokenizer, "<|im_start|><think>the fox<|im_end|>", add_special_tokens=False)

    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>the fox"


def test_a_token_that_only_the_configuration_calls_special_is_special() -> None:
    files = json.loads(tiny.byte_level())
    (think_id,) = [token["id"] for token in files["added_tokens"] if token["content"] == "<think>"]
    config = TokenizerConfig.parse(json.dumps({"eos_token": "<think>", "pad_token": "the"}))

    tokenizer = HFTokenizer(json.dumps(files), config, 1 << 20)

    assert tokenizer.eos_ids == {think_id}
    assert think_id in tokenizer.special_ids
    assert tokenizer.decode([think_id], skip_special_tokens=True) == ""


def test_a_special_token_outside_the_vocabulary_gets_no_id() -> None:
    config = TokenizerConfig.parse(
        json.dumps({"eos_token": "<|nowhere|>", "additional_special_tokens": ["<|nor here|>"]})
    )

    tokenizer = HFTokenizer(tiny.byte_level(), config, 1 << 20)

    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.bos_id is None
    assert tokenizer.vocab_size == Tokenizer.from_str(tiny.byte_level()).get_vocab_size()


def test_the_highest_id_counts_holes_and_the_size_does_not() -> None:
    tokenizer, whole = loaded(tiny.byte_level, 1 << 20)
    files = json.loads(tiny.byte_level())
    files["model"]["vocab"]["far away"] = 5000

    holed = HFTokenizer(json.dumps(files), CONFIG, 1 << 20)

    assert (tokenizer.vocab_size, tokenizer.max_id) == (whole.get_vocab_size(), whole.get_vocab_size() - 1)
    assert (holed.vocab_size, holed.max_id) == (tokenizer.vocab_size + 1, 5000)


def test_truncation_and_padding_left_from_training_are_ignored() -> None:
    whole = Tokenizer.from_str(tiny.byte_level())
    whole.enable_truncation(max_length=4)
    whole.enable_padding(length=64)

    tokenizer = HFTokenizer(whole.to_str(), CONFIG, 1 << 20)

    assert (
        tokenizer.decode(encode(tokenizer, tiny.CORPUS[0], add_special_tokens=True), skip_special_tokens=False)
        == tiny.CORPUS[0]
    )


@pytest.mark.parametrize("build", [tiny.byte_level, tiny.space_after_swallowed])
def test_half_a_surrogate_pair_is_the_clients_mistake(build: Callable[[], str]) -> None:
    tokenizer, _ = loaded(build, 1 << 20)

    with pytest.raises(PromptError, match="surrogate"):
        tokenizer.encode("hello \ud83d<|im_end|>", add_special_tokens=False)


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [1.5], ["a"]])
def test_what_is_no_token_id_is_the_clients_mistake(ids: list[int]) -> None:
    tokenizer, _ = loaded(tiny.byte_level, 1 << 20)

    with pytest.raises(PromptError, match="token ids"):
        tokenizer.decode(ids, skip_special_tokens=True)


def test_ids_without_a_token_decode_to_nothing() -> None:
    tokenizer, _ = loaded(tiny.byte_level, 1 << 20)

    assert tokenizer.decode([tokenizer.max_id + 1, (1 << 32) - 1], skip_special_tokens=False) == ""


def test_a_vocabulary_too_small_for_the_check_is_tokenized_whole() -> None:
    words = {"type": "WordLevel", "vocab": {"yes": 0, "no": 1, "<|end|>": 2}, "unk_token": "<unk>"}
    end = {"id": 2, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    files = {"version": "1.0", "added_tokens": [end | {"special": True}], "model": words}

    tokenizer = HFTokenizer(json.dumps(files), CONFIG, 1 << 20)

    assert encode(tokenizer, "yes<|end|>no", add_special_tokens=True) == [0, 2, 1]
    with pytest.raises(PromptError, match="refuses"):
        tokenizer.encode("perhaps", add_special_tokens=True)


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", '{"version":"1.0","model":{"type":"BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        HFTokenizer(text, CONFIG, 1 << 20)


def test_a_tokenizer_without_tokens_is_refused() -> None:
    with pytest.raises(TokenizerError, match="no tokens"):
        HFTokenizer(
            '{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{},"merges":[]}}', CONFIG, 1 << 20
        )
