"""What clients saw of a restart, from their answers alone (`loadtest.restart` makes them). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from loadtest.openloop import Answer
from loadtest.workloads import Request

__all__ = ["Recovery", "Window", "judge_recovery"]

_WINDOW_S: Final = 0.5
_AS_BEFORE: Final = 0.99
"""Of the rate before: at 40 requests a second one that misses takes 0.05 from a window, so none may."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Half a second of requests, by when they were due."""

    at_s: float
    """Its begin, after the first accepted request."""
    requests: int
    failed: int
    hit_of_ideal: float
    """What failed has found nothing."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What clients saw of the restart."""

    hit_of_ideal_before: float
    cut: int
    """Requests under way when it was killed."""
    down_s: float | None
    """From the kill to the first request that was accepted; None: none was."""
    refused: int
    """Requests in that time."""
    served_s: float | None
    """From the kill to the first answer."""
    failed: int
    """After it."""
    back_s: float | None
    """From the first accepted request to the end of the first window with a hit rate as before; None: there was none."""
    windows: list[Window]

    @property
    def until_s(self) -> float | None:
        """From the kill until the hit rate was back."""
        return None if self.down_s is None or self.back_s is None else self.down_s + self.back_s


def judge_recovery(
    requests: Sequence[Request], answers: Sequence[Answer], talk_tokens: int, killed_s: float
) -> Recovery:
    """`killed_s`: when, in the time of the requests. Ideally each finds all of its talk's tokens."""
    rows = list(zip(requests, answers, strict=True))
    before = [answer for request, answer in rows if request.at_s < killed_s]
    rest = [(request.at_s, answer) for request, answer in rows if request.at_s >= killed_s]
    done = [answer for answer in before if not answer.error]
    usual = _hit_of_ideal(done, talk_tokens)
    first = next((number for number, (_, answer) in enumerate(rest) if _was_accepted(answer)), len(rest))
    begun_s = rest[first][0] if first < len(rest) else None
    windows = [] if begun_s is None else list(_windows(rest[first:], begun_s, talk_tokens))
    back = next((window for window in windows if window.hit_of_ideal >= _AS_BEFORE * usual), None)
    return Recovery(
        hit_of_ideal_before=usual,
        cut=len(before) - len(done),
        down_s=None if begun_s is None else round(begun_s - killed_s, 3),
        refused=first,
        served_s=None if begun_s is None else round(min(map(_answered_s, rest[first:])) - killed_s, 3),
        failed=sum(window.failed for window in windows),
        back_s=None if back is None else back.at_s + _WINDOW_S,
        windows=windows,
    )


def _was_accepted(answer: Answer) -> bool:
    return not answer.error or answer.error.isdigit()


def _answered_s(row: tuple[float, Answer]) -> float:
    due_s, answer = row
    return due_s + answer.last_s if _was_accepted(answer) else math.inf


def _windows(rows: Sequence[tuple[float, Answer]], begun_s: float, talk_tokens: int) -> Iterator[Window]:
    """Whole ones only: the load ends in the middle of the last."""
    for number in range(int((rows[-1][0] - begun_s) / _WINDOW_S)):
        at_s = number * _WINDOW_S
        inside = [answer for due_s, answer in rows if at_s <= due_s - begun_s < at_s + _WINDOW_S]
        yield Window(
            at_s=at_s,
            requests=len(inside),
            failed=sum(bool(answer.error) for answer in inside),
            hit_of_ideal=_hit_of_ideal(inside, talk_tokens),
        )


def _hit_of_ideal(answers: Sequence[Answer], talk_tokens: int) -> float:
    cached = sum(min(answer.cached_tokens, talk_tokens) for answer in answers)
    return round(cached / max(len(answers) * talk_tokens, 1), 4)
