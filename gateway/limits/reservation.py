"""What a request took from its limits, and the one way to give it back.

What must hold: a reservation ends exactly once, however the request does; a second end changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from gateway.limits.ledger import Limit
from gateway.limits.rules import Amounts

__all__ = ["Reservation", "Settles"]

_NOTHING: Final[Amounts] = (0, 0, 0, 0, 0)
_A_REQUEST: Final[Amounts] = (1, 0, 0, 0, 0)


class Settles(Protocol):
    def settle(self, reservation: Reservation, used: Amounts) -> None:
        """`used` of each measure instead of what was reserved; of parallel requests, none."""


class Reservation(msgspec.Struct, eq=False):
    settles: Settles
    limits: Sequence[Limit]
    amounts: Amounts
    bucket: int
    """Of windows: where the amounts were counted."""
    left: Sequence[int]
    """Of each limit, after this request."""
    is_local: bool = False
    """Whether this process decided by its share, since the ledger could not be asked."""
    ended: bool = False

    def end(self, used: Amounts) -> None:
        """Give back what was reserved and not used; what was used beyond it is taken, whatever the limit."""
        if not self.ended:
            self.ended = True
            self.settles.settle(self, used)

    def end_as_reserved(self) -> None:
        """It was answered, and nobody said what that took."""
        requests, tokens, _, tokens_day, micro_usd = self.amounts
        self.end((requests, tokens, 0, tokens_day, micro_usd))

    def end_refused(self) -> None:
        """It was let through, and was wrong or given up before anything was generated: a request, and no tokens."""
        self.end(_A_REQUEST)

    def end_failed(self) -> None:
        """Nobody answered, and the client is not to blame: as if it had never come."""
        self.end(_NOTHING)
