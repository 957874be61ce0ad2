"""What to send, and when: prompts as text with arrival times, made from a seed or read from a trace.

Times are those of the simulated world, so a run at five times its speed sends five times as fast. Prompts are ASCII, and
simulated replicas count four bytes as one token, so lengths here are exact. They are text completions: a chat template would
add tokens that nobody outside could count.

    shared    64 groups × 5 prompts, 6,000 tokens of the group and 1,200 of their own; sent once, then drawn at random
    chats     talks that grow: each prompt is the one before, an answer and a new question
    trace     the Mooncake conversation trace, its first 1,000 requests or all: real arrivals, lengths and shared prefixes
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.trace import TraceRow, TraceUnreadable, read_trace

__all__ = [
    "BLOCK_TOKENS",
    "SHARED_RATES",
    "WORKLOADS",
    "Request",
    "TraceUnreadable",
    "Workload",
    "ideal_cached_tokens",
    "make_text",
    "make_workload",
    "shared_prompts",
]

TOKEN_BYTES: Final = 4
BLOCK_TOKENS: Final = 16

WORKLOADS: Final = ("shared", "chats", "trace")

_GROUPS, _PROMPTS, _GROUP_TOKENS, _OWN_TOKENS, _SHARED_OUTPUT = 64, 5, 6000, 1200, 100
SHARED_RATES: Final = (20.0, 40.0, 60.0)
"""Requests a second, one after the other, as the benchmark sends them."""
_SHARED_S: Final = 20.0
"""At each rate."""
_WARM_RATE: Final = 20.0

_CHAT_RATE: Final = 2.0
"""Talks that begin in a second."""
_CHAT_S: Final = 60.0
_CHAT_TURNS: Final = 8
_CHAT_GAP_S: Final = 8.0
"""Mean time from a prompt to the next one of its talk: the answer, reading it, and typing."""
_SYSTEM_TOKENS, _TURN_TOKENS, _CHAT_OUTPUT = 320, (64, 1200), 150

_TRACE_PACE: Final = 4.0
"""Times the recorded pace: what keeps 8 replicas of the simulated kind half busy."""
_TRACE_BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    prompt: str
    max_tokens: int
    warm: bool = False
    """Sent to fill caches, and not counted."""
    session: str = ""
    """The conversation it belongs to, for routers that pin those: sent as the header x-session-id."""
    step: str = ""
    """The part of the load that it is reported with."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Workload:
    requests: tuple[Request, ...]
    """In order of arrival."""
    kv_tokens: int
    """What each replica can hold: so much that placing matters."""


def make_workload(
    name: str,
    *,
    load: float,
    seed: int,
    limit: int | None = None,
    rates: Sequence[float] = SHARED_RATES[-1:],
    trace: Path | None = None,
) -> Workload:
    """`load`: times the usual rate of arrivals. `limit`: at most so many requests. `rates`: of `shared`, one after the other.
    `trace`: another file than the one that is here. Raises TraceUnreadable.
    """
    draw = random.Random(seed)
    if name == "shared":
        requests, kv_tokens = _shared(draw, [rate * load for rate in rates]), 131_072
    elif name == "chats":
        requests, kv_tokens = _chats(draw, load), 131_072
    else:
        requests, kv_tokens = _trace(read_trace(trace), load, seed), 1 << 20
    ordered = sorted(requests, key=lambda request: request.at_s)
    return Workload(tuple(ordered[:limit]), kv_tokens)


def ideal_cached_tokens(requests: Iterable[Request]) -> list[int]:
    """For each, what a single cache without end would have of it, had all before it been computed."""
    known: set[int] = set()
    found = []
    for request in requests:
        names = list(_block_names(request.prompt))
        count = 0
        while count < len(names) and names[count] in known:
            count += 1
        known.update(names)
        matchable = (request.prompt_tokens - 1) // BLOCK_TOKENS  # the last token is always computed
        found.append(min(count, matchable) * BLOCK_TOKENS)
    return found


def _block_names(prompt: str) -> Iterator[int]:
    name, size = 0, BLOCK_TOKENS * TOKEN_BYTES
    for start in range(0, len(prompt) - size + 1, size):
        name = hash((name, prompt[start : start + size]))
        yield name


def make_text(draw: random.Random, tokens: int) -> str:
    """So many tokens of a simulated replica, that nobody has seen before."""
    return draw.randbytes(tokens * TOKEN_BYTES // 2).hex()


def _arrivals(draw: random.Random, rate: float, start_s: float, length_s: float) -> Iterator[float]:
    now = start_s + draw.expovariate(rate)
    while now < start_s + length_s:
        yield now
        now += draw.expovariate(rate)


def shared_prompts(draw: random.Random, scale: float = 1.0) -> list[tuple[str, str]]:
    """(group, prompt) in random order. `scale`: of their lengths."""
    groups = [make_text(draw, int(_GROUP_TOKENS * scale)) for _ in range(_GROUPS)]
    own_tokens = int(_OWN_TOKENS * scale)
    prompts = [
        (str(number), group + make_text(draw, own_tokens))
        for number, group in enumerate(groups)
        for _ in range(_PROMPTS)
    ]
    draw.shuffle(prompts)
    return prompts


def _shared(draw: random.Random, rates: Sequence[float]) -> Iterator[Request]:
    prompts = shared_prompts(draw)
    for number, (group, prompt) in enumerate(prompts):
        yield Request(number / _WARM_RATE, prompt, _SHARED_OUTPUT, warm=True, session=group)
    start_s = len(prompts) / _WARM_RATE + 2 * _SHARED_OUTPUT * 0.05  # the last of them have ended
    for number, rate in enumerate(rates):
        for at_s in _arrivals(draw, rate, start_s + number * _SHARED_S, _SHARED_S):
            group, prompt = draw.choice(prompts)
            yield Request(at_s, prompt, _SHARED_OUTPUT, session=group, step=f"{rate:g}/s")


def _chats(draw: random.Random, load: float) -> Iterator[Request]:
    system = make_text(draw, _SYSTEM_TOKENS)
    for number, begin_s in enumerate(_arrivals(draw, _CHAT_RATE * load, 0.0, _CHAT_S)):
        prompt, at_s = system, begin_s
        for _ in range(_CHAT_TURNS):
            prompt += make_text(draw, draw.randint(*_TURN_TOKENS))
            yield Request(at_s, prompt, _CHAT_OUTPUT, session=str(number))
            prompt += make_text(draw, _CHAT_OUTPUT)
            at_s += _CHAT_GAP_S / 2 + draw.expovariate(2 / _CHAT_GAP_S)


def _trace(rows: Iterable[TraceRow], load: float, seed: int) -> Iterator[Request]:
    texts: dict[int, str] = {}
    for row in rows:
        for number in row.hash_ids:
            if number not in texts:
                texts[number] = make_text(random.Random(f"{seed} {number}"), _TRACE_BLOCK_TOKENS)
        prompt = "".join(texts[number] for number in row.hash_ids)[: row.input_length * TOKEN_BYTES]
        # All prompts share the first block, and those that share the second belong together.
        session = str(row.hash_ids[:2][-1])
        yield Request(row.timestamp / 1000 / _TRACE_PACE / load, prompt, row.output_length, session=session)
