"""Kinds of replicas that can be simulated by name: a model of time, room for KV and tokens a step, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from workers.simulated import SIMULATED_TOKEN_BUDGET, TimeModel

__all__ = ["PRESETS", "Preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    about: str
    time_model: TimeModel
    kv_tokens: int
    token_budget: int
    """Tokens a step: those who generate wait for so many tokens of prefill at most."""


PRESETS: Final = {
    "default": Preset(
        about="the fleet of docs/routing.md: a large model on a large GPU",
        time_model=TimeModel(),
        kv_tokens=1 << 20,
        token_budget=SIMULATED_TOKEN_BUDGET,
    ),
    "h100-8b": Preset(
        # The middle of what public simulators set for it: 25-40 ms, 0.15-0.30 ms a prompt token, 10-15 ms an output token.
        about="an 8-billion model on an H100, with the figures common among simulators",
        time_model=TimeModel(prefill_s=0.030, prefill_token_s=0.000_2, decode_s=0.012),
        kv_tokens=400_000,  # what 80 GB leave beside 16 GB of weights, at 128 KiB a token
        token_budget=512,
    ),
    "smg": Preset(
        # 8,000 prompt tokens a second, 6 ms + 0.35 ms for each that runs.
        about="the mock worker of SGLang's model gateway (smg), as its benchmark sets it",
        time_model=TimeModel(prefill_s=0.0, prefill_token_s=1 / 8000, decode_s=0.006, free_rows=0, decode_row=0.35 / 6),
        kv_tokens=1 << 19,
        token_budget=512,
    ),
    "laptop": Preset(
        # Measured, int8 on one thread: prompts of 1, 64 and 512 tokens 46, 82 and 442 ms; steps of 1, 4, 8 and 16
        # sequences 40, 48, 58 and 85 ms. There prefill and decode add up instead of overlapping: a step with both is too short.
        about="this project's own engine: SmolLM2-135M in int8 on one CPU core",
        time_model=TimeModel(prefill_s=0.045, prefill_token_s=0.000_78, decode_s=0.040, free_rows=1, decode_row=0.07),
        kv_tokens=23_000,  # 512 MiB
        token_budget=512,
    ),
}
