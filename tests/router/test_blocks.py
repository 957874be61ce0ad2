import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from router.blocks import (
    BLOCK_SIZE,
    CHUNK_BYTES,
    CHUNK_ENDS,
    CHUNK_SHARE,
    block_names,
    chunk_names,
    matchable_blocks,
    matchable_chunks,
    root_name,
)
from router.wire import pack_ids

ROOT = root_name(model="m")
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_a_name_is_xxh3_of_the_ids_seeded_with_its_parents_name() -> None:
    ids = list(range(32))

    first, second = block_names(pack_ids(ids), ROOT)

    assert first == xxhash.xxh3_64_intdigest(b"".join(i.to_bytes(4, "little") for i in ids[:16]), ROOT)
    assert second == xxhash.xxh3_64_intdigest(b"".join(i.to_bytes(4, "little") for i in ids[16:]), first)


def test_names_never_change_between_versions() -> None:
    root = root_name(model="m", revision="r", adapter="a", salt="s")

    assert root == 17912107341546888929
    assert block_names(pack_ids(range(16)), root) == [10204779740946124468]
    assert chunk_names(b"x" * 256, root) == [4998056638404392754]


@given(token_ids, st.integers(1, 40))
def test_only_full_blocks_have_names(ids: list[int], block_size: int) -> None:
    assert len(block_names(pack_ids(ids), ROOT, block_size)) == len(ids) // block_size


@given(token_ids, token_ids)
def test_names_agree_exactly_as_far_as_the_ids_do(left: list[int], right: list[int]) -> None:
    left, right = left + right, left + right[::-1]
    shared = next((at for at, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))
    pairs = zip(block_names(pack_ids(left), ROOT), block_names(pack_ids(right), ROOT), strict=True)

    for block, (a, b) in enumerate(pairs):
        assert (a == b) == ((block + 1) * BLOCK_SIZE <= shared)


def test_the_same_block_under_another_prefix_has_another_name() -> None:
    block = list(range(16))

    assert block_names(pack_ids([7] * 16 + block), ROOT)[1] != block_names(pack_ids([8] * 16 + block), ROOT)[1]


def test_every_field_of_the_root_counts_and_none_passes_for_another() -> None:
    roots = {
        root_name(model="m"),
        root_name(model="m", revision="x"),
        root_name(model="m", adapter="x"),
        root_name(model="m", salt="x"),
        root_name(model="mx"),
        root_name(model="m", revision="x", adapter="x"),
        root_name(model="m", adapter="x", salt="x"),
        root_name(model="m", adapter="xx"),
    }

    assert len(roots) == 8


def test_a_chunk_is_named_by_its_text_and_all_before_it() -> None:
    text = bytes(range(256)) * 40
    names = chunk_names(text, ROOT)

    for start, end, parent, name in zip([0, *CHUNK_ENDS], CHUNK_ENDS, [ROOT, *names], names, strict=False):
        assert name == xxhash.xxh3_64_intdigest(text[start:end], parent)


@given(st.binary(min_size=1, max_size=100), st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_longer_text_starts_with_the_names_of_the_shorter(seed: bytes, size: int, more: int) -> None:
    text = (seed * (200_000 // len(seed) + 1))[: size + more]
    names = chunk_names(text[:size], ROOT)

    assert chunk_names(text, ROOT)[: len(names)] == names


@given(st.integers(0, 1_000_000))
def test_chunks_fill_a_text_but_for_an_eighth(size: int) -> None:
    names = chunk_names(bytes(size), ROOT)

    covered = CHUNK_ENDS[len(names) - 1] if names else 0
    assert 0 <= size - covered < max(CHUNK_BYTES, covered * CHUNK_SHARE + 1)
    assert len(chunk_names(bytes(4096), ROOT)) == 4096 // CHUNK_BYTES


@pytest.mark.parametrize(
    ("size", "chunks"), [(0, 0), (256, 0), (257, 1), (4096, 15), (4097, 16), (4608, 16), (4609, 17)]
)
def test_the_chunk_with_the_last_byte_cannot_be_served_from_a_cache(size: int, chunks: int) -> None:
    assert matchable_chunks(size) == chunks


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (8192, 511), (8193, 512)]
)
def test_the_block_with_the_last_token_cannot_be_served_from_a_cache(tokens: int, blocks: int) -> None:
    assert matchable_blocks(tokens) == blocks
