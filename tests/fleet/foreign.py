"""A foreign replica in virtual time: text in, usage and a time to first byte out; nothing else of it can be known.

Its cache is a plain LRU of the prompt's pieces, its clock the test's. It computes one prompt after the other.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

from router import Decision, Outcome, Query, Reservation, Router, RoutingSettings, chunk_names, root_name
from router.wire import ReplicaSpec

PIECE_TOKENS = 16


@dataclass
class ForeignReplica:
    """What is true of it, and to be found out."""

    bytes_per_token: float = 4.0
    tok_s: float = 8000.0
    fixed_s: float = 0.02
    kv_tokens: int = 100_000
    reports_cached: bool = True
    jitter: float = 0.0
    """Of its times, relative."""
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    _held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def tokens(self, prompt: bytes) -> int:
        return max(round(len(prompt) / self.bytes_per_token), 1)

    def compute(self, prompt: bytes) -> tuple[float, int]:
        """Seconds to its first byte, and the tokens that were cached."""
        pieces = self._pieces(prompt)
        hit = 0
        while hit < len(pieces) and pieces[hit] in self._held:
            hit += 1
        for piece in reversed(pieces):  # an engine frees a sequence tail first
            self._held[piece] = None
            self._held.move_to_end(piece)
        while len(self._held) * PIECE_TOKENS > self.kv_tokens:
            self._held.popitem(last=False)
        cached = min(hit * PIECE_TOKENS, self.tokens(prompt) - 1)
        seconds = self.fixed_s + (self.tokens(prompt) - cached) / self.tok_s
        return seconds * (1 + self.jitter * self.draw.uniform(-1, 1)), cached

    def _pieces(self, prompt: bytes) -> list[bytes]:
        size = PIECE_TOKENS * self.bytes_per_token
        # The first bytes of a prompt tell it from others here; a piece is known by them and its place.
        return [prompt[:32] + b"%d" % place for place in range(int(len(prompt) / size))]


class ForeignFleet:
    """One router over one such replica, asked one prompt after the other."""

    def __init__(self, replica: ForeignReplica, settings: RoutingSettings) -> None:
        self.router = Router(settings)
        self.replica = replica
        self.now = 0.0
        self._root = root_name(model="m")
        self.router.add("r", ReplicaSpec(url="http://h", model="m", kind="openai"), 0.0)
        self.router.set_health("r", True, 0.0)

    def query(self, prompt: bytes) -> Query:
        pool = self.router.pool("m")
        assert pool is not None
        tokens = int(len(prompt) / pool.bytes_per_token) + 1
        return Query(model="m", names=chunk_names(prompt, self._root), num_tokens=tokens, num_bytes=len(prompt))

    def begin(self, prompt: bytes) -> Reservation:
        query = self.query(prompt)
        decision = self.router.route(query, self.now, 0.0)
        assert isinstance(decision, Decision)
        return self.router.begin(decision, query, "x", self.now)

    def ask(self, prompt: bytes) -> None:
        reservation = self.begin(prompt)
        seconds, cached = self.replica.compute(prompt)
        self.now += seconds
        self.router.answered(reservation, self.now)
        reported = cached if self.replica.reports_cached else None
        self.router.finish(reservation, self.now, Outcome.OK, reported, self.replica.tokens(prompt))


def prompt_of(number: int, num_bytes: int) -> bytes:
    """A prompt that shares nothing with one of another number."""
    head = b"%032d" % number
    return (head + b"%d abcdefgh" % number * (num_bytes // 8))[:num_bytes]
