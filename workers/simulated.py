"""A runner without a model: it knows how long a step takes and makes up what is said.

Around it everything is real: server, scheduler, block pool, prefix cache, events. So a fleet of replicas with a realistic
pace fits into one process, and an answer costs no arithmetic.

Time is the runner's own: a step advances `clock` by what the model of time says and returns at once. Whoever drives the
engine lets as much real time pass before it shows the step's outputs (`workers.client.InProcessEngineClient`).

The text is a pure function of (seed, choice, position), so the same request gives the same text on every replica, and a
continuation elsewhere has no seam. Of what a request asks of the sampler only its wishes about the end change it. Logprobs are
those of the draw, which is uniform over a few words. There is no grammar. Ids are those of the trivial tokenizer
(`router.trivial`): four bytes of ASCII each.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from router.blocks import BLOCK_SIZE
from router.trivial import EOS_ID
from router.wire import unpack_ids
from workers.engine import Engine
from workers.protocol import EngineInfo, Sampling, TokenLogprob
from workers.step import RowResult, ScheduledSeq

__all__ = ["SIMULATED_TOKEN_BUDGET", "SimulatedRunner", "TimeModel", "engine_over", "simulated_info"]

SIMULATED_TOKEN_BUDGET: Final = 2048
"""Tokens a step, as large GPUs take them: 72 ms of prefill, which those who generate feel once or twice."""

_SENTENCE: Final = 8
"""Words in a sentence; the last one may be followed by the end of the answer."""

_FIRST: Final = unpack_ids(b"The One Our His Her All Any Two ")
_INNER: Final = unpack_ids(
    b"old new red sun sea sky day man boy dog cat hat map way and but for not can may ran saw had got "
)
_LAST: Final = unpack_ids(b"me. it. us. so. up. on. in. by. ")

_END: Final = array("I", [EOS_ID])

_LEAST_TOKENS: Final = 32
_MOST_TOKENS: Final = 256
"""Bounds of a made-up answer's length: chat traces have a median of 100 to 200."""


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds a step takes on the simulated accelerator. The defaults are those of the fleet in the design's simulation.

    Prompts are computed one after the other, also those that share a step: it lasts as long as all of them together, and each
    gives its first token at its end. So a replica computes as many tokens a second as one that takes prompts singly, and a
    prompt is later than there by at most its company in one step, which `prefills_per_step` bounds.
    """

    prefill_s: float = 0.020
    """Once for each prompt,"""
    prefill_token_s: float = 0.000_035
    """and for each of its tokens that was not cached. Prefills in one step run one after the other."""
    decode_s: float = 0.045
    """For all who generate together,"""
    free_rows: int = 8
    """up to this many;"""
    decode_row: float = 0.005
    """each one more adds this part of `decode_s`."""
    speedup: float = 1.0
    jitter: float = 0.0
    """Each step takes up to this part of its time less or more."""

    @property
    def prefills_per_step(self) -> int | None:
        """Prompts that one step may compute: as many as hide behind its decoding, and at least one. More would make those who
        generate wait for them, fewer would leave the accelerator idle. None where a prompt has no cost besides its tokens.
        """
        return max(1, int(self.decode_s / self.prefill_s)) if self.prefill_s else None

    def step_s(self, batch: Sequence[ScheduledSeq]) -> float:
        """Prefill waits for arithmetic, decode for memory, so a step that does both takes as long as the longer one."""
        prefill = 0.0
        num_decodes = 0
        for row in batch:
            if row.start >= row.prompt_len and len(row.tokens) == 1:
                num_decodes += 1
            else:
                prefill += self.prefill_s * row.sample + self.prefill_token_s * len(row.tokens)
        decode = self.decode_s * (1 + self.decode_row * max(0, num_decodes - self.free_rows)) if num_decodes else 0.0
        return max(prefill, decode) / self.speedup


def simulated_info(
    *,
    model: str = "simulated",
    kv_tokens: int = 1 << 20,
    block_size: int = BLOCK_SIZE,
    max_num_seqs: int = 256,
    max_model_len: int = 131_072,
    patience: float = 0.0,
    takes_priority: bool = False,
) -> EngineInfo:
    return EngineInfo(
        model=model,
        revision="",
        precision="simulated",
        numerics="simulated/1",
        block_size=block_size,
        num_blocks=kv_tokens // block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        patience=patience,
        takes_priority=takes_priority,
        vocab_size=EOS_ID + 1,
        eos_ids=[EOS_ID],
        weights_bytes=0,
        kv_bytes_per_token=0,
    )


def engine_over(runner: SimulatedRunner, *, token_budget: int = SIMULATED_TOKEN_BUDGET) -> Engine:
    """An engine that lives in the runner's time and takes as many prompts at once as its model of time is made for."""
    return Engine(
        runner,
        token_budget=token_budget,
        prefills_per_step=runner.time_model.prefills_per_step,
        clock=runner.clock,
    )


