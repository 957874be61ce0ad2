"""One try at one replica: its reservation is released exactly once, with what became of it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.api_error import ApiError
from gateway.failures import upstream_error
from gateway.openai import Usage
from gateway.tracing import Attempt
from gateway.upstream.contract import ConnectRefused, UpstreamClosed
from router import Outcome, Reservation, Router

__all__ = ["Held", "TryElsewhere"]


class TryElsewhere(Exception):
    """This replica did not answer; `error` is what the client gets if no other one does."""

    def __init__(
        self, error: ApiError, *, was_sent: bool = True, was_lost: bool = False, was_busy: bool = False
    ) -> None:
        """`was_sent`: it may have had work with the request. `was_lost`: its connection broke while it had the request.
        `was_busy`: it is well, and takes requests again later.
        """
        self.error = error
        self.was_sent = was_sent
        self.was_lost = was_lost
        self.was_busy = was_busy


class Held:
    """A reservation for as long as a try runs. Leaving without an outcome means that the client left."""

    __slots__ = (
        "_clock",
        "_on_change",
        "_reservation",
        "_router",
        "attempt",
        "begun_at",
        "outcome",
        "replica_id",
        "usage",
    )

    def __init__(
        self,
        router: Router,
        reservation: Reservation,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change`: called when the replica has less to do."""
        self._router = router
        self._reservation = reservation
        self._clock = clock
        self._on_change = on_change
        self.replica_id = reservation.replica_id
        self.begun_at = reservation.begun_at
        self.attempt: Attempt | None = None
        """None unless the request's trace is recorded."""
        self.outcome = Outcome.CANCELLED
        self.usage: Usage | None = None

    def answered(self) -> None:
        now = self._clock()
        self._router.answered(self._reservation, now)
        self._on_change()
        if self.attempt is not None:
            self.attempt.first_byte_at = now

    def failed(self, error: Exception) -> TryElsewhere:
        """The replica's fault, before its answer began."""
        self.outcome = Outcome.FAILED
        told = upstream_error(error)
        if self.attempt is not None:
            self.attempt.error_code = told.code
        return TryElsewhere(
            told,
            was_sent=not isinstance(error, ConnectRefused),
            was_lost=isinstance(error, UpstreamClosed),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        usage = self.usage
        cached, prompt = (usage.cached_tokens, usage.prompt_tokens) if usage is not None else (None, None)
        now = self._clock()
        self._router.finish(self._reservation, now, self.outcome, cached, prompt)
        self._on_change()
        if self.attempt is not None:
            self.attempt.ended(now, self.outcome, usage)
