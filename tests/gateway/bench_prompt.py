"""CPU time from a request's bytes to a routed, spliced one: ``python -m tests.gateway.bench_prompt [--plain]``, JSON on stdout.

The gateway's own steps over Qwen3's vocabulary, as `gateway.hotpath` takes them: parse the body, render, tokenize, name the
blocks, decide among four replicas, splice the ids into the body. *new*: nothing of the prompt was seen before, two messages.
*known*: a talk of 100 messages of which all but the last one were seen. ``--plain``: without fastokens and minijinja.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from gateway.memory import lay_out_heap
from gateway.openai import GenerationRequest, parse_request
from gateway.prepare import PreparedPrompt, Preparer, Prompters
from router import Decision, IdTexts, NameCache, Outcome, Pool, Router, block_names, root_name
from router.prompt import Prompter
from router.wire import Batch, Hello, PromptField, ReplicaSpec, Stored, encode_ids
from tests.router.golden import golden, golden_prompter

_ROUNDS: Final = 30
_REPLICAS: Final = 4
_MODEL: Final = "qwen3"


class _Text:
    """Words of English in an order that never comes twice."""

    def __init__(self) -> None:
        conversation = golden("conversations")["long_2000_words"]
        self._words = " ".join(message["content"] for message in conversation["messages"]).split(" ")
        self._random = random.Random(1)

    def of(self, num_tokens: int) -> str:
        return " ".join(self._random.choices(self._words, k=int(num_tokens * 0.78)))


def _body(contents: list[str]) -> bytes:
    messages = [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]
    return msgspec.json.encode({"model": _MODEL, "stream": True, "max_tokens": 100, "messages": messages})


def _new(text: _Text, num_tokens: int) -> Iterator[bytes]:
    while True:
        yield _body([text.of(num_tokens // 2), text.of(num_tokens // 2)])


def _known(text: _Text, num_tokens: int) -> Iterator[bytes]:
    contents = [text.of(num_tokens // 100) for _ in range(99)]
    while True:
        yield _body([*contents, text.of(num_tokens // 100)])


class _Gateway:
    def __init__(self, prompter: Prompter) -> None:
        prompters = Prompters()
        prompters._loaded[prompter.digest] = prompter
        self.prompter = prompter
        self.preparer = Preparer(prompters, ThreadPoolExecutor(1))
        self.router = Router()
        self.seq = {f"r{number}": 0 for number in range(_REPLICAS)}
        for replica_id in self.seq:
            self._add(replica_id)
        pool = self.router.pool(_MODEL)
        assert pool is not None
        self.pool: Pool = pool

    def _add(self, replica_id: str) -> None:
        self.router.add(replica_id, ReplicaSpec(url="http://127.0.0.1:1", model=_MODEL), 0.0)
        hello = Hello(
            epoch="e",
            seq=0,
            model=_MODEL,
            block_size=16,
            tokenizer_digest=self.prompter.digest,
            numerics="",
            capacity_blocks=1 << 20,
            max_num_seqs=64,
            started_at=0.0,
        )
        self.router.apply(replica_id, hello, 0.0)
        self.router.set_health(replica_id, True, 0.0)

    def take(self, body: bytes) -> tuple[float, float, int]:
        """Milliseconds up to the spliced body, those to promise the blocks to the chosen replica, and the prompt's tokens."""
        begin = time.process_time()
        request = parse_request("/v1/chat/completions", body, open_access=False)
        prompt = self.preparer.prepare_now(request, self.pool, "salt")
        query = prompt.query(request)
        decision = self.router.route(query, 0.0, 0.5)
        assert isinstance(decision, Decision)
        _splice(request, prompt)
        spliced = time.process_time()
        reservation = self.router.begin(decision, query, "id", 0.0)
        promised = time.process_time()
        self.router.finish(reservation, 0.0, Outcome.OK, None)
        # The replica computed them and says so, which is not part of this request.
        self.seq[decision.replica_id] += 1
        stored = [Stored(0, list(prompt.names))]
        self.router.apply(decision.replica_id, Batch(seq=self.seq[decision.replica_id], ts=0.0, stored=stored), 0.0)
        return (spliced - begin) * 1e3, (promised - spliced) * 1e3, prompt.num_tokens

    def stages(self, body: bytes) -> dict[str, Callable[[], object]]:
        """Single steps over one body, for a profile; by then all of it is known."""
        request = parse_request("/v1/chat/completions", body, open_access=False)
        fields, now = request.fields(), datetime.now(UTC)
        text = self.prompter.render_chat(fields, now)
        packed = self.prompter.pack_text(text)
        prompt = self.preparer.prepare_now(request, self.pool, "salt")
        root, cache, texts = root_name(model=_MODEL), NameCache(32 << 20), IdTexts(32 << 20)
        return {
            "parse": lambda: parse_request("/v1/chat/completions", body, open_access=False),
            "decode messages": request.fields,
            "prepare": lambda: self.preparer.prepare_now(request, self.pool, "salt"),
            "render": lambda: self.prompter.render_chat(fields, now),
            "tokenize": lambda: self.prompter.pack_text(text),
            "names": lambda: cache.names(packed, root),
            "names, new": lambda: block_names(packed, root),
            "base64": lambda: texts.encode(packed),
            "base64, new": lambda: encode_ids(packed),
            "decide": lambda: self.router.route(prompt.query(request), 0.0, 0.5),
            "splice": lambda: _splice(request, prompt),
        }


def _splice(request: GenerationRequest, prompt: PreparedPrompt) -> bytes:
    field = PromptField(salt="salt", request_id="id")
    return request.upstream_body({"warmpath": msgspec.Raw(field.encode(prompt.ids or b""))})


def _cpu_ms(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e3


def _summary(samples: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(samples), 3), "min": round(min(samples), 3)}


def main(argv: list[str]) -> None:
    lay_out_heap()  # as it serves
    gateway = _Gateway(golden_prompter(_MODEL, native="--plain" not in argv))
    text = _Text()
    report: dict[str, Any] = {"native": gateway.prompter.is_native, "rounds": _ROUNDS, "unit": "ms of CPU"}
    for name, bodies in (("new", _new), ("known", _known)):
        for size in (8_000, 100_000):
            source = bodies(text, size)
            prepared = [next(source) for _ in range(_ROUNDS + 3)]
            taken = [gateway.take(body) for body in prepared][3:]
            stages = gateway.stages(prepared[-1])
            report[f"{name} {size // 1000}k"] = {
                "tokens": taken[-1][2],
                "whole": _summary([whole for whole, _, _ in taken]),
                "promise": _summary([promise for _, promise, _ in taken]),
                "stages, known": {
                    stage: _summary([_cpu_ms(step) for _ in range(_ROUNDS)])["median"] for stage, step in stages.items()
                },
            }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
