"""A tenant that asks for ten times its share, beside one that asks for half of its own.

    python -m tests.fleet.flood --seeds 3      # the quiet tenant alone, and beside the flood

In virtual time, as `tests.fleet.virtual_time`. Both ask the same kind of prompts: the quiet tenant the trace at half its usual
pace, seed after seed another part of it; the flood other texts of the same lengths and shared prefixes, in a Poisson stream.
The usual pace of the trace is a share: it keeps the fleet half busy. The flood begins when the quiet tenant is at work, and
only what is asked from then on counts, in both runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import click

from loadtest.workloads import Request, Workload, make_workload
from router import GateSettings, RoutingSettings
from tests.fleet.virtual_time import Figures, VirtualFleet

FLOOD: Final = "flood"
QUIET: Final = "quiet"
FLOOD_FROM_S: Final = 5.0
_QUIET_SHARE: Final = 0.5
_FLOOD_SHARE: Final = 10.0


def quiet(seed: int, limit: int) -> Workload:
    made = make_workload("trace", load=_QUIET_SHARE, seed=seed)
    first = (seed - 1) * limit % (len(made.requests) - limit + 1)
    requests = made.requests[first : first + limit]
    return Workload(
        tuple(replace(request, at_s=request.at_s - requests[0].at_s, session=QUIET) for request in requests),
        made.kv_tokens,
    )


def flooded(workload: Workload, seed: int) -> Workload:
    """The same, and a flood until its last request."""
    flood = _flood(seed, workload.requests[-1].at_s)
    both = sorted([*workload.requests, *flood], key=lambda request: request.at_s)
    return Workload(tuple(both), workload.kv_tokens)


def _flood(seed: int, until_s: float) -> Iterator[Request]:
    draw, now = random.Random(seed), FLOOD_FROM_S
    for texts in range(1, 1000):
        requests = make_workload("trace", load=_FLOOD_SHARE, seed=1000 * seed + texts).requests
        rate = len(requests) / requests[-1].at_s
        for request in requests:
            now += draw.expovariate(rate)
            if now >= until_s:
                return
            yield replace(request, at_s=now, session=FLOOD)


def tenant_of(request: Request) -> str:
    return request.session


def ttft_of_quiet(workload: Workload, seed: int, *, priorities: bool = True) -> Figures:
    settings, queue = RoutingSettings(), GateSettings()
    fleet = VirtualFleet(workload, settings, seed=seed, queue=queue, tenant_of=tenant_of, priorities=priorities)
    fleet.run(until=QUIET)
    return fleet.figures(QUIET, after_s=FLOOD_FROM_S)


@click.command()
@click.option("--limit", default=250, show_default=True, help="Requests of the quiet tenant.")
@click.option("--seeds", default=1, show_default=True, help="How many to run with.")
@click.option("--seed", default=1, show_default=True, help="The first of them.")
def main(limit: int, seeds: int, seed: int) -> None:
    """Compare the TTFT of a tenant with and without a neighbour that floods. Two minutes a seed."""
    for each in range(seed, seed + seeds):
        alone = quiet(each, limit)
        crowded = flooded(alone, each)
        runs = (("alone", alone, True), ("flooded", crowded, True), ("flooded, no priorities", crowded, False))
        for name, workload, priorities in runs:
            found = ttft_of_quiet(workload, each, priorities=priorities)
            click.echo(
                f"seed {each} {name:22} TTFT of the quiet tenant p50 {found.ttft_p50:,.0f} p90 {found.ttft_p90:,.0f} "
                f"mean {found.ttft_mean:,.0f} ms  refused {found.dropped}  most queued {found.most_queued}"
            )


if __name__ == "__main__":
    main()
