"""Requests wait here while every replica of their model is saturated. The order is `router.gate`'s; this has the futures.

One gate a model, so that nobody waits for another model's replicas. Gates are looked at when something was heard that may let
the next one go (`heard`: a first byte, an end, a load frame), and by one timer as long as anybody waits: when a replica should
be free by what is predicted, and every 50 ms for all that nobody tells of. While nobody waits there is no timer, and a
request that passes costs its routing and one look into a dict.

What must hold: a place in the queue ends in exactly one of a placement, a refusal, an error or its client's leaving. The work
of a placement is promised when it is made; if the client leaves before it could begin, the promise is released here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from router import Asked, Dropped, Failed, Gate, GateSettings, GateView, Outcome, Placed, Router, Unroutable
from router.fair_queue import Entry

__all__ = ["Admission", "NotAdmitted"]

_PER_TURN: Final = 16
"""Placements in one turn of the event loop: each costs a decision, which takes up to 0.1 ms."""
_LEAST_PAUSE_S: Final = 0.005
"""Between two looks at the queues: many things are heard at once."""


class NotAdmitted(Exception):
    """A request does not get a replica, and why."""

    def __init__(self, why: Dropped | Unroutable) -> None:
        super().__init__(why)
        self.why = why


class Admission:
    """Belongs to one event loop."""

    def __init__(
        self,
        router: Router,
        settings: GateSettings,
        *,
        clock: Callable[[], float],
        draw: Callable[[], float],
        on_wait: Callable[[str, float], None],
        on_refusal: Callable[[str, str], None],
    ) -> None:
        """`on_wait`: called with (model, seconds) for each wait that ended at a replica; `on_refusal` with (model, reason)."""
        self._router = router
        self._settings = settings
        self._clock = clock
        self._draw = draw
        self._on_wait = on_wait
        self._on_refusal = on_refusal
        self._gates: dict[str, Gate] = {}
        self._waiting: dict[Entry[Asked], asyncio.Future[Placed]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # kept: for a moment that has come uvloop gives a handle that cannot tell
        self._looked_at = -math.inf

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def configure(self, settings: GateSettings) -> None:
        """Go by these from now on; who waits keeps its place and its deadline."""
        self._settings = settings
        for gate in self._gates.values():
            gate.configure(settings)
        self.heard()

    def try_pass(self, asked: Asked) -> Placed | None:
        """A replica at once, when nobody waits for one and not all are saturated; None: `wait`. Raises `NotAdmitted`."""
        found = self._gate(asked.query.model).try_pass(asked, self._clock(), self._draw())
        if isinstance(found, Unroutable):
            raise NotAdmitted(found)
        return found

    async def wait(self, asked: Asked, since: float) -> Placed:
        """A replica when it is its turn. `since`: when it came; it waits no longer than `deadline_s` from then.

        Raises `NotAdmitted`, and what went wrong when it was to be decided on.
        """
        model, began = asked.query.model, self._clock()
        gate = self._gate(model)
        entry, displaced = gate.wait(asked, since, began, self._draw())
        if displaced is entry:
            raise self._refused(model, gate.refusal(asked, "full", began))
        if displaced is not None:
            self._end(displaced, gate.refusal(displaced.item, "displaced", began))
        future: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._waiting[entry] = future
        self._look_in(0.0)
        try:
            placed = await future
        except asyncio.CancelledError:
            if self._waiting.pop(entry, None) is not None:
                gate.leave(entry)
                self.heard()
            elif future.done() and not future.cancelled() and future.exception() is None:
                # It was placed in the same turn in which its client left.
                self._router.finish(future.result().reservation, self._clock(), Outcome.CANCELLED, None)
            raise
        self._on_wait(model, self._clock() - began)
        return placed

    def heard(self) -> None:
        """Something changed at a replica."""
        if self._waiting:
            self._look_in(0.0)

    def answered(self, model: str, tenant: str, output_tokens: int) -> None:
        """An answer ended; what it took counts against its tenant as long as others wait."""
        if self._waiting and (gate := self._gates.get(model)) is not None:
            gate.answered(tenant, output_tokens)

    def close(self) -> None:
        """Nothing is looked at any more; whoever still waits is its task's owner's to end."""
        if self._timer is not None:
            self._timer.cancel()

    def views(self) -> list[GateView]:
        now = self._clock()
        return [
            gate.view(now) for model, gate in list(self._gates.items()) if gate or self._router.pool(model) is not None
        ]

    def _gate(self, model: str) -> Gate:
        gate = self._gates.get(model)
        if gate is None:
            self._gates = {name: each for name, each in self._gates.items() if each or self._router.pool(name)}
            gate = self._gates[model] = Gate(self._router, model, self._settings)
        return gate

    def _look_in(self, delay_s: float) -> None:
        """Look at the queues after so long, or sooner if that is planned, but not again at once."""
        loop = asyncio.get_running_loop()
        at = max(loop.time() + delay_s, self._looked_at + _LEAST_PAUSE_S)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer, self._timer_at = loop.call_at(at, self._look), at

    def _look(self) -> None:
        """Let go who can."""
        self._timer = None
        self._looked_at = asyncio.get_running_loop().time()
        now, placed = self._clock(), 0
        for gate in self._gates.values():
            for entry, end in gate.release(now, self._draw, _PER_TURN):
                placed += isinstance(end, Placed)
                self._end(entry, end)
        if self._waiting:
            self._look_in(min(gate.next_in_s() for gate in self._gates.values()) if placed < _PER_TURN else 0.0)

    def _end(self, entry: Entry[Asked], end: Placed | Dropped | Failed) -> None:
        future = self._waiting.pop(entry)
        if isinstance(end, (Dropped, Failed)):
            error = end.error if isinstance(end, Failed) else self._refused(entry.item.query.model, end)
            if not future.cancelled():
                future.set_exception(error)
        elif future.cancelled():  # its client left, and its task is about to see that
            self._router.finish(end.reservation, self._clock(), Outcome.CANCELLED, None)
        else:
            future.set_result(end)

    def _refused(self, model: str, why: Dropped) -> NotAdmitted:
        self._on_refusal(model, why.why)
        return NotAdmitted(why)
