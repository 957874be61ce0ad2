"""The tokenizer that needs no files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt_errors import PromptError
from router.trivial import EOS_ID, TrivialTokenizer
from router.wire import unpack_ids

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def encode(text: str) -> list[int]:
    return unpack_ids(TrivialTokenizer().encode(text, add_special_tokens=True)).tolist()


def test_four_bytes_are_one_id_and_the_last_is_filled_up() -> None:
    assert encode("abcde") == [int.from_bytes(b"abcd", "little"), ord("e")]
    assert encode("") == []


@given(text=TEXTS)
def test_a_text_comes_back_but_for_its_nul_characters(text: str) -> None:
    assert TrivialTokenizer().decode(encode(text), skip_special_tokens=True) == text.replace("\0", "")


@given(start=TEXTS, end=TEXTS)
def test_a_longer_text_starts_with_the_ids_of_the_shorter(start: str, end: str) -> None:
    whole_ids = len(start.encode()) // 4

    assert encode(start + end)[:whole_ids] == encode(start)[:whole_ids]


@given(text=TEXTS)
def test_no_text_contains_the_end_token(text: str) -> None:
    assert EOS_ID not in encode(text)


def test_the_end_token_is_shown_only_when_asked_for() -> None:
    ids = [*encode("done"), EOS_ID]

    assert TrivialTokenizer().decode(ids, skip_special_tokens=True) == "done"
    assert TrivialTokenizer().decode(ids, skip_special_tokens=False) == "done<|im_end|>"


def test_part_of_a_character_is_a_replacement_character() -> None:
    assert TrivialTokenizer().decode(encode("abc日")[:1], skip_special_tokens=True) == "abc\ufffd"


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["a"]])
def test_what_is_no_token_id_is_the_clients_mistake(ids: list[int]) -> None:
    with pytest.raises(PromptError, match="token ids"):
        TrivialTokenizer().decode(ids, skip_special_tokens=True)


def test_half_a_surrogate_pair_is_the_clients_mistake() -> None:
    with pytest.raises(PromptError, match="surrogate"):
        encode("\ud83d")
