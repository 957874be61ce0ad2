from __future__ import annotations

import base64
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import router.id_text
from router import IdTexts
from router.generations import Generations
from router.wire import PromptField

SPAN = 12 << 10


def ids(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(4 * size)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000)), max_size=8), st.sampled_from([0, 60_000, 1 << 20])
)
def test_texts_are_base64_whatever_is_remembered(talks: list[tuple[int, int]], max_bytes: int) -> None:
    texts = IdTexts(max_bytes)

    for seed, size in talks:
        packed = ids(seed, size)
        assert texts.encode(packed) == base64.b64encode(packed)


def test_only_the_new_end_of_a_talk_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, talk = IdTexts(1 << 20), ids(1, 20_000)
    texts.encode(talk)
    encoded: list[int] = []

    class Counting:
        @staticmethod
        def b64encode(data: bytes) -> bytes:
            encoded.append(len(data))
            return base64.b64encode(data)

    monkeypatch.setattr(router.id_text, "base64", Counting)
    longer = talk + ids(2, 50)

    assert texts.encode(longer) == base64.b64encode(longer)
    assert sum(encoded) < SPAN


def test_ids_that_share_a_hash_keep_their_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.id_text, "_hash", lambda data: 7)
    texts = IdTexts(1 << 20)

    for seed in (1, 2, 1, 2):
        packed = ids(seed, 4_000)
        assert texts.encode(packed) == base64.b64encode(packed)


def test_what_is_remembered_is_bounded() -> None:
    texts = IdTexts(200_000)

    for seed in range(50):
        texts.encode(ids(seed, 3_072))

    assert 0 < len(texts) <= 6


def test_what_is_used_again_outlives_what_is_not() -> None:
    known: Generations[str] = Generations(2)

    for key in range(20):
        known.put(key, str(key))
        if known.get(0) is None:
            known.put(0, "0")

    assert known.get(0) == "0"
    assert known.get(5) is None


@pytest.mark.parametrize("field", [PromptField(), PromptField(salt="s", seed=3, request_id="r")])
@pytest.mark.parametrize("packed", [b"", b"\1\0\0\0"])
def test_a_field_with_ids_that_are_text_already_reads_the_same(field: PromptField, packed: bytes) -> None:
    text = base64.b64encode(packed)

    read = msgspec.json.decode(field.encode(text), type=PromptField)

    assert read == msgspec.structs.replace(field, prompt_ids=text.decode())
