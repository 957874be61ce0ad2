"""Paged KV bookkeeping: which physical block holds what, who uses it, what is dropped first.

Knows block numbers and token ids, never tensors. A block is *free* (no content), *cached* (content, no user) or *used*.

Operations and their cost, per block:
- `match`   one dict lookup; looks only
- `acquire`, `release`, `allocate`   O(1): the order of eviction is an ordered dict, unlinked in O(1)
- `seal`    one hash and one dict entry, when a forward pass has filled the block

What must hold:
- free + cached + used = all.
- The lookup key is exact: the identity of the parent and the ids themselves. An identity is a number given once, so a
  block that was dropped and filled anew is never taken for the parent it was before. Names (`router.blocks`) only go
  out to routers; two blocks whose names collide stay two blocks.
- A readable block's parent is readable. Who holds a block holds its whole prefix, and a prefix is released from its
  tail, so a child always stands before its parent in the order of eviction.
- Equal content exists once: who fills a block that is readable already gets that one and gives its own back.
- Content outlives its last user until the block is allocated again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from router.blocks import BlockName, block_names
from workers.protocol import StoredRun

__all__ = ["Block", "BlockKey", "BlockPool", "Delta", "Identity", "Root"]

Identity = int | str
"""Of a block: a number never given twice. Of a root: the salt itself, so roots need no table that could grow."""

BlockKey = tuple[Identity, bytes]
"""Identity of the parent and the ids of the block as u32le bytes."""

_NO_NAME: Final = BlockName(0)


class Root(NamedTuple):
    """What the first block of a prompt has as its parent."""

    identity: Identity
    name: BlockName


@dataclass(slots=True, eq=False)
class Block:
    """One physical block. Only the pool writes to it."""

    index: int
    users: int = 0
    key: BlockKey | None = None
    """None: nothing in it may be read by another sequence."""
    identity: int = 0
    name: BlockName = _NO_NAME
    parent_name: BlockName = _NO_NAME


class Delta(NamedTuple):
    """How the set of readable names changed; `removed` applies before `stored`. No name is in both."""

    stored: list[StoredRun]
    removed: list[int]


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        root_name: Callable[[str], BlockName],
        block_names: Callable[[bytes, BlockName, int], list[BlockName]] = block_names,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._block_bytes = 4 * block_size
        self._root_name = root_name
        self._block_names = block_names
        self._num_made = 0  # blocks are made when first needed: an idle replica of 65,000 blocks costs nothing
        self._empty: list[Block] = []
        self._cached: OrderedDict[Block, None] = OrderedDict()  # next to be dropped first
        self._readable: dict[BlockKey, Block] = {}
        self._names: dict[BlockName, int] = {}  # how many readable blocks share a name: more than one is a collision
        self._last_identity = 0
        self._stored: dict[BlockName, BlockName] = {}  # name → parent's name, since the last take_delta
        self._removed: dict[BlockName, None] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._num_made + len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_made - len(self._empty) - len(self._cached)

    @property
    def num_available(self) -> int:
        """What `allocate` can give: the cache is free memory that happens to be useful."""
        return self.num_free + self.num_cached

    def root(self, salt: str) -> Root:
        return Root(salt, self._root_name(salt))

    def match(self, root: Root, ids: bytes) -> list[Block]:
        """The longest readable prefix of `ids` (u32le), in whole blocks."""
        found: list[Block] = []
        parent = root.identity
        stride = self._block_bytes
        for end in range(stride, len(ids) + 1, stride):
            block = self._readable.get((parent, ids[end - stride : end]))
            if block is None:
                break
            found.append(block)
            parent = block.identity
        return found

    def acquire(self, blocks: Sequence[Block]) -> None:
        """One more user for each of these readable blocks."""
        for block in blocks:
            if block.users == 0:
                del self._cached[block]
            block.users += 1

    def allocate(self, count: int) -> list[Block]:
        """`count` private blocks; at most `num_available`. Drops the content of the longest unused ones if need be."""
        assert count <= self.num_available, "allocate is only called for what is available"
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            block.users = 1
        return blocks

    def release(self, blocks: Sequence[Block]) -> None:
        """One user less for each block of a prefix, given in the order of the prompt."""
        for block in reversed(blocks):
            assert block.users > 0, "a block is released once per acquisition"
            block.users -= 1
            if block.users == 0:
                if block.key is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def seal(self, block: Block, parent: Root | Block, ids: bytes) -> Block:
        """A forward pass has filled `block` with `ids` after `parent`: make it readable.

        Returns the block to use from now on: another one when this content was readable already.
        """
        key = (parent.identity, ids)
        twin = self._readable.get(key)
        if twin is not None:
            self.acquire([twin])
            self.release([block])
            return twin
        self._last_identity += 1
        block.key = key
        block.identity = self._last_identity
        block.name = self._block_names(ids, parent.name, self.block_size)[0]
        block.parent_name = parent.name
        self._readable[key] = block
        self._announce(block)
        return block

    def take_delta(self) -> Delta:
        """What changed since the last call."""
        delta = Delta(_runs(self._stored), list(self._removed))
        self._stored = {}
        self._removed = {}
        return delta

    def snapshot(self) -> list[StoredRun]:
        """All readable names, parents first: a parent was sealed before its child, so identities are in order."""
        runs: dict[Identity, StoredRun] = {}  # by the identity of the run's last block
        started: list[StoredRun] = []
        for (parent, _), block in sorted(self._readable.items(), key=lambda item: item[1].identity):
            run = runs.pop(parent, None)
            if run is None:
                run = StoredRun(block.parent_name, [])
                started.append(run)
            run.names.append(block.name)
            runs[block.identity] = run
        return started

    def _take(self) -> Block:
        if self._empty:
            return self._empty.pop()
        if self._num_made < self.num_blocks:
            self._num_made += 1
            return Block(self._num_made - 1)
        block, _ = self._cached.popitem(last=False)
        self._drop_content(block)
        return block

    def _drop_content(self, block: Block) -> None:
        assert block.key is not None
        del self._readable[block.key]
        block.key = None
        sharing = self._names[block.name] - 1
        if sharing:
            self._names[block.name] = sharing
            return
        del self._names[block.name]
        if self._stored.pop(block.name, None) is None:
            self._removed[block.name] = None

    def _announce(self, block: Block) -> None:
        sharing = self._names.get(block.name, 0)
        self._names[block.name] = sharing + 1
        if sharing:
            return
        if block.name in self._removed:
            del self._removed[block.name]
        else:
            self._stored[block.name] = block.parent_name


def _runs(stored: dict[BlockName, BlockName]) -> list[StoredRun]:
    """Join names that follow each other; a prefix is sealed in order, so most of a step is one run a sequence."""
    runs: list[StoredRun] = []
    last: BlockName | None = None
    for name, parent in stored.items():
        if parent == last:
            runs[-1].names.append(name)
        else:
            runs.append(StoredRun(parent, [name]))
        last = name
    return runs
