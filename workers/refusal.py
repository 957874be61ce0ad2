"""Why a sequence can never run here. Pure.

The HTTP side has checked all of it before; this keeps a slip of it from ending the engine, and so everybody else's answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.ending import ending
from workers.protocol import EngineInfo, Sampling

__all__ = ["refusal"]


def refusal(
    prompt: Sequence[int], resumed: Sequence[int], sampling: Sampling, info: EngineInfo, max_len: int
) -> str | None:
    """None when it can run. `resumed`: what was generated elsewhere; `max_len`: tokens of a prompt and its answer."""
    if not prompt:
        return "the prompt has no tokens"
    if len(prompt) >= info.max_model_len:
        return f"a prompt of {len(prompt)} tokens leaves no room to answer in a context of {info.max_model_len}"
    if len(prompt) >= max_len:
        return f"a prompt of {len(prompt)} tokens and its answer do not fit into {max_len} tokens of KV memory"
    highest = max(max(prompt), max(resumed, default=0))
    if highest >= info.vocab_size:
        return f"token id {highest} is outside the vocabulary of {info.vocab_size}"
    if resumed:
        reason = ending(
            resumed[-1],
            num_generated=len(resumed),
            num_ids=len(prompt) + len(resumed),
            sampling=sampling,
            eos_ids=info.eos_ids,
            max_len=max_len,
        )
        if reason is not None:
            return f"the answer to resume has ended already ({reason})"
    return None
