"""Token ids → block names: the one definition that gateway and worker share.

A block is `BLOCK_SIZE` tokens. Its name is XXH3-64 of its little-endian u32 ids, seeded with its parent's name; so a name
stands for a whole prefix, and the names of a prompt can be compared position by position. The first block's parent is the
*root*, a hash of what else must be equal for KV to be reusable: model, revision, adapter and salt.

A text whose tokens are unknown is cut into *chunks* instead: of `CHUNK_BYTES`, and of twice that and so on as soon as it is at
most an eighth of the text before. So a long text needs few names (64 for 256 KB), and where two texts part little of what
they share is lost. Borders depend on the position alone, hence equal prefixes have equal names.

XXH3 is not proof against an attacker who looks for collisions. A name is a hint for routing; the engine compares ids
(`workers.block_pool`), so a collision costs time and never correctness.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, takewhile
from typing import Final, NewType, cast

import xxhash

__all__ = [
    "BLOCK_SIZE",
    "CHUNK_BYTES",
    "CHUNK_ENDS",
    "CHUNK_SHARE",
    "BlockName",
    "block_names",
    "chunk_names",
    "matchable_blocks",
    "matchable_chunks",
    "root_name",
]

BlockName = NewType("BlockName", int)

BLOCK_SIZE: Final = 16
"""Tokens in a block. vLLM's choice on GPUs: kernels want tiles of 16, and a hit loses (16 - 1) / 2 tokens on average."""

CHUNK_BYTES: Final = 256
"""Bytes of text in the smallest chunk, the unit of the key space for replicas without a tokenizer: about 64 tokens."""

_SMALLEST_CHUNKS: Final = 16
"""Before they begin to grow."""
CHUNK_SHARE: Final = 2 / _SMALLEST_CHUNKS
"""Of the text before it: the most that a larger chunk takes."""
_MOST_TEXT_BYTES: Final = 1 << 40

_ID_BYTES: Final = 4

_xxh3 = xxhash.xxh3_64_intdigest


@lru_cache(maxsize=4096)  # asked for every prompt, with few different salts
def root_name(*, model: str, revision: str = "", adapter: str = "", salt: str = "") -> BlockName:
    """The name that the first block of every prompt has as its parent.

    Fields are length-prefixed, so no two different tuples give the same bytes: an adapter's name never passes for another
    request's salt (vllm#44701).
    """
    typed = bytearray(b"warmpath-root/1")
    for field in (model, revision, adapter, salt):
        data = field.encode()
        typed += len(data).to_bytes(8, "little") + data
    return BlockName(_xxh3(bytes(typed)))


def block_names(packed_ids: bytes, root: BlockName, block_size: int = BLOCK_SIZE) -> list[BlockName]:
    """Names of the full blocks of a prompt given as u32le bytes (`router.wire.pack_ids`). 0.25 us a block."""
    view = memoryview(packed_ids)
    stride = block_size * _ID_BYTES
    parent: int = root
    names = [parent := _xxh3(view[end - stride : end], parent) for end in range(stride, len(packed_ids) + 1, stride)]
    return cast(list[BlockName], names)


def _chunk_ends() -> Iterator[int]:
    end = 0
    for power in count():
        for _ in range(_SMALLEST_CHUNKS if power == 0 else _SMALLEST_CHUNKS // 2):
            end += CHUNK_BYTES << power
            yield end


CHUNK_ENDS: Final = tuple(takewhile(lambda end: end <= _MOST_TEXT_BYTES, _chunk_ends()))
"""Bytes of text up to the end of its first, second, ... chunk."""
_CHUNKS: Final = tuple(map(slice, (0, *CHUNK_ENDS), CHUNK_ENDS))


def chunk_names(text: bytes, root: BlockName) -> list[BlockName]:
    """Names of the full chunks of a text, for replicas whose tokens are unknown. 0.12 us a chunk and little for its bytes."""
    view = memoryview(text)
    parent: int = root
    names = [parent := _xxh3(view[chunk], parent) for chunk in _CHUNKS[: bisect_right(CHUNK_ENDS, len(text))]]
    return cast(list[BlockName], names)


def matchable_chunks(num_bytes: int) -> int:
    """How many chunks of a text can be served from a cache (see `matchable_blocks`)."""
    return bisect_left(CHUNK_ENDS, num_bytes)


def matchable_blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """How many blocks of a prompt can be served from a cache: its last token must run to give logits."""
    return max(num_tokens - 1, 0) // block_size
