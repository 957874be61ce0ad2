"""The index's memory: what an entry takes, that the bound is exact, and what goes when it is reached."""

from __future__ import annotations

import math
import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import Query, RoutingSettings, chunk_names
from router.index import ENTRY_BYTES
from router.text_index import RUN_ENTRIES
from tests.router.bench_memory import BLOCKS, entry_bytes, send_unique, text_entry_bytes
from tests.router.fleets import ROOT, decide, foreign_fleet


@pytest.mark.parametrize("events", [True, False])
def test_an_entry_takes_no_more_than_is_reckoned_with(events: bool) -> None:
    """Just past a doubling of every dict, when they are emptiest inside. `bench_memory` does it with more."""
    assert entry_bytes(87_400, events=events) <= ENTRY_BYTES


@pytest.mark.parametrize("blocks", [1, 2, 8, 64])
def test_prompts_of_text_take_no_more_than_is_reckoned_with(blocks: int) -> None:
    assert text_entry_bytes(87_400 // blocks, blocks) <= ENTRY_BYTES


def test_prompts_without_end_take_no_more_memory_once_the_index_is_full() -> None:
    """`bench_memory` does it with a million and looks at the whole process."""
    limit = 3_000
    router = foreign_fleet(4, RoutingSettings(index_bytes=limit * ENTRY_BYTES, learned_ttl_s=1e9))
    tracemalloc.start()
    send_unique(router, 0, 2 * limit // BLOCKS)
    full = tracemalloc.get_traced_memory()[0]

    send_unique(router, 2 * limit // BLOCKS, 6 * limit // BLOCKS)

    at_the_end = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    held = sum(view.expected_blocks for view in router.replicas())
    assert held + RUN_ENTRIES * math.ceil(held / BLOCKS) == limit
    assert at_the_end < 1.05 * full


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_what_was_used_least_recently_anywhere_goes_first(sent: list[tuple[int, int]]) -> None:
    """Against a plain list of (replica, prompt) in order of use. Prompts of 4 blocks that share nothing."""
    router = foreign_fleet(3, RoutingSettings(index_bytes=5 * (4 + RUN_ENTRIES) * ENTRY_BYTES, learned_ttl_s=1e9))
    others = {number: [f"r{other}" for other in range(3) if other != number] for number in range(3)}
    model: OrderedDict[tuple[int, int], None] = OrderedDict()
    for now, (replica, prompt) in enumerate(sent):
        names = chunk_names(b"%04d" % prompt * 256, ROOT)
        asked = Query(model="m", names=names, num_tokens=257, num_bytes=1024, exclude=frozenset(others[replica]))
        router.begin(decide(router, asked, float(now)), asked, "x", float(now))
        model[replica, prompt] = None
        model.move_to_end((replica, prompt))
        while len(model) > 5:
            model.popitem(last=False)

    held = {
        (replica, prompt)
        for replica in range(3)
        for prompt in range(10)
        if router._pools["m"]
        .index.match(chunk_names(b"%04d" % prompt * 256, ROOT))
        .get(router._replicas[f"r{replica}"].holding.slot)
    }
    assert held == set(model)
