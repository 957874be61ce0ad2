"""What clients may come back for, or back with, to another process: homes of responses, requests that replicas died of.

Both are told at once and not with the next flush: an answer that names a response goes out after all processes were told of it.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.homes import Home, Homes
from gateway.processes.messages import Crashed, HomeMade, Message
from gateway.retries import Fingerprint, Quarantine

__all__ = ["SharedHomes", "SharedQuarantine"]


class SharedHomes(Homes):
    def __init__(self, tell_now: Callable[[Message], None], catch_up: Callable[[], None]) -> None:
        """`catch_up` takes in what other processes have told and nobody has read yet."""
        super().__init__()
        self._tell_now = tell_now
        self._catch_up = catch_up

    def made(self, owner: str, name: str, home: Home) -> None:
        super().made(owner, name, home)
        if super().find(owner, name) is not None:
            self._tell_now(HomeMade(owner, name, home.replica_id, home.model))

    def find(self, owner: str, name: str) -> Home | None:
        home = super().find(owner, name)
        if home is None:
            self._catch_up()
            home = super().find(owner, name)
        return home

    def hear(self, made: HomeMade) -> None:
        super().made(made.owner, made.name, Home(made.replica_id, made.model))


class SharedQuarantine(Quarantine):
    def __init__(self, tell_now: Callable[[Message], None]) -> None:
        super().__init__()
        self._tell_now = tell_now

    def crashed(self, request: Fingerprint, replica_id: str, begun_at: float, now: float) -> bool:
        held = super().crashed(request, replica_id, begun_at, now)
        self._tell_now(Crashed(request, replica_id, begun_at, now))
        return held

    def hear(self, crash: Crashed) -> None:
        super().crashed(crash.fingerprint, crash.replica_id, crash.begun_at, crash.at)
