"""What is learned of a replica that tells nothing: from the usage in its answers and the time to their first byte.

Three quantities, each from a prior that may be several times wrong, and each apart from the others:

    `Density`     bytes of text a token stands for            usage.prompt_tokens ÷ bytes of the canonical text
    `Pace`        fixed cost and prefill rate of a prompt     time to first byte of prompts that were computed alone;
                                                              any answer that came sooner than it should
    `CacheSize`   blocks that its cache holds                 what was sent there and is, or is no longer, cached

Their inputs come from a replica and may be anything: nothing here raises, and one odd answer moves nothing far. They know
neither clock nor index.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final

__all__ = ["MAX_TOK_S", "MIN_TOK_S", "CacheSize", "Density", "Pace"]

MIN_TOK_S: Final = 1.0
MAX_TOK_S: Final = 1e7
"""A prefill rate outside of these is nonsense, whoever says it."""

_MIN_SAMPLE_BYTES: Final = 256
"""In a shorter prompt the chat template's own tokens count for too much."""
_MOST_BYTES: Final = 64
_WIDEST: Final = 128
"""A token stands for 0.5 to 64 bytes: scripts that a vocabulary does not know come to about 1, and what is beyond these was an
image or a mistake. (128: the one over the other.)"""
_KEPT_RATIOS: Final = 31

_KEPT: Final = 0.9
"""What a sample still counts when the next one comes: the last ten or so decide, so a change of hardware shows in seconds."""
_LEAP: Final = 4.0
"""A sample counts for at most so many times more or less than expected: an odd one moves little, a wrong prior moves fast."""
_PRIOR_WEIGHT: Final = 0.05
_MUCH_SOONER: Final = 0.75
"""Of what a prompt should have taken: an answer within less cannot be noise, whatever else is in its time."""
_BOUND_SHARE: Final = 0.1
"""Of a sample: where many prompts are cached without anybody's knowing, they look fast, and those that were timed must win. A
bound that nothing contradicts is believed after a dozen answers all the same."""
_MIN_S: Final = 1e-4
"""No answer comes sooner, whatever two clocks say."""

_GROWTH: Final = 1.5
_LEAST_BLOCKS: Final = 16
_MOST_BLOCKS: Final = 1 << 24


