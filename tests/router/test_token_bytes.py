"""The bytes of tokens against the tokenizer's own decoding: joined, they are the text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt import Prompter, TokenizerFiles, load_prompter
from router.token_bytes import bytes_speller
from router.trivial import TrivialTokenizer
from router.wire import unpack_ids
from tests.router import tiny_tokenizer as tiny

TOKENIZERS = [
    load_prompter(TokenizerFiles.from_hf(tokenizer_json=text, config_json=tiny.CONFIG))
    for text in (tiny.byte_level(), tiny.byte_level_nfc(), tiny.spaced_words())
]


@pytest.mark.parametrize("prompter", TOKENIZERS, ids=["byte level", "byte level, NFC", "spaced words"])
@given(text=st.text(alphabet="the quick fox é日本👩‍🚀\n<|im_end|>", max_size=30))
def test_the_bytes_of_all_tokens_are_the_text(prompter: Prompter, text: str) -> None:
    ids = prompter.encode_text(text, add_special_tokens=False)

    joined = b"".join(prompter.token_bytes(id_) for id_ in ids)

    assert joined.decode() == prompter.decode(ids, skip_special_tokens=False)


def test_every_token_of_a_byte_level_vocabulary_has_bytes_and_all_bytes_are_there() -> None:
    prompter = TOKENIZERS[0]

    spelled = {prompter.token_bytes(id_) for id_ in range(prompter.max_id + 1)}

    assert {bytes([byte]) for byte in range(256)} <= spelled
    assert prompter.token_bytes(prompter.max_id + 1) == b""


def test_byte_fallback_spells_bytes_and_spaces() -> None:
    parts = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    spell = bytes_speller(json.dumps({"decoder": {"type": "Sequence", "decoders": parts}}))

    assert [spell(token) for token in ("▁the", "<0xE6>", "<0x0a>", "<0xZZ>", "é")] == [
        b" the",
        b"\xe6",
        b"\n",
        b"<0xZZ>",
        "é".encode(),
    ]


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}])
def test_a_vocabulary_without_an_alphabet_is_its_text(decoder: object) -> None:
    assert bytes_speller(json.dumps({"decoder": decoder}))("é▁") == "é▁".encode()


def test_the_trivial_tokenizers_bytes_are_the_text() -> None:
    tokenizer = TrivialTokenizer()
    ids = unpack_ids(tokenizer.encode("ab世d", add_special_tokens=False))

    assert b"".join(map(tokenizer.token_bytes, ids)) == "ab世d".encode()
