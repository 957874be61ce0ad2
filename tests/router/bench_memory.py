"""Whether memory stays where it is, and what an entry takes: unique prompts through a router whose index is long full.

    python -m tests.router.bench_memory              # a million prompts, about a minute of CPU; JSON
    python -m tests.router.bench_memory --prompts 30000

Bytes an entry are measured apart, by `tracemalloc`, right after the index has grown, when it is emptiest inside.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import tracemalloc
from pathlib import Path

import click

from router import BlockName, Decision, Outcome, Query, Router, RoutingSettings
from router.index import ENTRY_BYTES, Index
from router.text_index import TextIndex
from tests.router.fleets import MODEL, foreign_fleet

BLOCKS = 8
"""Of a prompt, none of them shared: 2 KB of text."""


def names_of(number: int, blocks: int = BLOCKS) -> list[BlockName]:
    """As good as hashes: odd multiples of the golden ratio's bits."""
    return [BlockName((number * blocks + place) * 0x9E3779B97F4A7C15 & (2**64 - 1)) for place in range(blocks)]


def send_unique(router: Router, first: int, count: int) -> None:
    for number in range(first, first + count):
        query = Query(model=MODEL, names=names_of(number), num_tokens=512, num_bytes=2048)
        decision = router.route(query, float(number), (number * 0.618) % 1)
        assert isinstance(decision, Decision)
        reservation = router.begin(decision, query, "x", float(number))
        router.answered(reservation, number + 0.1)
        router.finish(reservation, number + 0.2, Outcome.OK, 0, 512)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def entry_bytes(count: int, *, events: bool) -> float:
    """What one of so many entries of one replica takes, by events or by what was sent."""
    gc.collect()
    tracemalloc.start()
    index = Index()
    holding = index.join()
    for number in range(count // BLOCKS):
        if events:
            index.store(holding, names_of(number))
        else:
            index.expect(holding, names_of(number), float(number), count)
    used = tracemalloc.get_traced_memory()[0] / (count // BLOCKS * BLOCKS)
    tracemalloc.stop()
    return used


def text_entry_bytes(prompts: int, blocks: int) -> float:
    """What one entry takes, as the index of texts counts them, of so many prompts that share nothing."""
    gc.collect()
    tracemalloc.start()
    index = TextIndex(None, range(1, blocks + 1))
    holding = index.join()
    for number in range(prompts):
        index.expect(holding, names_of(number, blocks), float(number), prompts * blocks)
    used = tracemalloc.get_traced_memory()[0] / index.room.used
    tracemalloc.stop()
    return used


def flatness(prompts: int, index_bytes: int) -> dict[str, float]:
    """Resident memory after a first part of the prompts, when the index is full, and at the end."""
    router = foreign_fleet(8, RoutingSettings(index_bytes=index_bytes, learned_tokens=1 << 30, learned_ttl_s=1e9))
    first = max(prompts // 5, 3 * index_bytes // ENTRY_BYTES // BLOCKS)
    send_unique(router, 0, first)
    full = resident_bytes()
    send_unique(router, first, prompts)
    entries = sum(view.expected_blocks for view in router.replicas())
    return {"prompts": prompts, "full_mb": full / 1e6, "end_mb": resident_bytes() / 1e6, "entries": entries}


@click.command()
@click.option("--prompts", default=1_000_000, show_default=True)
@click.option("--index-bytes", default=64 << 20, show_default=True)
def main(prompts: int, index_bytes: int) -> None:
    # 700,000 names: just past a doubling of every part of the index.
    sizes = [87_400, 180_000, 700_000]
    found = {
        "entry_bytes_expected": max(entry_bytes(count, events=False) for count in sizes),
        "entry_bytes_text": max(text_entry_bytes(count // 2, 1) for count in sizes),
        "entry_bytes_confirmed": max(entry_bytes(count, events=True) for count in sizes),
        "limit_entry_bytes": ENTRY_BYTES,
        **flatness(prompts, index_bytes),
    }
    print(json.dumps(found, indent=2))
    too_much = max(size for name, size in found.items() if name.startswith("entry_bytes")) > ENTRY_BYTES
    sys.exit(too_much or found["end_mb"] > 1.02 * found["full_mb"])


if __name__ == "__main__":
    main()
