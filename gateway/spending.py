"""What a request is charged for, however it ended. One table for all endings, and one place that ends a reservation.

    what came of it                                      requests   tokens and money
    an answer with a usage                               1          the usage
    a stream that broke off, or told no usage            1          prompt, and an output token for each event of it
    a whole answer that told no usage                    1          as reserved
    the client left a replica before any output          1          prompt
    the replica's 4xx, or the client left before that    1          none
    no replica answered, all busy, time-out, our bug     0          none

The place among the parallel requests is free after each of them. Who leaves pays the prompt: else whoever always leaves in time
would have prompts computed within no limit of tokens.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import msgspec

from gateway.api_error import ApiError
from gateway.job import Record
from gateway.limits import Reservation, Rules

__all__ = ["Spending"]


class Spending(msgspec.Struct, eq=False):
    """``with Spending(...):`` around whatever is done for a request that was let through."""

    reservation: Reservation
    rules: Rules
    record: Record
    prompt_tokens: int

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record, reservation = self.record, self.reservation
        if (usage := record.usage) is not None:
            tokens = usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens
            reservation.end(self.rules.used(record.model, *tokens))
        elif record.output_events:
            reservation.end(self.rules.used(record.model, self.prompt_tokens, 0, record.output_events))
        elif record.is_answered:
            reservation.end_as_reserved()
        elif record.tries and isinstance(error, asyncio.CancelledError):
            reservation.end(self.rules.used(record.model, self.prompt_tokens, 0, 0))
        elif error is None or _is_clients(error):
            reservation.end_refused()
        else:
            reservation.end_failed()


def _is_clients(error: BaseException) -> bool:
    if isinstance(error, ApiError):
        return error.status < 500 and error.code != "capacity"
    return isinstance(error, asyncio.CancelledError)
