"""The cache against naming every block anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.blocks import block_names, root_name
from router.name_cache import NameCache
from router.wire import pack_ids

SPAN = 64


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5 * SPAN), st.integers(0, 3), st.booleans()), max_size=12
    ),
    block_size=st.sampled_from([1, 2]),
    max_bytes=st.sampled_from([0, 20_000, 1 << 20]),
)
def test_names_are_those_of_the_blocks_cold_and_warm(
    prompts: list[tuple[int, int, int, bool]], block_size: int, max_bytes: int
) -> None:
    cache = NameCache(max_bytes)

    for start, shared, end, salted in prompts:
        root = root_name(model="m", salt="s" if salted else "")
        packed = pack_ids([start] * shared * block_size + [end] * (SPAN + 3))
        assert cache.names(packed, root, block_size) == block_names(packed, root, block_size)


def test_what_is_kept_is_bounded_and_what_is_used_stays() -> None:
    cache = NameCache(200_000)
    root = root_name(model="m")
    used = pack_ids([7] * SPAN * 16)
    (first, *_) = cache.names(used, root)

    for number in range(1000):
        cache.names(pack_ids([number] * SPAN * 16), root)
        again, *_ = cache.names(used, root)
        assert again is first

    assert 10 < len(cache) < 100
