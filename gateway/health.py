"""When a replica that is asked for its health counts as well, and when it is asked again. Pure: answers in, verdicts out.

A new one is asked quickly until it is decided, so that it serves within moments; one that is known changes only after several
answers in a row, so that a single slow or lost one moves no traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["Answer", "Health", "ProbeRules"]

_QUICK_S: Final = 0.1
"""Between the first answers of a replica."""
_DOUBT_S: Final = 1.0
"""At most, while the answers of a replica do not agree with how it counts, and while it is down."""
_JITTER: Final = 0.2


class Answer(Enum):
    GOOD = "good"
    BAD = "bad"
    NOBODY = "nobody"
    """The connection was refused: no process listens there."""


@dataclass(frozen=True, slots=True)
class ProbeRules:
    every_s: float = 5.0
    timeout_s: float = 5.0
    rise: int = 2
    """Good answers in a row that it takes to count as well,"""
    fall: int = 3
    """and bad ones to count as down."""


class Health:
    """Of one replica."""

    def __init__(self) -> None:
        self.is_up: bool | None = None
        """None until it is decided for the first time."""
        self._in_a_row = 0
        self._last: bool | None = None

    def count(self, answer: Answer, rules: ProbeRules) -> bool:
        """Take in an answer; whether the replica may get requests after it."""
        good = answer is Answer.GOOD
        self._in_a_row = self._in_a_row + 1 if good is self._last else 1
        self._last = good
        if (good and self._in_a_row >= rules.rise) or (not good and self._in_a_row >= rules.fall):
            self.is_up = good
        elif answer is Answer.NOBODY:
            self.is_up = False
        return bool(self.is_up)

    def wait_s(self, rules: ProbeRules, draw: float) -> float:
        """Until it is asked again. `draw` in [0, 1): fleets that start together shall not be asked together."""
        if self.is_up is None and self._last:
            wait_s = min(_QUICK_S, rules.every_s)
        elif self.is_up and self._last:
            wait_s = rules.every_s
        else:
            wait_s = min(_DOUBT_S, rules.every_s)
        return wait_s * (1 + _JITTER * (2 * draw - 1))
