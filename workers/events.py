"""What a replica tells about its prefix cache, as a pure state machine: step reports in, frames out.

Three ideas: a *mirror* of the names that the engine holds, so that a snapshot costs the engine nothing; a *ring* of the
last batches, so that a gateway that lost its connection can catch up; and a *throttle* for load frames. It knows no
sockets, tasks or clock.

What must hold: applying the batches 1 … seq in order gives exactly the mirror; so does applying a snapshot. In the mirror
a parent comes before its children: the engine names a block after its parent and drops it before its parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from router.wire import Batch, Load, Stored, encode_frame
from workers.protocol import StepReport, StoredRun

__all__ = ["BlockMirror", "EventLog", "LoadThrottle", "snapshot_batches"]

RING_BATCHES: Final = 10_000
RING_BYTES: Final = 8 << 20
"""A batch takes about 100 bytes, one of a long prompt 20 KB: many of those reach this bound first, and past it a snapshot
is the cheaper way to catch up."""

BATCH_NAMES: Final = 8192
"""In one batch: half of what a frame may hold, and with 25 bytes each, as when no two are neighbours, below its size."""

SNAPSHOT_BATCH_BYTES: Final = 16 << 10
"""1,800 names: about what a gateway takes in within one of its turns of 2 ms, so that it is not held longer."""
_NAME_BYTES: Final = 9
_RUN_BYTES: Final = 16
_BATCH_BYTES: Final = 128
"""Upper bounds of what a name, the frame of a run and that of a batch take in msgpack."""

LOAD_MIN_INTERVAL_S: Final = 0.05
LOAD_MAX_INTERVAL_S: Final = 1.0


class BlockMirror:
    """The names that the engine's cache holds, each with its parent. Store and remove are O(1) a name."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def clear(self) -> None:
        self._parents.clear()

    def remove(self, names: Iterable[int]) -> None:
        for name in names:
            self._parents.pop(name, None)

    def store(self, runs: Iterable[StoredRun]) -> None:
        for run in runs:
            parent = run.parent
            for name in run.names:
                self._parents[name] = parent
                parent = name

    def links(self) -> list[tuple[int, int]]:
        """(name, parent) of every block, parents first: a copy that later changes do not touch."""
        return list(self._parents.items())


class EventLog:
    """Numbers what changes, and keeps the last of it for those who lost their connection."""

    def __init__(self, *, ring_batches: int = RING_BATCHES, ring_bytes: int = RING_BYTES) -> None:
        self.seq = 0
        """Of the last batch."""
        self.mirror = BlockMirror()
        self._ring: deque[bytes] = deque()
        self._ring_batches = ring_batches
        self._ring_bytes = ring_bytes
        self._bytes = 0

    def append(self, report: StepReport, ts: float) -> list[bytes]:
        """Take in a step; the encoded batches to publish: none when no block changed, several when very many did."""
        if not (report.stored or report.removed or report.cleared):
            return []
        if report.cleared:
            self.mirror.clear()
        self.mirror.remove(report.removed)
        self.mirror.store(report.stored)
        frames = []
        for stored, removed, cleared in _parts(report):
            self.seq += 1
            frame = encode_frame(Batch(seq=self.seq, ts=ts, stored=stored, removed=removed, cleared=cleared))
            self._keep(frame)
            frames.append(frame)
        return frames

    def replay(self, after: int) -> list[bytes] | None:
        """The batches with a seq above `after`; None when some of them are gone, or `after` never was."""
        missing = self.seq - after
        if not 0 <= missing <= len(self._ring):
            return None
        return list(islice(self._ring, len(self._ring) - missing, None))

    def _keep(self, frame: bytes) -> None:
        self._ring.append(frame)
        self._bytes += len(frame)
        while len(self._ring) > self._ring_batches or self._bytes > self._ring_bytes:
            self._bytes -= len(self._ring.popleft())


