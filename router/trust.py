"""How far the router may believe its own picture of a replica's cache.

`EventStream` follows the event stream of one replica by numbers alone: the epoch, the last batch *applied*, and the last
batch known to be *published*. The picture is exact while a stream is open and the two numbers are equal; every rule about
replay, gaps, restarts and lost streams follows from that. It does not know blocks: its answer tells the caller what to do
with the index.

`Accuracy` counts what was predicted against what the replica reported afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Accuracy", "EventStream", "Snapshot", "Step", "Sync", "Trust"]


class Trust(Enum):
    EXACT = "exact"
    """Events, without a gap: the index is what the replica holds."""
    LEARNING = "learning"
    """The index is what was sent there, with an expiry, and what events said before they stopped."""
    BLIND = "blind"
    """No block of it can be known: it is judged by its load only."""


class Sync(Enum):
    """What the reader of a replica's event stream must do after a frame."""

    OK = "ok"
    """Read on."""
    GAP = "gap"
    """Batches are missing: replay from `Router.resume_point`, else fetch a snapshot."""
    MISMATCH = "mismatch"
    """The replica is not what its pool needs (`ReplicaView.mismatch` says why); the rest of this stream is of no use."""


class Step(Enum):
    """What a frame means for the index."""

    APPLY = "apply"
    RESTART = "restart"
    """Forget all that was known, then apply."""
    DUPLICATE = "duplicate"
    """Seen before: drop it."""
    GAP = "gap"
    """Batches are missing: drop it, and do not believe the index until they are here."""


@dataclass(slots=True)
class Snapshot:
    """One that is being taken in."""

    epoch: str
    seq: int
    """What it is true for, once all of it is here."""


class EventStream:
    def __init__(self) -> None:
        self._open = False
        self._epoch: str | None = None
        self._applied = 0
        self._published = 0
        self.gaps = 0
        """Frames that came while batches before them were missing,"""
        self.snapshots = 0
        """whole pictures that were taken to close such a gap, or to begin with,"""
        self.restarts = 0
        """and lives of the replica that ended, with all that was known of its cache."""

    @property
    def exact(self) -> bool:
        return self._open and self._applied == self._published

    @property
    def epoch(self) -> str | None:
        return self._epoch

    @property
    def resume_point(self) -> tuple[str, int] | None:
        """(epoch, last batch applied), from which a replay repairs the picture; None when nothing was ever heard."""
        return None if self._epoch is None else (self._epoch, self._applied)

    def hello(self, epoch: str, seq: int) -> Step:
        """A stream was opened. Batches up to `seq` that were not applied will be replayed."""
        self._open = True
        # Backwards within an epoch is a restart as well: some replicas count from 0 again under their old name.
        restarted = epoch != self._epoch or seq < self._applied
        if restarted:
            self.restarts += self._epoch is not None
            self._epoch, self._applied = epoch, 0
        self._published = seq
        return Step.RESTART if restarted else Step.APPLY

    def batch(self, seq: int) -> Step:
        if not self._open:
            return self._gap()
        if seq <= self._applied:
            return Step.DUPLICATE
        self._published = max(self._published, seq)
        if seq > self._applied + 1:
            return self._gap()
        self._applied = seq
        return Step.APPLY

    def load(self, seq: int) -> Step:
        """`seq` is the last batch before this frame; smaller than ours is normal just after a snapshot."""
        self._published = max(self._published, seq)
        return Step.APPLY if self._open and seq <= self._applied else self._gap()

    def _gap(self) -> Step:
        self.gaps += 1
        return Step.GAP

    def snapshot(self, epoch: str, seq: int) -> None:
        """The whole picture, true for `seq`, replaces what was known. It opens no stream."""
        self.snapshots += 1
        published = self._published if epoch == self._epoch else 0
        self._epoch, self._applied, self._published = epoch, seq, max(published, seq)

    def cut(self) -> None:
        """No stream any more; what was applied stays a point to resume from."""
        self._open = False

    def disown(self) -> None:
        """The index was cleared because what came cannot be true: replay from the first batch, or a snapshot."""
        self._applied = 0
        self._published = max(self._published, 1)


@dataclass(slots=True)
class Accuracy:
    """Cached prompt tokens, predicted by the router against reported by the replica, summed over its answers."""

    predicted: int = 0
    reported: int = 0
    agreed: int = 0
    """Sum of the smaller of both."""

    def count(self, predicted: int, reported: int) -> None:
        self.predicted += predicted
        self.reported += reported
        self.agreed += min(predicted, reported)

    @property
    def precision(self) -> float | None:
        """Share of the predicted tokens that were cached; None before the first prediction."""
        return self.agreed / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        """Share of the cached tokens that were predicted; None before the first report."""
        return self.agreed / self.reported if self.reported else None
