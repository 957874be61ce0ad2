"""When fastokens is believed, and what happens when not. Its ids are compared in test_tokenizer and test_chat_golden."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router import native_tokenizer
from router.native_tokenizer import NativeTokenizer
from router.prompt_errors import PromptError
from router.tokenizer import HFTokenizer
from router.tokenizer_files import TokenizerConfig
from router.wire import unpack_ids
from tests.router import tiny_tokenizer as tiny

CONFIG = TokenizerConfig.parse(tiny.CONFIG)


def load(build: Callable[[], str] = tiny.byte_level) -> HFTokenizer:
    return HFTokenizer(build(), CONFIG, 1 << 20)


def test_it_is_used_where_it_gives_the_same_ids() -> None:
    assert load().is_native
    assert load(tiny.byte_level_framed).is_native


@pytest.mark.parametrize("wrong_from", [1, 200, 10_000])
def test_one_other_id_in_the_rehearsal_is_enough(wrong_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold or warm: the last one is wrong only when its cache answers."""
    right = NativeTokenizer.encode
    calls = 0

    def encode(self: NativeTokenizer, text: str) -> bytes | None:
        nonlocal calls
        calls += 1
        return b"\0\0\0\0" if text and calls > min(wrong_from, texts + 20) else right(self, text)

    texts = len(rehearsal())
    monkeypatch.setattr(NativeTokenizer, "encode", encode)

    tokenizer = load()

    assert not tokenizer.is_native
    assert calls > min(wrong_from, texts)
    assert (
        tokenizer.decode(unpack_ids(tokenizer.encode("the fox", add_special_tokens=False)), skip_special_tokens=True)
        == "the fox"
    )


def rehearsal() -> list[str]:
    tokenizer = load()._tokenizer
    return list(native_tokenizer._rehearsal_texts(tokenizer.get_vocab(), tiny.SPECIAL_TOKENS, tokenizer.decode))


def test_the_rehearsal_goes_through_the_vocabulary_the_characters_and_the_special_tokens() -> None:
    texts = rehearsal()
    everything = "".join(texts)

    vocabulary = load()._tokenizer
    reached = {id_ for text in texts for id_ in vocabulary.encode(text).ids}
    assert len(reached) > 0.8 * vocabulary.get_vocab_size()  # bytes that begin no character, say, never stand alone
    assert all(everything.count(token) > 3 for token in tiny.SPECIAL_TOKENS)
    ranges = [(0x400, 0x500), (0x600, 0x700), (0x900, 0x980), (0x4E00, 0x9FFF), (0xAC00, 0xD7A0)]
    assert all(any(start <= ord(character) < end for character in everything) for start, end in ranges)
    assert len(everything) < 120_000


def test_a_file_that_it_cannot_read_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("unsupported")

    monkeypatch.setattr(NativeTokenizer, "__init__", fail)

    assert not load().is_native


def test_without_fastokens_all_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_tokenizer, "_INSTALLED", False)

    assert not load().is_native


def test_what_it_refuses_later_is_for_the_library_to_say() -> None:
    with pytest.raises(PromptError, match="surrogate"):
        load().encode("\ud83d", add_special_tokens=False)


def test_a_panic_of_its_is_for_the_library_to_answer() -> None:
    class PanicException(BaseException):
        """As pyo3's."""

    class Panicking:
        def encode_batch_flat(self, texts: object) -> None:
            raise PanicException

    tokenizer = load()
    expected = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer._native is not None
    tokenizer._native._tokenizer = Panicking()

    assert tokenizer.encode("the fox", add_special_tokens=False) == expected
