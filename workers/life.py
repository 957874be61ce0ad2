"""What became of one sequence and when: what metrics count and traces tell."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Life"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One sequence that ended. Times are monotonic seconds."""

    request_id: str
    model: str
    choice: int
    submitted_at: float
    prefill_at: float | None
    """When the first step with it began; None if none did,"""
    first_at: float | None
    """and when its first token came."""
    ended_at: float
    ending: str
    """``stop``, ``length``, ``abort`` or ``error``."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
