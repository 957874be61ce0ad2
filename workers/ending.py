"""When a sequence ends by its ids: one rule, for the engine that makes them and for who continues somebody else's. Pure.

Stop strings are not here: they end an answer by its text, which the engine does not know.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from workers.protocol import Sampling

__all__ = ["ending"]


def ending(
    token: int, *, num_generated: int, num_ids: int, sampling: Sampling, eos_ids: Collection[int], max_len: int
) -> Literal["stop", "length"] | None:
    """Whether `token`, the last of `num_generated` and of all `num_ids` with the prompt, was the last one; and why.

    `max_len`: tokens that a prompt and its answer may have together.
    """
    if token in eos_ids and not sampling.ignore_eos:
        return "stop"
    if token in sampling.stop_token_ids:
        return "stop"
    if num_generated >= sampling.max_tokens or num_ids >= max_len:
        return "length"
    return None
