"""Messages between a worker's HTTP process and its engine.

The HTTP process speaks OpenAI, tokenizes, detokenizes and finds stop strings; the engine knows token ids only. For a torch
engine the two are separate processes joined by a socket pair, so that neither waits for the other's interpreter lock; the
simulator hands over the same values in process (`workers.client`).

What must hold: every `Submit` is answered by `Output`s of which exactly one, the last, has a finish reason, unless an
`Abort` for it was sent first; after an `Abort` at most the outputs already under way still arrive.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from workers.rates import UNMEASURED_STEP_S

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Abort",
    "EngineInfo",
    "Failed",
    "FinishReason",
    "FromEngine",
    "Grammar",
    "Output",
    "Ready",
    "Sampling",
    "StepReport",
    "StoredRun",
    "Submit",
    "ToEngine",
    "TokenLogprob",
    "decode_from_engine",
    "decode_to_engine",
    "encode_message",
]

FinishReason = Literal["stop", "length", "rejected", "error"]
"""``stop``: an end or stop token. ``length``: max_tokens or the context is used up. ``rejected``: the request can never run
here, or its grammar cannot go on (a client's mistake). ``error``: our own fault, only for the request it names."""


class Grammar(msgspec.Struct, frozen=True):
    """What the generated text must be a sentence of."""

    text: str
    """As llguidance's ``LLMatcher`` takes it."""
    after: int | None = None
    """The token id behind which it begins to hold: the end of the model's reasoning. None: it holds from the first token."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Ranges are checked by the HTTP side; the engine trusts them."""

    max_tokens: int
    min_tokens: int = 0
    """Before so many, no token that would end the sequence is chosen."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Tokens less likely than this part of the likeliest one are left out."""
    repetition_penalty: float = 1.0
    """Of tokens in prompt or answer: their logits are divided by it when positive, multiplied when negative."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for each time it is in the answer,"""
    presence_penalty: float = 0.0
    """and once for being in it at all."""
    logit_bias: dict[int, float] = {}
    grammar: Grammar | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to tell beside each chosen one; None: no logprobs at all."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. Such a request reads nothing from the cache."""
    seed: int = 0
    """u64. Noise is a pure function of (seed, choice, position, token id)."""
    choice: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    rid: int
    """The HTTP process's own number for this sequence, never used twice."""
    request_id: str
    """The id that clients and logs know; several choices of one request share it."""
    prompt: bytes
    """u32le token ids, at least one."""
    salt: str = ""
    priority: int = 0
    """A smaller one is admitted sooner and preempted later; within one, what came sooner and is shorter is."""
    patience: float = 0.0
    """For how long it lets shorter ones of its priority pass, times what its uncached tokens take to compute."""
    interrupts: bool = True
    """Whether it goes before a less urgent one whose prompt has begun."""
    resume: bytes = b""
    """u32le ids that were generated elsewhere before: the sequence goes on behind them, and only what follows is told.
    Limits, penalties and noise count from the prompt's end as ever. They must not have ended it (`workers.ending`)."""
    sampling: Sampling


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    rid: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is, fixed from its start to its end."""

    model: str
    revision: str
    precision: str
    """``int8``, ``bf16``, ``fp32`` or ``simulated``."""
    numerics: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    eos_ids: list[int]
    """Ids that end an answer unless the request ignores them."""
    patience: float = 0.0
    """Of requests that no gateway gives one (`Submit.patience`)."""
    takes_priority: bool = False
    """Whether the body's field ``priority`` counts where no gateway gives one."""
    weights_bytes: int
    kv_bytes_per_token: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    info: EngineInfo


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was, before anything the client asked for changed its logit: natural logarithms."""

    logprob: float
    top: list[tuple[int, float]]
    """The likeliest ids and theirs, sorted by (-logprob, id). The token itself is in it only if it is one of them."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one sequence."""

    rid: int
    ids: list[int]
    """Includes the end or stop token that finished it, if one did."""
    logprobs: list[TokenLogprob] = []
    """One for each of `ids` where the request asked for them."""
    prompt_logprobs: list[TokenLogprob] = []
    """With the first output where the request asked for them: one for each prompt token but the first."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache at first admission."""
    prefill_s: float | None = None
    """With the first output: from the first step that ran some of it to the end of the one that gave this."""
    finish_reason: FinishReason | None = None
    message: str = ""
    """For people, with ``rejected`` and ``error``."""


class StoredRun(msgspec.Struct, frozen=True, array_like=True):
    """Block names that became readable, each the child of the one before (`router.wire.Stored`)."""

    parent: int
    names: list[int]


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """All that one engine step did, in one message. Sent after every step, and when idle at least twice a second."""

    outputs: list[Output] = []
    stored: list[StoredRun] = []
    removed: list[int] = []
    cleared: bool = False
    admitted: list[str] = []
    """Request ids taken into the engine's queue since the last report."""
    waiting: int
    waiting_uncached_tokens: int
    running: int
    kv_used_blocks: int
    kv_cached_blocks: int
    """Blocks nobody holds that still have reusable content."""
    failing: bool = False
    """The last step failed; the next one comes at once, and if it fails too the engine ends."""
    step_limit_s: float = UNMEASURED_STEP_S
    """A step that takes longer has hung."""
    prefill_tok_s: float
    step_ms: float
    prompt_tokens_total: int
    """Counters since the start: prompt tokens of admitted requests, how many of them came from the cache, and tokens made."""
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine ends after this message."""

    message: str


ToEngine = Submit | Abort
FromEngine = Ready | StepReport | Failed

MAX_MESSAGE_BYTES: Final = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode_message(message: ToEngine | FromEngine) -> bytes:
    """One message as u32be length + msgpack."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "big") + payload


def decode_to_engine(payload: bytes) -> ToEngine:
    return _to_engine.decode(payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    return _from_engine.decode(payload)
