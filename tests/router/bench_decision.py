"""What a decision costs: from a list of ids to one of 64 replicas.

    python -m tests.router.bench_decision            # JSON; CPU time, the median of many

*new*: never seen, so ids are packed, every block is hashed and nobody holds the first. *known*: names are kept from an earlier
turn (as the segment cache keeps them), and only a last question of 256 tokens is packed and hashed; four replicas hold all of
the rest and four a part. *scattered*: the same, with a different part on every replica, which is the worst there can be. All
end with the decision, that is one match for the fleet and the seconds of 64 replicas.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from router import Query, Router, block_names
from router.wire import pack_ids
from tests.router.fleets import MODEL, ROOT, batch, decide, own_fleet, tokens

REPLICAS = 64
QUESTION_TOKENS = 256
LIMIT_MS = {"new 8k": 0.3, "new 128k": 4.5, "known 8k": 0.1, "known 128k": 0.5}


def filled_fleet(prompts: list[list[int]], whole: int, part: int) -> Router:
    """So many replicas hold all of each prompt, and so many a part."""
    router = own_fleet(REPLICAS, capacity=40_000)
    draw = random.Random(1)
    for number in range(whole + part):
        for seq, ids in enumerate(prompts, 1):
            names = block_names(pack_ids(ids), ROOT)
            depth = len(names) if number < whole else draw.randrange(len(names))
            router.apply(f"r{number}", batch(seq, names[:depth]), 0.0)
    return router


def decide_new(router: Router, ids: list[int]) -> None:
    decide(router, Query(model=MODEL, names=block_names(pack_ids(ids), ROOT), num_tokens=len(ids)))


def decide_known(router: Router, ids: list[int], known: list[int]) -> None:
    question = ids[len(known) * 16 :]
    names = [*known, *block_names(pack_ids(question), known[-1])]  # type: ignore[arg-type]
    decide(router, Query(model=MODEL, names=names, num_tokens=len(ids)))  # type: ignore[arg-type]


def median_ms(work: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return 1000 * statistics.median(times)


def measure(repeats: int = 100) -> dict[str, float]:
    sizes = {"8k": 8_000, "128k": 128_000}
    prompts = {size: tokens(number, count) for number, (size, count) in enumerate(sizes.items())}
    seen = [ids[:-QUESTION_TOKENS] for ids in prompts.values()]
    fleets = {"known": filled_fleet(seen, 4, 4), "scattered": filled_fleet(seen, 0, REPLICAS)}
    found = {}
    for size, ids in prompts.items():
        new = tokens(7, len(ids))
        found[f"new {size}"] = median_ms(partial(decide_new, fleets["known"], new), repeats)
        names: list[int] = list(block_names(pack_ids(ids[:-QUESTION_TOKENS]), ROOT))
        for kind, fleet in fleets.items():
            found[f"{kind} {size}"] = median_ms(partial(decide_known, fleet, ids, names), repeats)
    return found


def main() -> None:
    found = measure()
    report = {
        "python": sys.version.split()[0],
        "replicas": REPLICAS,
        "cpu_ms": {name: round(found[name], 3) for name in found},
        "limit_ms": LIMIT_MS,
    }
    print(json.dumps(report, indent=2))
    sys.exit(any(found[name] > limit for name, limit in LIMIT_MS.items()))


if __name__ == "__main__":
    main()
