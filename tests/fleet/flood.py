"""A tenant that asks for ten times its share beside one that asks for less than its own.

    python -m tests.fleet.flood      # the quiet tenant alone, and beside the flood with and without the queue

In virtual time, as `tests.fleet.virtual_time`. The flood is prompts that nobody has seen, so nothing of it is served from a
cache; half of what eight simulated replicas compute is a share.
"""

from __future__ import annotations

import random
from typing import Final

import click

from loadtest.workloads import Request, Workload, make_workload
from router import GateSettings, RoutingSettings
from tests.fleet.virtual_time import REPLICAS, Figures, VirtualFleet

FLOOD: Final = "flood"
QUIET: Final = "quiet"
_FLOOD_PROMPT_TOKENS: Final = 2000
_PREFILL_TOK_S: Final = 1000 / (0.035 + 20 / _FLOOD_PROMPT_TOKENS)
"""Of a simulated replica with such prompts."""
_SHARE_TOK_S: Final = REPLICAS * _PREFILL_TOK_S / 2


def quiet(limit: int) -> Workload:
    """The trace at half its usual load: a quarter of what the fleet can do on average, more in its bursts."""
    return make_workload("trace", load=0.5, seed=1, limit=limit)


def flooded(workload: Workload, times_its_share: float = 10.0) -> Workload:
    """The same, and a flood from its first to its last request."""
    draw = random.Random(1)
    rate = times_its_share * _SHARE_TOK_S / _FLOOD_PROMPT_TOKENS
    requests = list(workload.requests)
    now, end = 0.0, requests[-1].at_s
    while (now := now + draw.expovariate(rate)) < end:
        prompt = draw.randbytes(2 * _FLOOD_PROMPT_TOKENS).hex()
        requests.append(Request(now, prompt, max_tokens=20, session=FLOOD))
    return Workload(tuple(sorted(requests, key=lambda request: request.at_s)), workload.kv_tokens)


def tenant_of(request: Request) -> str:
    return FLOOD if request.session == FLOOD else QUIET


def ttft_of_quiet(workload: Workload, queue: GateSettings | None) -> Figures:
    fleet = VirtualFleet(workload, RoutingSettings(), queue=queue, tenant_of=tenant_of)
    fleet.run()
    return fleet.figures(QUIET)


@click.command()
@click.option("--limit", default=150, show_default=True, help="Requests of the quiet tenant.")
@click.option("--times", default=10.0, show_default=True, help="Of its share that the other one asks for.")
@click.option("--ahead-s", default=GateSettings().ahead_s, show_default=True)
def main(limit: int, times: float, ahead_s: float) -> None:
    """Compare the TTFT of a tenant with and without a neighbour that floods. Without a queue it takes minutes."""
    alone, queue = quiet(limit), GateSettings(ahead_s=ahead_s)
    crowded = flooded(alone, times)
    runs = (("alone", alone, queue), ("flooded", crowded, queue), ("flooded, no queue", crowded, None))
    for name, workload, settings in runs:
        found = ttft_of_quiet(workload, settings)
        click.echo(
            f"{name:17} TTFT of the quiet tenant p50 {found.ttft_p50:,.0f} p90 {found.ttft_p90:,.0f} mean "
            f"{found.ttft_mean:,.0f} ms  refused {found.dropped}  most queued {found.most_queued}"
        )


if __name__ == "__main__":
    main()
