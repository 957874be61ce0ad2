"""Token ids → block names: the one definition that gateway and worker share.

A block is `BLOCK_SIZE` tokens. Its name is XXH3-64 of its little-endian u32 ids, seeded with its parent's name; so a name
stands for a whole prefix, and the names of a prompt can be compared position by position. The first block's parent is the
*root*, a hash of what else must be equal for KV to be reusable: model, revision, adapter and salt.

XXH3 is not proof against an attacker who looks for collisions. A name is a hint for routing; the engine compares ids
(`workers.block_pool`), so a collision costs time and never correctness.
"""

from __future__ import annotations

from typing import Final, NewType

import xxhash

__all__ = ["BLOCK_SIZE", "CHUNK_BYTES", "BlockName", "block_names", "chunk_names", "matchable_blocks", "root_name"]

BlockName = NewType("BlockName", int)

BLOCK_SIZE: Final = 16
"""Tokens in a block. vLLM's choice on GPUs: kernels want tiles of 16, and a hit loses (16 - 1) / 2 tokens on average."""

CHUNK_BYTES: Final = 256
"""Bytes of text in a chunk, the unit of the key space for replicas without a tokenizer: about 64 tokens."""

_ID_BYTES: Final = 4

_xxh3 = xxhash.xxh3_64_intdigest


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
    """Names of the full blocks of a prompt given as u32le bytes (`router.wire.pack_ids`). 0.19 us a block."""
    return _chain(packed_ids, root, block_size * _ID_BYTES)


def chunk_names(text: bytes, root: BlockName) -> list[BlockName]:
    """Names of the full chunks of a text, for replicas whose tokens are unknown."""
    return _chain(text, root, CHUNK_BYTES)


def matchable_blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """How many blocks of a prompt can be served from a cache: its last token must run to give logits."""
    return max(num_tokens - 1, 0) // block_size


def _chain(data: bytes, parent: int, stride: int) -> list[BlockName]:
    names: list[BlockName] = []
    append = names.append
    view = memoryview(data)
    for end in range(stride, len(data) + 1, stride):
        parent = _xxh3(view[end - stride : end], parent)
        append(BlockName(parent))
    return names
