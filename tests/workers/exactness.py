"""Requests through the whole engine (scheduler, block pool, torch runner), under conditions that must not change an answer.

A `Replica` runs a list of requests to their ends and gives back all that the engine told of each. Its runner keeps the memory
of earlier runs, so a read of what nobody wrote in this one finds plausible garbage instead of zeros. While it runs, every
step is checked: rows read only positions that hold exactly their own prefix under their own salt, nobody writes into
what another one reads, and the pool's counts add up.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import msgspec
import pytest
import torch
import xxhash

from router.blocks import BlockName
from router.wire import pack_ids
from tests.workers.tiny_models import VOCAB
from workers.engine import Engine
from workers.grammar import GrammarCompiler
from workers.protocol import EngineInfo, FinishReason, Output, Sampling, Submit, TokenLogprob
from workers.step import RowResult, Runner, ScheduledSeq

__all__ = ["CASES", "Answer", "Conditions", "Replica", "Request", "tell_cases"]

DEADLINE_S: Final = 300.0
"""For one run; machines that test are busy."""

CASES: Counter[tuple[str, str]] = Counter()
"""(property, path) → answers compared."""


@pytest.fixture(scope="session", autouse=True)
def tell_cases() -> Iterator[None]:
    """At the end of a long run, for docs/engine.md. Shown with ``pytest -s``."""
    yield
    if "WARMPATH_TESTS_CASES" in os.environ:
        for (what, path), count in sorted(CASES.items()):
            print(f"\n{what:36} {path:22} {count:9,}", end="")


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

    def submit(self, rid: int) -> Submit:
        return Submit(
            rid=rid,
            request_id=f"request-{rid}",
            prompt=pack_ids(self.prompt),
            resume=pack_ids(self.resume),
            salt=self.salt,
            sampling=self.sampling,
        )

    def choice(self, number: int) -> Request:
        return replace(self, sampling=msgspec.structs.replace(self.sampling, choice=number))


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = field(default=0, compare=False)

    def take(self, output: Output) -> None:
        assert self.finish_reason is None
        if not self.ids:  # a grammar that fails later is told without it
            self.cached_tokens = output.cached_tokens
        self.ids += output.ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason

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

    def run(self, requests: Sequence[Request], conditions: Conditions = Conditions()) -> list[Answer]:
        """All to their ends, over an empty cache."""
        info = self.runner.info
        watched = _Watched(
            self.runner,
            msgspec.structs.replace(
                info, num_blocks=conditions.num_blocks or info.num_blocks, max_num_seqs=len(requests) or 1
            ),
        )
        engine = Engine(watched, grammars=grammar_compiler(), token_budget=conditions.token_budget, clock=lambda: 0.0)
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
        waited_for = set(range(len(requests)))
        deadline = time.monotonic() + DEADLINE_S
        number = 0
        while waited_for:
            for rid, request in enumerate(requests):
                if request.arrives == number:
                    watched.expect(rid, request)
                    engine.submit(request.submit(rid))
                if request.leaves == number:
                    engine.abort(rid)
                    waited_for.discard(rid)
            report = engine.step()
            assert report.kv_used_blocks == watched.blocks_in_use(engine)
            assert engine._pool.num_free + report.kv_cached_blocks + report.kv_used_blocks == engine.info.num_blocks
            for output in report.outputs:
                answers[output.rid].take(output)
                watched.told(output.rid, output.ids)
                if output.finish_reason is not None:
                    waited_for.discard(output.rid)
            number += 1
            assert time.monotonic() < deadline, "the engine does not come to an end"
            time.sleep(engine.idle_s(0.0005))
        assert engine.failed is None
        assert report.kv_used_blocks == 0
        self.num_preemptions += report.preemptions_total
        return answers


@cache
def grammar_compiler() -> GrammarCompiler:
    """For the small models: id 0 ends, the others are the printable characters of ASCII."""
    characters = {"Ġ" if code == 32 else chr(code): code - 31 for code in range(32, 127)}
    assert len(characters) + 1 == VOCAB
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<|end|>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"<|end|>": 0} | characters, "merges": []},
    }
    return GrammarCompiler(json.dumps(tokenizer), VOCAB, [0])


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
