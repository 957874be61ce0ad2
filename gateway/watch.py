"""One task per replica keeps the router's knowledge of it true: its tokenizer, its blocks, its load, whether it lives.

An own worker is followed through its event stream, whose `Load` frames are also its sign of life. A foreign replica is
asked for its health (`gateway.health` says what follows from the answers) and, before it may get requests, for the models that
it lists. Losing a stream costs hits, never answers: the router falls back to what was routed there.

What replicas send is taken in by turns (`gateway.turns`), so that neither a snapshot nor a flood holds the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Final, Never

import msgspec

from gateway.health import Answer, Health, ProbeRules
from gateway.model_cards import ModelCard, ModelCards, parse_models
from gateway.prepare import Prompters
from gateway.turns import Turns
from gateway.upstream.contract import (
    ConnectFailed,
    ConnectRefused,
    LocalExhaustion,
    Origin,
    Timeouts,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
    UpstreamTimeout,
)
from router import PoolMismatch, Router, Sync
from router.prompt import TokenizerError, TokenizerFiles
from router.wire import Frame, FrameDecoder, FrameError, ReplicaSpec

__all__ = ["Watcher"]

_log = logging.getLogger("warmpath.watch")

_SILENCE_S: Final = 5.0
"""A worker sends a load frame at least once a second; five missed ones are a dead worker or a dead network."""
_TIMEOUTS: Final = Timeouts(connect_s=1.0, first_byte_s=_SILENCE_S, idle_s=_SILENCE_S)
_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 5.0
_MAX_TOKENIZER_BYTES: Final = 64 << 20
_MAX_MODELS_BYTES: Final = 1 << 20
_MAX_TRANSITIONS: Final = 512
"""Counts that are kept apart: what models are called is the replicas' word."""
_MAX_SNAPSHOT_FRAMES: Final = 4096
"""Of 1,800 names each: far more than a replica that is followed can hold."""


class _Lost(Exception):
    """The replica, or what we know of it, is gone for now; the message says why."""


class _Mismatch(Exception):
    """The replica is not what its pool needs. Asking again soon will not help."""