def _parts(report: StepReport) -> Iterator[tuple[list[Stored], list[int], bool]]:
    """(stored, removed, cleared) of a step, small enough for a frame each: a prompt of half the cache removes as much."""
    if sum(len(run.names) for run in report.stored) + len(report.removed) <= BATCH_NAMES:
        yield [Stored(run.parent, run.names) for run in report.stored], report.removed, report.cleared
        return
    if report.cleared:
        yield [], [], True
    for start in range(0, len(report.removed), BATCH_NAMES):
        yield [], report.removed[start : start + BATCH_NAMES], False
    links = (link for run in report.stored for link in zip(run.names, [run.parent, *run.names], strict=False))
    for stored in _runs(links, SNAPSHOT_BATCH_BYTES):
        yield stored, [], False


def snapshot_batches(
    links: Iterable[tuple[int, int]], seq: int, ts: float, limit_bytes: int = SNAPSHOT_BATCH_BYTES
) -> Iterator[Batch]:
    """`BlockMirror.links` as batches of at most `limit_bytes` each. Lazy: a caller may pause between two."""
    for stored in _runs(links, limit_bytes):
        yield Batch(seq=seq, ts=ts, stored=stored)


def _runs(links: Iterable[tuple[int, int]], limit_bytes: int) -> Iterator[list[Stored]]:
    """(name, parent) of blocks, parents first, as the runs of batches of at most `limit_bytes`."""
    runs: list[Stored] = []
    room = limit_bytes - _BATCH_BYTES
    last: int | None = None
    for name, parent in links:
        if room < _NAME_BYTES + _RUN_BYTES:
            yield runs
            runs, room, last = [], limit_bytes - _BATCH_BYTES, None
        if parent == last:
            runs[-1].names.append(name)
        else:
            runs.append(Stored(parent, [name]))
            room -= _RUN_BYTES
        room -= _NAME_BYTES
        last = name
    if runs:
        yield runs


class LoadThrottle:
    """Which load frames are worth sending: a change at once but at most 20 a second, and one a second in any case.

    The rates alone are no change: they move with every step and matter only together with the counts.
    """

    def __init__(self, report: StepReport) -> None:
        self._report = report
        self._sent: tuple[int, ...] | None = None
        self._sent_at = float("-inf")
        self._admitted: list[str] = []

    def note(self, report: StepReport) -> None:
        """Take in a step. Ids of admitted requests are kept until a frame carries them."""
        self._report = report
        self._admitted += report.admitted

    @property
    def changed(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._admitted) or _counts(self._report) != self._sent

    def due_at(self) -> float:
        """When the next frame should go out, if nothing else happens before."""
        return self._sent_at + (LOAD_MIN_INTERVAL_S if self.changed else LOAD_MAX_INTERVAL_S)

    def take(self, *, seq: int, now: float, ts: float) -> Load:
        """The frame that goes to every listener at `now`."""
        admitted, self._admitted = self._admitted, []
        self._sent, self._sent_at = _counts(self._report), now
        return self._load(seq, ts, admitted)

    def peek(self, *, seq: int, ts: float) -> Load:
        """The same for one new listener: it changes nothing, and the admitted ids still go to everybody."""
        return self._load(seq, ts, [])

    def _load(self, seq: int, ts: float, admitted: list[str]) -> Load:
        report = self._report
        return Load(
            seq=seq,
            ts=ts,
            waiting=report.waiting,
            waiting_uncached_tokens=report.waiting_uncached_tokens,
            running=report.running,
            kv_used_blocks=report.kv_used_blocks,
            prefill_tok_s=report.prefill_tok_s,
            step_ms=report.step_ms,
            admitted=admitted,
            prompt_tokens_total=report.prompt_tokens_total,
            cached_tokens_total=report.cached_tokens_total,
            generated_tokens_total=report.generated_tokens_total,
        )


def _counts(report: StepReport) -> tuple[int, ...]:
    return (report.waiting, report.waiting_uncached_tokens, report.running, report.kv_used_blocks)
