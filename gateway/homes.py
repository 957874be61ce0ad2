"""Which replica made what a client will come back for. Pure.

Servers of ``/v1/responses`` keep responses and conversations in their own memory, so whatever names one goes to the replica
that made it. No other tenant's key finds it there: to those it does not exist.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

__all__ = ["Home", "Homes"]

_MOST: Final = 1 << 16
"""About 20 MB. The oldest go first: they lose their way, not their content, and a fresh talk goes anywhere."""
_MOST_CHARS: Final = 256
"""Of a name. Servers' ids have 30 to 80; a longer one comes from somebody who wants memory."""


@dataclass(frozen=True, slots=True)
class Home:
    replica_id: str
    model: str


class Homes:
    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._homes: OrderedDict[tuple[str, str], Home] = OrderedDict()  # by owner and id, the least used first

    def made(self, owner: str, name: str, home: Home) -> None:
        """`name`: id of a response or conversation. One that is longer than ids are is not kept."""
        if len(name) > _MOST_CHARS:
            return
        self._homes[owner, name] = home
        self._homes.move_to_end((owner, name))
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def find(self, owner: str, name: str) -> Home | None:
        home = self._homes.get((owner, name))
        if home is not None:
            self._homes.move_to_end((owner, name))
        return home

    def __len__(self) -> int:
        return len(self._homes)