class Watcher:
    """Starts, owns and ends the tasks. All knowledge goes into the router."""

    def __init__(
        self,
        router: Router,
        upstream: Upstream,
        prompters: Prompters,
        cards: ModelCards,
        *,
        clock: Callable[[], float],
        probes: ProbeRules | None = None,
    ) -> None:
        self.transitions: Counter[tuple[str, str]] = Counter()
        """How often replicas of a model turned ``up`` or ``down``."""
        self.on_frame: Callable[[], None] | None = None
        """Called when a replica has told something new."""
        self._router = router
        self._upstream = upstream
        self._prompters = prompters
        self._cards = cards
        self._clock = clock
        self._probes = probes or ProbeRules()
        self._healthy: dict[str, bool] = {}  # as last told, of those that were found well before
        self._turns = Turns(clock)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def configure(self, probes: ProbeRules) -> None:
        """From the next answer of each replica on."""
        self._probes = probes

    def start(self, replica_id: str, spec: ReplicaSpec) -> None:
        """Watch a replica that the router knows; a replica watched already is watched anew (it may have moved)."""
        self.stop(replica_id)
        watch = self._watch_own if spec.kind == "warmpath" else self._watch_foreign
        self._tasks[replica_id] = asyncio.create_task(watch(replica_id, spec), name=f"watch {replica_id}")

    def stop(self, replica_id: str) -> None:
        task = self._tasks.pop(replica_id, None)
        if task is not None:
            task.cancel()
        self._healthy.pop(replica_id, None)
        self._cards.forget(replica_id)

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_health(self, replica_id: str, healthy: bool) -> None:
        self._router.set_health(replica_id, healthy, self._clock())
        if self._healthy.get(replica_id, False) is not healthy:
            self._healthy[replica_id] = healthy
            model = self._router.spec(replica_id).model
            if (model, "up") not in self.transitions and len(self.transitions) >= _MAX_TRANSITIONS:
                model = "other"
            self.transitions[model, "up" if healthy else "down"] += 1

    # --- own workers

    async def _watch_own(self, replica_id: str, spec: ReplicaSpec) -> None:
        retry = _Backoff()
        trouble = _Trouble(replica_id)
        while True:
            try:
                await self._load_tokenizer(spec)
                await self._learn_card(replica_id, spec)
                await self._follow(replica_id, spec, retry)
            except _Mismatch as error:
                trouble.say(f"does not fit its pool: {error}")
                self._set_health(replica_id, False)
                retry.slow_down()
            except (_Lost, UpstreamError, FrameError, TokenizerError, msgspec.MsgspecError) as error:
                if not retry.repeated:
                    trouble.over()
                trouble.say(str(error) or type(error).__name__)
                # A cut stream alone is no dead replica: it may be back at once. Silence or a refused connection is. Whether it
                # lives cannot be seen while we have no descriptor to ask with.
                dead = retry.repeated or isinstance(error, (ConnectFailed, UpstreamTimeout))
                if dead and not isinstance(error, LocalExhaustion):
                    self._set_health(replica_id, False)
            except Exception:
                _log.exception("watching replica %s failed", replica_id)
                self._set_health(replica_id, False)
            self._router.events_lost(replica_id, self._clock())
            await retry.wait()

    async def _follow(self, replica_id: str, spec: ReplicaSpec, retry: _Backoff) -> Never:
        """Apply the event stream until it breaks, with a snapshot wherever it has a gap."""
        while True:
            response = await self._get(spec, _events_path(self._router.resume_point(replica_id)))
            try:
                if response.status == 200:
                    await self._apply_until_gap(replica_id, response, retry)
                elif response.status != 410:
                    raise _Lost(f"/kv_events answered {response.status}")
            finally:
                await response.aclose()
            await self._take_snapshot(replica_id, spec)

    async def _apply_until_gap(self, replica_id: str, response: UpstreamResponse, retry: _Backoff) -> None:
        def apply(frame: Frame) -> bool:
            retry.reset()
            return self._apply(replica_id, frame)

        if not await self._take_in(response, apply):
            raise _Lost("the event stream ended")

    async def _take_in(self, response: UpstreamResponse, apply: Callable[[Frame], bool]) -> bool:
        """Apply the frames of a body, by turns, until one asks to stop; whether one did."""
        decoder = FrameDecoder()
        while (chunk := await response.read_chunk()) is not None:
            frames = decoder.feed(chunk)
            more = True
            while more:
                async with self._turns.take() as turn:
                    more = False
                    for frame in frames:
                        if apply(frame):
                            return True
                        if turn.is_over:
                            more = True
                            break
        return False

    def _apply(self, replica_id: str, frame: Frame) -> bool:
        """True when frames are missing."""
        now = self._clock()
        sync = self._router.apply(replica_id, frame, now)
        self._require_match(replica_id, sync)
        if sync is Sync.OK:
            self._set_health(replica_id, True)
            if self.on_frame is not None:
                self.on_frame()
        return sync is Sync.GAP

    async def _take_snapshot(self, replica_id: str, spec: ReplicaSpec) -> None:
        count = 0

        def apply(frame: Frame) -> bool:
            nonlocal count
            count += 1
            if count > _MAX_SNAPSHOT_FRAMES:
                raise _Lost("the snapshot does not end")
            self._require_snapshot(replica_id, self._router.apply_snapshot(replica_id, frame, self._clock()))
            return False

        response = await self._get(spec, "/kv_snapshot")
        try:
            if response.status != 200:
                raise _Lost(f"/kv_snapshot answered {response.status}")
            await self._take_in(response, apply)
        finally:
            await response.aclose()
        self._require_snapshot(replica_id, self._router.end_snapshot(replica_id))

    def _require_snapshot(self, replica_id: str, sync: Sync) -> None:
        self._require_match(replica_id, sync)
        if sync is not Sync.OK:
            raise _Lost("the snapshot cannot be true")

    def _require_match(self, replica_id: str, sync: Sync) -> None:
        if sync is Sync.MISMATCH:
            raise _Mismatch(next(view.mismatch for view in self._router.replicas() if view.id == replica_id))

    async def _load_tokenizer(self, spec: ReplicaSpec) -> None:
        response = await self._get(spec, "/tokenizer")
        try:
            if response.status != 200:
                raise _Lost(f"/tokenizer answered {response.status}")
            body = await response.read(_MAX_TOKENIZER_BYTES)
        finally:
            await response.aclose()
        await self._prompters.load(msgspec.json.decode(body, type=TokenizerFiles))

    # --- foreign replicas

    async def _watch_foreign(self, replica_id: str, spec: ReplicaSpec) -> None:
        trouble = _Trouble(replica_id)
        health = Health()
        while True:
            answer = Answer.BAD
            try:
                async with asyncio.timeout(self._probes.timeout_s):
                    await self._probe(replica_id, spec)
            except LocalExhaustion as error:
                trouble.say(str(error))  # we could not ask, so what was known stays
                await asyncio.sleep(_FIRST_RETRY_S * 10)
                continue
            except ConnectRefused as error:
                trouble.say(type(error).__name__)
                answer = Answer.NOBODY
            except TimeoutError:
                trouble.say(f"gave no answer within {self._probes.timeout_s:g} s")
            except (_Lost, UpstreamError, msgspec.MsgspecError) as error:
                trouble.say(str(error) or type(error).__name__)
            except (_Mismatch, PoolMismatch) as error:
                trouble.say(f"does not fit its pool: {error}")
                answer = Answer.NOBODY  # that is certain, and not a matter of how often
            except Exception:
                _log.exception("watching replica %s failed", replica_id)
            else:
                answer = Answer.GOOD
            if answer is not Answer.GOOD:
                self._cards.forget(replica_id)  # it may come back with other limits, or another model
            healthy = health.count(answer, self._probes)
            if healthy and answer is Answer.GOOD:
                trouble.over()
            self._set_health(replica_id, healthy)
            await asyncio.sleep(health.wait_s(self._probes, random.random()))  # noqa: S311

    async def _probe(self, replica_id: str, spec: ReplicaSpec) -> None:
        """Healthy by /health where there is one, and by its list of models: whoever restarts it with another model does not ask
        us. A replica without a model learns it there, and one with a model must list it.

        Raises what is wrong with it: `_Lost`, `UpstreamError`, `MsgspecError`, `PoolMismatch`, `_Mismatch`.
        """
        known = self._router.spec(replica_id)
        status = await self._status(spec, "/health")
        if status not in (200, 404, 405):
            raise _Lost(f"/health answered {status}")
        listed = await self._list_models(spec)
        if not known.model:
            if not listed:
                raise _Lost("/v1/models names no model")
            known = msgspec.structs.replace(spec, model=listed[0].id)
            self._router.add(replica_id, known, self._clock())
        mismatch = (
            "" if any(card.id == known.model for card in listed) else f"it does not list the model {known.model!r}"
        )
        self._router.set_mismatch(replica_id, mismatch)
        if mismatch:
            raise _Mismatch(mismatch)
        self._cards.learn(replica_id, known.model, listed)

    async def _learn_card(self, replica_id: str, spec: ReplicaSpec) -> None:
        """What its list says of its model; a replica that gives none serves all the same."""
        with contextlib.suppress(_Lost, UpstreamError, msgspec.MsgspecError):
            self._cards.learn(replica_id, spec.model, await self._list_models(spec))

    async def _list_models(self, spec: ReplicaSpec) -> list[ModelCard]:
        response = await self._get(spec, "/v1/models")
        try:
            if response.status != 200:
                raise _Lost(f"/v1/models answered {response.status}")
            return parse_models(await response.read(_MAX_MODELS_BYTES))
        finally:
            await response.aclose()

    async def _status(self, spec: ReplicaSpec, path: str) -> int:
        response = await self._get(spec, path)
        await response.aclose()
        return response.status

    async def _get(self, spec: ReplicaSpec, path: str) -> UpstreamResponse:
        origin, prefix = Origin.parse(spec.url)
        headers = [(b"authorization", b"Bearer " + spec.credential.encode())] if spec.credential else []
        return await self._upstream.send(
            UpstreamRequest(
                method="GET", origin=origin, path=prefix + path, headers=headers, body=b"", timeouts=_TIMEOUTS
            )
        )


def _events_path(resume: tuple[str, int] | None) -> str:
    if resume is None:
        return "/kv_events"
    epoch, after = resume
    return f"/kv_events?epoch={epoch}&after={after}"


class _Trouble:
    """Says what is wrong with a replica, and once: a dead one is asked every few seconds for as long as it is known."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._said = ""

    def say(self, what: str) -> None:
        if what != self._said:
            _log.warning("replica %s: %s", self._replica_id, what)
            self._said = what

    def over(self) -> None:
        self._said = ""


class _Backoff:
    """Waits that double while nothing works, with jitter, so that a fleet does not come back as a herd."""

    def __init__(self) -> None:
        self._next_s = _FIRST_RETRY_S

    @property
    def repeated(self) -> bool:
        """Whether there was a wait since the last success."""
        return self._next_s > _FIRST_RETRY_S

    def reset(self) -> None:
        self._next_s = _FIRST_RETRY_S

    def slow_down(self) -> None:
        self._next_s = _LONGEST_RETRY_S

    async def wait(self) -> None:
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, _LONGEST_RETRY_S)
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311