class SimulatedRunner:
    """`seed` draws the jitter: replicas with different ones do not stumble in step."""

    def __init__(self, info: EngineInfo, time_model: TimeModel | None = None, *, seed: int = 0) -> None:
        self.info = info
        self.time_model = time_model or TimeModel()
        self.slowdown = 1.0
        """Every step takes this many times as long: a fault on request, and any step may change it."""
        self._seed = seed
        self._num_steps = 0
        self._now = 0.0

    def clock(self) -> float:
        """Simulated seconds since the start. Give it to the `Engine`, so that it measures what was simulated."""
        return self._now

    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        self._now += self._step_s(batch)
        return [_result(row) for row in batch]

    def _step_s(self, batch: Sequence[ScheduledSeq]) -> float:
        seconds = self.time_model.step_s(batch) * self.slowdown
        if self.time_model.jitter:
            self._num_steps += 1
            seconds *= 1 + self.time_model.jitter * (2 * _draw(self._seed, self._num_steps) / (1 << 64) - 1)
        return seconds


def _result(row: ScheduledSeq) -> RowResult:
    sampling, position = row.sampling, row.start + len(row.tokens)
    prompt_logprobs = _prompt_logprobs(row) if sampling.prompt_logprobs is not None else ()
    if not row.sample:
        return RowResult(None, None, prompt_logprobs)
    seed = (sampling.seed + sampling.choice) & 0xFFFF_FFFF_FFFF_FFFF
    words = _END if _has_ended(sampling, seed, position, row.prompt_len) else _words(position)
    token = words[_draw(seed, position) % len(words)]
    logprob = _uniform(words, sampling.logprobs) if sampling.logprobs is not None else None
    return RowResult(token, logprob, prompt_logprobs)


def _has_ended(sampling: Sampling, seed: int, position: int, prompt_len: int) -> bool:
    if position % _SENTENCE or sampling.ignore_eos:
        return False
    length = _LEAST_TOKENS + _draw(seed, 0) % (_MOST_TOKENS - _LEAST_TOKENS)
    return position - prompt_len >= max(length, sampling.min_tokens)


def _words(position: int) -> array[int]:
    """What may be said at a position; each is as likely as the others."""
    place = position % _SENTENCE
    return _FIRST if place == 0 else _LAST if place == _SENTENCE - 1 else _INNER


def _prompt_logprobs(row: ScheduledSeq) -> list[TokenLogprob]:
    """As if each of the prompt's tokens had been one more word that could be said there."""
    first = row.start + 1
    return [
        _uniform({*_words(position), row.ids[position]}, row.sampling.prompt_logprobs or 0)
        for position in range(first, first + row.num_prompt_logprobs)
    ]


def _uniform(ids: Collection[int], num_top: int) -> TokenLogprob:
    logprob = math.log(1 / len(ids))
    return TokenLogprob(logprob, [(token, logprob) for token in sorted(ids)[:num_top]] if num_top else [])


def _draw(seed: int, position: int) -> int:
    return xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed)
