"""Requests through the whole engine (scheduler, block pool, torch runner), under conditions that must not change an answer.

A `Replica` runs a list of requests to their ends and gives back all that the engine told of each. Its runner keeps the memory
of earlier runs, so a read of what nobody wrote in this one finds plausible garbage instead of zeros. While it runs, every
step is checked: rows read only positions that hold exactly their own prefix under their own salt, nobody writes into
what another one reads, and the pool's counts add up.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import torch
import xxhash

from router.blocks import BlockName
from router.wire import pack_ids
from workers.engine import Engine, RowResult, Runner, ScheduledSeq
from workers.protocol import EngineInfo, FinishReason, Sampling, Submit, TokenLogprob

__all__ = ["CASES", "Answer", "Conditions", "Replica", "Request"]

STEPS_AT_MOST: Final = 20_000

CASES: Counter[tuple[str, str]] = Counter()
"""(property, path) → answers compared."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Sequence[int]
    sampling: Sampling
    salt: str = ""
    resume: Sequence[int] = ()
    arrives: int = 0
    """The step before which it is submitted."""
    leaves: int | None = None
    """The step before which its client goes away, if it does."""

    def choice(self, number: int) -> Request:
        return replace(self, sampling=msgspec.structs.replace(self.sampling, choice=number))


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = field(default=0, compare=False)

    def after(self, count: int) -> Answer:
        """What is left to say for one who resumes behind the first `count` ids."""
        return replace(self, ids=self.ids[count:], logprobs=self.logprobs[count:])


@dataclass(frozen=True, slots=True)
class Conditions:
    """What happens around a request. The defaults are the plainest."""

    token_budget: int = 2048
    num_blocks: int | None = None
    """None: all that there are."""
    threads: int = 1
    colliding: bool = False
    """All blocks have one name."""


@dataclass(slots=True)
class Replica:
    path: str
    """What runs, in a few words."""
    runner: Runner
    num_preemptions: int = 0
    """In all runs so far."""

    def run(self, requests: Sequence[Request], conditions: Conditions = Conditions()) -> list[Answer]:  # noqa: B008
        """All to their ends, over an empty cache."""
        info = self.runner.info
        watched = _Watched(
            self.runner,
            msgspec.structs.replace(
                info, num_blocks=conditions.num_blocks or info.num_blocks, max_num_seqs=len(requests) or 1
            ),
        )
        engine = Engine(watched, token_budget=conditions.token_budget)
        if conditions.colliding:
            engine._pool._block_names = _one_name
        threads = torch.get_num_threads()
        torch.set_num_threads(conditions.threads)
        try:
            return self._run(engine, watched, requests)
        finally:
            torch.set_num_threads(threads)

    def alone(self, request: Request) -> Answer:
        """In one chunk, on one thread, with nothing cached and nobody beside it."""
        return self.run([replace(request, arrives=0, leaves=None)])[0]

    def _run(self, engine: Engine, watched: _Watched, requests: Sequence[Request]) -> list[Answer]:
        answers = [Answer() for _ in requests]
        number = 0
        while number <= max(request.arrives for request in requests) or engine.has_work():
            for rid, request in enumerate(requests):
                if request.arrives == number:
                    watched.expect(rid, request)
                    engine.submit(
                        Submit(
                            rid=rid,
                            request_id=f"request-{rid}",
                            prompt=pack_ids(request.prompt),
                            resume=pack_ids(request.resume),
                            salt=request.salt,
                            sampling=request.sampling,
                        )
                    )
                if request.leaves == number:
                    engine.abort(rid)
            report = engine.step()
            assert report.kv_used_blocks == watched.blocks_in_use(engine)
            assert engine._pool.num_free + report.kv_cached_blocks + report.kv_used_blocks == engine.info.num_blocks
            for output in report.outputs:
                answer = answers[output.rid]
                assert answer.finish_reason is None
                answer.ids += output.ids
                answer.logprobs += output.logprobs
                answer.prompt_logprobs += output.prompt_logprobs
                answer.finish_reason = output.finish_reason
                answer.cached_tokens = output.cached_tokens
                watched.told(output.rid, output.ids)
            number += 1
            assert number < STEPS_AT_MOST, "the engine does not come to an end"
        assert engine.failed is None
        assert report.kv_used_blocks == 0
        self.num_preemptions += report.preemptions_total
        return answers


def _one_name(ids: bytes, parent: BlockName, block_size: int) -> list[BlockName]:
    return [BlockName(7)] * (len(ids) // (4 * block_size))


class _Watched:
    """The runner, with a shadow of its memory: for each place, a digest of the salt and of all ids up to the one there."""

    def __init__(self, runner: Runner, info: EngineInfo) -> None:
        self.info = info
        self._runner = runner
        self._ids: dict[int, array[int]] = {}
        self._digests: dict[int, list[int]] = {}
        self._shadow: dict[int, int] = {}

    def expect(self, rid: int, request: Request) -> None:
        self._ids[rid] = array("I")
        self._digests[rid] = [xxhash.xxh3_64_intdigest(request.salt.encode())]
        self.told(rid, [*request.prompt, *request.resume])

    def told(self, rid: int, ids: Collection[int]) -> None:
        """More of a sequence is known."""
        for token in ids:
            self._ids[rid].append(token)
            digest = xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), self._digests[rid][-1])
            self._digests[rid].append(digest)

    def blocks_in_use(self, engine: Engine) -> int:
        """Counted by the tables of who runs, not by the pool."""
        return len({index for seq in engine._scheduler._running for index in seq.table})

    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        size = self.info.block_size
        written: set[int] = set()
        for row in batch:
            ids, digests = self._ids[row.rid], self._digests[row.rid]
            end = row.start + len(row.tokens)
            assert list(row.tokens) == ids[row.start : end].tolist()
            places = [row.block_table[position // size] * size + position % size for position in range(end)]
            assert max(row.block_table) < self.info.num_blocks
            for place, digest in zip(places[row.start :], digests[row.start + 1 :], strict=False):
                self._shadow[place] = digest
            assert written.isdisjoint(places[row.start :]), "two rows write to the same place"
            written.update(places[row.start :])
        for row in batch:  # after all have written: so nobody wrote into what another one reads
            end = row.start + len(row.tokens)
            found = [
                self._shadow.get(row.block_table[position // size] * size + position % size) for position in range(end)
            ]
            assert found == self._digests[row.rid][1 : end + 1], "reads what is not its own prefix"
        return self._runner.step(batch)
