"""Settings of a gateway that runs: read again when somebody asks or the file changes, checked whole, then swapped whole.

What must hold: settings with a fault change nothing at all, whatever the fault is, and every attempt is told: in the log with
all faults, and by a counter. Attempts come one after the other. The swap itself is one step of the event loop, so no request
sees half of it; requests that run go on by what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gateway.reload_plan import Plan, plan_reload
from gateway.settings import Settings
from gateway.settings_loader import SettingsError

__all__ = ["Reloader", "SettingsSource"]

_log = logging.getLogger("warmpath.settings")

_POLL_S: Final = 1.0
"""Between two looks at the file; a change that two of them saw is read. A look costs 10 us, and works for every kind of file
system and of change: written in place, replaced, or reached through a link that Kubernetes turns to another folder."""


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Where settings come from."""

    load: Callable[[], Settings]
    """Reads file, environment and flags, and may block. Raises `SettingsError`."""
    file: Path | None = None
    """The one to look after."""


class Reloader:
    def __init__(
        self,
        settings: Settings,
        source: SettingsSource,
        *,
        faults_of: Callable[[Settings], list[str]],
        apply: Callable[[Settings], None],
    ) -> None:
        """`settings`: in force now. `faults_of`: why valid settings cannot be applied to what runs; nothing when they can.
        `apply`: go by these from now on; one synchronous call that cannot fail after `faults_of` found nothing.
        """
        self.settings = settings
        """In force."""
        self.results = Counter(ok=0, bad=0)
        """Of all attempts."""
        self._faults_of = faults_of
        self._apply = apply
        self._load = source.load
        self._file = source.file
        self._asked = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._seen = _stamp(source.file)

    def ask(self) -> None:
        """Reload soon; for signal handlers. Needs `run`."""
        self._asked.set()

    async def run(self) -> None:
        """Reload when asked to and when the file changes, for ever."""
        before = self._seen
        while True:
            asked = await self._asked_within(_POLL_S)
            stamp = _stamp(self._file)
            # A file that is gone is about to be replaced, and one that just changed may be written still: cut to nothing it
            # would be valid, and the end of every replica.
            changed = stamp is not None and stamp != self._seen and stamp == before
            before = stamp
            if asked or changed:
                try:
                    await self.reload()
                except SettingsError:
                    pass  # told already
                except Exception:
                    _log.exception("the settings could not be reloaded")

    async def reload(self) -> Plan:
        """Read, check and swap. Raises `SettingsError` with every fault; then nothing was changed."""
        async with self._one_at_a_time:
            self._seen = _stamp(self._file)
            try:
                new = await asyncio.to_thread(self._read)
                plan = plan_reload(self.settings, new)
                if faults := self._faults_of(plan.settings):
                    raise SettingsError(faults)
            except SettingsError as error:
                self.results["bad"] += 1
                _log.error("the settings were not changed:\n  %s", "\n  ".join(error.faults))
                raise
            self._apply(plan.settings)
            self.settings = plan.settings
            self.results["ok"] += 1
            _log.info("the settings were reloaded; changed: %s", ", ".join(plan.changed) or "nothing")
            if plan.needs_restart:
                _log.warning("changed, but only a restart will use it: %s", ", ".join(plan.needs_restart))
            return plan

    def _read(self) -> Settings:
        if self._file is not None and self._file.exists() and not self._file.is_file():
            # A pipe would be waited for without an end, or be empty by now, which is valid and the end of every replica.
            raise SettingsError([f"{self._file}: only a regular file can be read again"])
        before = _stamp(self._file)
        found = self._load()
        if before is not None and (before.st_size == 0 or before != _stamp(self._file)):
            # Cut to nothing by who writes it, it would be valid, and the end of every replica.
            raise SettingsError([f"{self._file}: it is empty, or was written while it was read"])
        return found

    async def _asked_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True


class _Stamp(NamedTuple):
    st_dev: int
    st_ino: int
    st_mtime_ns: int
    st_size: int


def _stamp(file: Path | None) -> _Stamp | None:
    """What differs between two contents of a file, links followed; None when there is none."""
    if file is None:
        return None
    try:
        found = os.stat(file)
    except OSError:
        return None
    return _Stamp(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