class Density:
    """Bytes of text a token stands for: the median of the last answers, so that half of them may be nonsense."""

    def __init__(self, prior: float) -> None:
        self.bytes_per_token = prior
        self._ratios: deque[float] = deque()  # oldest first
        self._ranked: list[float] = []

    def learn(self, num_bytes: int, prompt_tokens: int) -> bool:
        """Take in an answer; False when it cannot be true, or is too short to tell."""
        if num_bytes < _MIN_SAMPLE_BYTES or not num_bytes <= prompt_tokens * _MOST_BYTES <= num_bytes * _WIDEST:
            return False
        ratio, ranked = num_bytes / prompt_tokens, self._ranked
        if len(ranked) == _KEPT_RATIOS:
            del ranked[bisect_left(ranked, self._ratios.popleft())]
        self._ratios.append(ratio)
        insort(ranked, ratio)
        self.bytes_per_token = (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
        return True


class Pace:
    """Seconds to first byte = `fixed_s` + uncached tokens ÷ `tok_s`, for a prompt that was computed alone.

    A line through the samples by least squares of relative errors, older samples counting less and less (recursive least
    squares with exponential forgetting: Haykin, Adaptive Filter Theory, ch. 10). The priors stay in it with a small weight,
    because prompts of one length leave open which of the two is wrong: then it is the one that has to change by less.
    """

    def __init__(self, fixed_s: float, tok_s: float) -> None:
        self.fixed_s = fixed_s
        self.tok_s = min(max(tok_s, MIN_TOK_S), MAX_TOK_S)
        self.samples = 0
        """Prompts that were timed."""
        self._prior_fixed_s, self._prior_slope = fixed_s, 1 / self.tok_s
        # Weighted sums over the samples (x tokens, y seconds): of 1, x, x², y and x·y.
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0

    def seconds(self, tokens: float) -> float:
        """What it should take to compute so many."""
        return self.fixed_s + tokens / self.tok_s

    def learn(self, tokens: int, seconds: float) -> None:
        """A prompt that was computed alone."""
        if tokens >= 0 and math.isfinite(seconds):
            self._take(tokens, seconds, 1.0)
            self.samples += 1

    def learn_bound(self, tokens: int, seconds: float) -> None:
        """A prompt that took no longer than that: others were computed meanwhile, or its whole answer is in the time.

        Moves the pace towards faster or not at all, and is no sample: how far the bound is from the truth nobody knows.
        """
        if tokens >= 0 and -math.inf < seconds < _MUCH_SOONER * self.seconds(tokens):
            fixed_s, tok_s = self.fixed_s, self.tok_s
            most_s = max(seconds, self.seconds(tokens) / _LEAP, _MIN_S)
            # What is refuted is no prior any more: a thousand times too slow, it would count even with its small weight.
            self._prior_fixed_s = min(self._prior_fixed_s, most_s)
            self._prior_slope = min(self._prior_slope, most_s / max(tokens, 1))
            self._take(tokens, seconds, _BOUND_SHARE)
            self.fixed_s, self.tok_s = min(self.fixed_s, fixed_s), max(self.tok_s, tok_s)

    def _take(self, tokens: int, seconds: float, share: float) -> None:
        expected = max(self.seconds(tokens), _MIN_S)
        y = min(max(seconds, expected / _LEAP, _MIN_S), expected * _LEAP)
        x = float(min(tokens, 1 << 24))
        weight = share * max(y, expected) ** -2  # a slow odd sample must not outweigh the rest, nor must a fast one
        self._w = self._w * _KEPT + weight
        self._wx = self._wx * _KEPT + weight * x
        self._wxx = self._wxx * _KEPT + weight * x * x
        self._wy = self._wy * _KEPT + weight * y
        self._wxy = self._wxy * _KEPT + weight * x * y
        self._solve()

    def _solve(self) -> None:
        # Weights by what is believed now, not by the prior: one that is far too small would count for far too much.
        fixed_weight = _PRIOR_WEIGHT / max(self.fixed_s, 0.005) ** 2
        slope_weight = _PRIOR_WEIGHT * self.tok_s**2
        w, wx = self._w + fixed_weight, self._wx
        wxx = self._wxx + slope_weight
        wy = self._wy + fixed_weight * self._prior_fixed_s
        wxy = self._wxy + slope_weight * self._prior_slope
        square = w * wxx
        determinant = square - wx**2  # above 0, because each prior bears on one of the two alone; but floats are finite
        if determinant > 1e-9 * square:
            self.fixed_s = max((wy * wxx - wx * wxy) / determinant, 0.0)
        slope = (wxy - self.fixed_s * wx) / wxx
        self.tok_s = 1 / min(max(slope, 1 / MAX_TOK_S), 1 / MIN_TOK_S)


class CacheSize:
    """Blocks that a replica's cache holds, taken to be one that drops what was used least recently.

    A block that is gone although only so many others were used since is an upper bound; one that is still there although
    the bound had it dropped says that the bound is too low. Each moves it by a factor at most, because a restart or other
    people's prompts look like a small cache.
    """

    def __init__(self) -> None:
        self.blocks: int | None = None
        """None as long as nothing contradicted the prior."""

    def missed(self, distance: int, bound: int) -> None:
        """A block was gone after `distance` others were used; `bound` is what is believed now."""
        if distance < bound:
            self._move(max(distance, bound // 2))

    def outlived(self, bound: int) -> None:
        """A block was there that was dropped here to stay within `bound`."""
        self._move(math.ceil(bound * _GROWTH))

    def _move(self, blocks: int) -> None:
        self.blocks = min(max(blocks, _LEAST_BLOCKS), _MOST_BLOCKS)
