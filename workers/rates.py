"""How fast steps go, as measured, and from when on one is so late that it must have hung. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["UNMEASURED_STEP_S", "Rates"]

UNMEASURED_STEP_S: Final = 60.0
"""Far above the slowest step seen, a prefill chunk on one busy core; for an engine that has measured nothing yet."""

_LATE: Final = 10.0
"""Times the longest step that is to be expected. Threads that wait for each other on cores that others use make a step 10 times
as long; an average over prompts may be 4 times as fast as the end of a long one, where there is most to attend to."""

_LEAST_STEP_S: Final = 10.0
"""Machines stop for seconds: they swap, or move to another host. To take a replica out for that is worse than to find out a few
seconds later that it has hung."""


class Rates:
    """Moving averages of measured steps; 0.0 until there is a measurement."""

    _WEIGHT: Final = 0.2  # of the newest sample: half is forgotten after three steps

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._least_prefill_tokens = token_budget // 4
        self.prefill_tok_s = 0.0
        self.step_ms = 0.0

    @property
    def step_limit_s(self) -> float:
        """No step takes longer unless it hangs. Whatever is scheduled, it is at most a budget's tokens beside a decode step."""
        if not self.prefill_tok_s:
            return UNMEASURED_STEP_S
        expected_s = self._token_budget / self.prefill_tok_s + self.step_ms / 1000
        return max(_LEAST_STEP_S, _LATE * expected_s)

    def observe(self, prefill_tokens: int, elapsed_s: float) -> None:
        """A step of `prefill_tokens` (0: everybody generated) took `elapsed_s`."""
        if elapsed_s <= 0.0:
            return  # a clock too coarse for a tiny step says nothing
        if not prefill_tokens:
            self.step_ms = self._average(self.step_ms, 1000 * elapsed_s)
        elif prefill_tokens >= self._least_prefill_tokens:
            # A shorter one is mostly the fixed cost of a step: one token in 65 ms would make 1,500 a second look like 15.
            self.prefill_tok_s = self._average(self.prefill_tok_s, prefill_tokens / elapsed_s)

    def _average(self, old: float, new: float) -> float:
        return old + self._WEIGHT * (new - old) if old else new
