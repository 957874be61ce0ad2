"""A router that tells other processes what it promises, and counts what they promise as if it had done so itself.

So all processes of a gateway see the same load, expect the same blocks, eject the same replicas and learn the same rates, a
bus's delay (`gateway.processes.bus`) apart. What replicas say themselves each process hears from them.

Of what is sent to a replica the others are told at once, and `route` looks for such news first: requests come in bursts, and
processes that decide the same moment without knowing of each other send all of it to the replica that waits least. (In virtual
time the p90 of TTFT on the recorded trace, whose requests come by twenties at the same instant, is 2.1 times that of one
process where four of them know nothing of the same burst, and 1.05 times where they do.) Everything else can wait a little.

What must hold: when all that other processes began is over, nothing of it is left in any sum here, whatever was lost, came
twice or in another order on the way: `OpenNumbers` ends what is finished, and a process that is gone, or silent for
`SILENCE_S`, takes all of its own with it.

A load frame may say that a replica counts a request before this process has heard of it; those ids are remembered for a
moment, or the request's tokens would count twice until it is answered.

Pure but for what it is given to tell and hear with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from gateway.processes.messages import (
    Answered,
    Begun,
    Busy,
    Finished,
    Message,
    OpenNumbers,
)
from router import (
    BlockName,
    Decision,
    Outcome,
    Query,
    Reservation,
    Router,
    RoutingSettings,
    Sync,
    UnknownReplica,
    Unroutable,
)
from router.wire import Frame, Load

__all__ = ["SILENCE_S", "SharedRouter"]

SILENCE_S: Final = 5.0
"""A process tells which of its requests are open once a second; five of these missed are a process that stands still."""
_MOST_NUMBERS: Final = 5_000
"""In one message, so that it fits into a datagram."""


class SharedRouter(Router):
    def __init__(
        self,
        settings: RoutingSettings,
        tell: Callable[[Message], None],
        tell_now: Callable[[Message], None],
        catch_up: Callable[[], None],
    ) -> None:
        """`tell` sends a message to all other processes soon, `tell_now` before it returns; `catch_up` takes in what they have
        sent.
        """
        super().__init__(settings)
        self._policy = settings.policy
        self._tell = tell
        self._tell_now = tell_now
        self._catch_up = catch_up
        self._ours: dict[Reservation, int] = {}  # in the order of their numbers
        self._next_number = 0
        self._theirs: dict[int, dict[int, Reservation]] = {}
        self._heard_at: dict[int, float] = {}
        self._processes: frozenset[int] = frozenset()
        self._admissions = _Admissions()

    # --- ours

    def route(self, query: Query, now: float, draw: float) -> Decision | Unroutable:
        self._catch_up()
        return super().route(query, now, draw)

    def begin(self, decision: Decision, query: Query, request_id: str, now: float) -> Reservation:
        reservation = super().begin(decision, query, request_id, now)
        number = self._ours[reservation] = self._next_number
        self._next_number += 1
        self._tell_now(_begun(number, reservation, list(query.names)))
        return reservation

    def answered(self, reservation: Reservation, now: float) -> None:
        super().answered(reservation, now)
        self._tell(Answered(self._ours[reservation], now))

    def finish(
        self,
        reservation: Reservation,
        now: float,
        outcome: Outcome,
        cached_tokens: int | None,
        prompt_tokens: int | None = None,
    ) -> None:
        super().finish(reservation, now, outcome, cached_tokens, prompt_tokens)
        self._tell(Finished(self._ours.pop(reservation), now, outcome, cached_tokens, prompt_tokens))

    def busy(self, replica_id: str, until: float) -> None:
        super().busy(replica_id, until)
        self._tell(Busy(replica_id, until))

    def what_is_open(self) -> list[Message]:
        """For a process that has heard nothing. Without names: replicas' own events tell those."""
        messages: list[Message] = []
        for reservation, number in self._ours.items():
            messages.append(_begun(number, reservation, []))
            if reservation.prefill_s is not None:
                messages.append(Answered(number, reservation.begun_at + reservation.prefill_s))
        return messages

    def open_numbers(self) -> list[Message]:
        """For all, now and then, so that nobody keeps what is finished."""
        numbers = list(self._ours.values())
        parts = [numbers[at : at + _MOST_NUMBERS] for at in range(0, len(numbers), _MOST_NUMBERS)] or [[]]
        ends = [*(part[-1] + 1 for part in parts[:-1]), self._next_number]
        return [OpenNumbers(low, high, part) for low, high, part in zip([0, *ends], ends, parts, strict=False)]

    # --- theirs

    @property
    def open_elsewhere(self) -> int:
        """Requests that other processes have at replicas."""
        return sum(map(len, self._theirs.values()))

    def set_processes(self, processes: Collection[int], now: float) -> None:
        """Those that live. Ids are given in order and never again, so a lower one that is not among them is gone."""
        self._processes = frozenset(processes)
        for process in self._theirs.keys() - self._processes:
            self._drop(process, now)

    def hear(self, process: int, message: Message, now: float) -> None:
        """Take in what another process did. Messages that are not about replicas are ignored."""
        if process not in self._processes and process < max(self._processes, default=0):
            return  # the last words of a process that is gone
        self._heard_at[process] = now
        theirs = self._theirs.setdefault(process, {})
        match message:
            case Begun():
                self._hear_begun(theirs, message)
            case Answered(number, at):
                if (reservation := theirs.get(number)) is not None:
                    super().answered(reservation, at)
            case Finished(number, at, outcome, cached_tokens, prompt_tokens):
                if (reservation := theirs.pop(number, None)) is not None:
                    super().finish(reservation, at, outcome, cached_tokens, prompt_tokens)
            case Busy(replica_id, until):
                super().busy(replica_id, until)
            case OpenNumbers(low, high, numbers):
                over = {number for number in theirs if low <= number < high}.difference(numbers)
                for number in over:
                    super().finish(theirs.pop(number), now, Outcome.CANCELLED, None)

    def drop_silent(self, now: float) -> None:
        """Forget what processes promised that say nothing any more. Call about once a second."""
        for process in [process for process, at in self._heard_at.items() if at + SILENCE_S <= now]:
            self._drop(process, now)

    def apply(self, replica_id: str, frame: Frame, now: float) -> Sync:
        if isinstance(frame, Load):
            self._admissions.note(replica_id, frame.admitted, now)
        return super().apply(replica_id, frame, now)

    def _hear_begun(self, theirs: dict[int, Reservation], begun: Begun) -> None:
        if begun.number in theirs:
            return
        decision = Decision(
            begun.replica_id, begun.matched_tokens, begun.prompt_tokens, "elsewhere", 1.0, self._policy, ()
        )
        query = Query(
            "", begun.names, begun.prompt_tokens, begun.num_bytes, streamed=begun.streamed, yields=begun.yields
        )
        try:
            reservation = super().begin(decision, query, begun.request_id, begun.at)
        except UnknownReplica:
            return
        theirs[begun.number] = reservation
        if (begun.replica_id, begun.request_id) in self._admissions:
            self.admitted(reservation)

    def _drop(self, process: int, now: float) -> None:
        self._heard_at.pop(process, None)
        for reservation in self._theirs.pop(process, {}).values():
            super().finish(reservation, now, Outcome.CANCELLED, None)


def _begun(number: int, reservation: Reservation, names: list[BlockName]) -> Begun:
    return Begun(
        number,
        reservation.request_id,
        reservation.replica_id,
        reservation.begun_at,
        reservation.prompt_tokens,
        reservation.matched_tokens,
        reservation.num_bytes,
        reservation.streamed,
        reservation.yields,
        names,
    )


class _Admissions:
    """Which requests replicas said they have admitted, for a second or two; bounded, since anybody may say anything."""

    _KEPT_S: Final = 1.0
    _MOST: Final = 10_000

    def __init__(self) -> None:
        self._new: set[tuple[str, str]] = set()
        self._old: set[tuple[str, str]] = set()
        self._turned_at = float("-inf")

    def note(self, replica_id: str, request_ids: Collection[str], now: float) -> None:
        if not request_ids:
            return
        if now >= self._turned_at + self._KEPT_S or len(self._new) >= self._MOST:
            self._old, self._new, self._turned_at = self._new, set(), now
        self._new.update((replica_id, request_id) for request_id in request_ids)

    def __contains__(self, admission: tuple[str, str]) -> bool:
        return admission in self._new or admission in self._old
