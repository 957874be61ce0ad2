"""One admitted request's life: decide, try, relay, settle.

The commit point is the first body byte: the status line is held until then, so a replica that refuses, hangs or dies early
costs the client nothing but time: the request goes to another replica, once, as long as not too many others do
(`gateway.retries`). A stream that waits long for its first token is committed early and kept alive with comments
(`gateway.early_commit`); it may still go elsewhere, but its errors are events. After the first token a failure is one error
event without ``[DONE]``. Every reservation is released exactly once, whatever happens (`gateway.held`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from gateway.admission import Admission, NotAdmitted
from gateway.api_error import ApiError
from gateway.early_commit import STREAM_HEADERS, EarlyCommit
from gateway.failures import (
    all_busy,
    bad_upstream,
    not_admitted,
    overloaded,
    passed_on,
    quarantined,
)
from gateway.forwarding import Forwarding
from gateway.held import Held, TryElsewhere
from gateway.homes import Home, Homes
from gateway.job import Job, Record
from gateway.openai import Usage, parse_response, parse_usage
from gateway.response_events import ResponseRelay
from gateway.retries import Quarantine, RetryBudget
from gateway.server.exchange import Header
from gateway.server.reply import Reply
from gateway.sse import EventRelay, SseRelay
from gateway.upstream.contract import (
    LocalExhaustion,
    Origin,
    Timeouts,
    Upstream,
    UpstreamClosed,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
)
from router import Asked, Decision, Outcome, Placed, Router, Unroutable
from router.wire import PromptField, ReplicaSpec

__all__ = ["Dispatcher"]

_MAX_TRIES: Final = 2
_MAX_SENDS: Final = 4
"""Those included where the replica said busy, after which a request waits for the next one. Where it refused the connection
nothing was sent: that is known at once, and of each replica once."""
_MAX_ANSWER_BYTES: Final = 64 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_MAX_BUSY_S: Final = 60.0
_END_S: Final = 0.5
_MAX_END_BYTES: Final = 4 << 10


class Dispatcher:
    """Sends jobs to replicas. The router knows what is promised, the upstream what is open; this knows what may be retried."""

    def __init__(
        self,
        router: Router,
        upstream: Upstream,
        homes: Homes,
        admission: Admission,
        quarantine: Quarantine,
        *,
        timeouts: Timeouts,
        commit_after_s: float,
        ping_s: float,
        clock: Callable[[], float],
        unix_time: Callable[[float], float],
        draw: Callable[[], float],
        on_gap: Callable[[str, float], None],
        on_failed_try: Callable[[str, str], None],
    ) -> None:
        """`unix_time`: of a moment on `clock`. `draw`: [0, 1), breaks ties. `on_gap`: called with (model, seconds) between two
        chunks of a stream, and `on_failed_try` with (model, error code) for each try that came to nothing.
        """
        self._router = router
        self._upstream = upstream
        self._homes = homes
        self._admission = admission
        self._timeouts = timeouts
        self._commit_after_s = commit_after_s
        self._ping_s = ping_s
        self._clock = clock
        self._unix_time = unix_time
        self._draw = draw
        self._on_gap = on_gap
        self._on_failed_try = on_failed_try
        self._budget = RetryBudget()
        self._quarantine = quarantine

    def configure(self, timeouts: Timeouts, *, commit_after_s: float, ping_s: float) -> None:
        """For tries that begin from now on."""
        self._timeouts = timeouts
        self._commit_after_s = commit_after_s
        self._ping_s = ping_s

    async def answer(self, job: Job, reply: Reply, record: Record) -> None:
        """Answer through `reply`. Raises `ApiError` as long as its answer has not begun; its status may be out by then."""
        if record.trace.sampled:
            record.trace.read_request(job.request.body)
        if self._quarantine and self._quarantine.holds(job.fingerprint, self._clock()):
            raise quarantined(422)
        self._budget.active += 1
        early = EarlyCommit(reply, self._commit_after_s, self._ping_s) if job.request.stream else None
        try:
            await self._try_in_turn(job, reply, record, early)
        finally:
            self._budget.active -= 1
            if early is not None:
                early.end()

    async def _try_in_turn(self, job: Job, reply: Reply, record: Record, early: EarlyCommit | None) -> None:
        """A replica that refuses connections is passed over, and one that was lost works on nothing any more: trying the next
        one multiplies nobody's load. Where one failed or is silent it does, and that has a budget.
        """
        tried: frozenset[str] = frozenset()
        error: ApiError | None = None
        sent = reached = 0
        has_failed = False
        while sent < _MAX_TRIES and reached < _MAX_SENDS:
            budgeted = has_failed
            if budgeted and not self._budget.try_begin():
                break
            try:
                asked = self._asked(job, tried)
                placed = self._place(asked) or await self._wait(asked, record)
                with Held(self._router, placed.reservation, self._clock, self._admission.heard) as held:
                    record.decision = placed.decision
                    record.tries += 1
                    await self._try(job, placed, held, reply, record, early)
            except NotAdmitted as refusal:
                if not tried:
                    error = not_admitted(refusal.why, job.request.model)
                break
            except TryElsewhere as failure:
                error = failure.error
                self._on_failed_try(job.request.model, error.code)
                reached += failure.was_sent
                if failure.was_busy and not tried and job.home is None:
                    continue  # the router knows until when; meanwhile another one may be free
                replica_id = placed.decision.replica_id
                tried |= {replica_id}
                sent += failure.was_sent
                has_failed = failure.was_sent and not failure.was_lost
                if failure.was_lost and self._crashed(job, replica_id, placed.reservation.begun_at):
                    raise quarantined(500) from failure
            else:
                return
            finally:
                if budgeted:
                    self._budget.end()
        assert error is not None
        if sent and error.status >= 500:
            error.should_retry = False  # a client that comes back at once would multiply what we have tried in vain
        raise error

    def _place(self, asked: Asked) -> Placed | None:
        """Where to send it, with its work promised there. Raises `NotAdmitted`.

        None: it has to wait for that, which only the first try does. What cannot go everywhere does not wait: a second try has
        waited, and where only one replica will do, its place in the queue would hold up those who could go elsewhere.
        """
        query = asked.query
        if not query.exclude:
            return self._admission.try_pass(asked)
        now = self._clock()
        decision = self._router.route(query, now, self._draw())
        if isinstance(decision, Unroutable):
            raise NotAdmitted(decision)
        return Placed(decision, self._router.begin(decision, query, asked.request_id, now))

    async def _wait(self, asked: Asked, record: Record) -> Placed:
        began = self._clock()
        try:
            return await self._admission.wait(asked, record.started_at)
        finally:
            record.queued_s += self._clock() - began

    def _asked(self, job: Job, tried: frozenset[str]) -> Asked:
        query = job.prompt.query(job.request, self._excluded(job, tried))
        return Asked(query, job.request_id, job.owner, job.weight, job.priority)

    def _excluded(self, job: Job, tried: frozenset[str]) -> frozenset[str]:
        """A request that has a home goes there or nowhere."""
        if job.home is None:
            return tried
        return tried | {replica.id for replica in self._router.replicas() if replica.id != job.home}

    async def _try(
        self, job: Job, placed: Placed, held: Held, reply: Reply, record: Record, early: EarlyCommit | None
    ) -> None:
        spec = self._router.spec(held.replica_id)
        held.attempt = record.trace.begin_attempt(placed.decision, spec.kind, spec.url, held.begun_at)
        try:
            trace = record.trace.headers(held.attempt)
            if job.staged:
                await asyncio.sleep(0)
            response = await self._upstream.send(self._upstream_request(job, placed, spec, trace))
        except LocalExhaustion as error:
            raise overloaded() from error  # another replica would need a connection as well
        except UpstreamError as error:
            raise held.failed(error) from error
        try:
            if response.status != 200:
                await self._pass_refusal(response, job, held, reply)
            elif early is not None:
                await self._relay_stream(response, job, held, reply, record, early)
            else:
                await self._relay_whole(response, job, held, reply, record)
        finally:
            if not response.ended:
                await response.aclose()

    def _upstream_request(
        self, job: Job, placed: Placed, spec: ReplicaSpec, trace: Sequence[Header]
    ) -> UpstreamRequest:
        request = job.request
        origin, prefix, usual_headers = _address(spec.url, spec.credential, request.method)
        extra: dict[str, Any] = {}
        if spec.kind == "warmpath":
            field = PromptField(
                escape=job.prompt.escape,
                salt=job.salt,
                seed=job.seed,
                request_id=job.request_id,
                priority=placed.engine_priority(job.priority),
                patience=self._router.patience,
            )
            extra["warmpath"] = msgspec.Raw(field.encode(job.prompt.ids or b""))
        elif spec.priority and request.computes:
            extra["priority"] = placed.engine_rank(job.priority, self._unix_time(placed.reservation.begun_at))
        return UpstreamRequest(
            method=request.method,
            origin=origin,
            path=prefix + request.path,
            usual_headers=usual_headers,
            headers=[(b"x-request-id", job.request_id.encode()), *trace],
            body=request.upstream_body(extra),
            timeouts=self._timeouts,
            ready="body" if request.stream else "whole",
        )

    async def _pass_refusal(self, response: UpstreamResponse, job: Job, held: Held, reply: Reply) -> None:
        """A status other than 200: the client's mistake passes through, a busy or broken replica is left for another."""
        status = response.status
        headers = dict(response.headers)
        wait_s = _retry_after(headers)
        if status == 429 or (status == 503 and wait_s is not None):
            held.outcome = Outcome.BUSY
            wait_s = min(wait_s if wait_s is not None else 1.0, _MAX_BUSY_S)
            self._router.busy(held.replica_id, self._clock() + wait_s)
            error = all_busy(wait_s)
            if held.attempt is not None:
                held.attempt.error_code = error.code
            raise TryElsewhere(error, was_busy=True)
        if status in (401, 403) or (status >= 500 and status != 501) or status < 400:
            raise held.failed(bad_upstream(f"A replica answered with status {status}."))
        try:
            status, body = passed_on(status, await response.read(_MAX_ERROR_BYTES), job.request)
        except (UpstreamError, msgspec.MsgspecError) as error:
            raise held.failed(bad_upstream("A replica refused the request without saying why.")) from error
        held.outcome = Outcome.CLIENT_ERROR
        await reply.json(status, body)

    async def _relay_whole(
        self, response: UpstreamResponse, job: Job, held: Held, reply: Reply, record: Record
    ) -> None:
        try:
            body = await response.read(_MAX_ANSWER_BYTES)
            usage = self._read_response(body, job, record) if job.request.is_response else parse_usage(body)
        except (UpstreamError, msgspec.MsgspecError) as error:
            raise held.failed(error) from error
        held.answered()
        if held.attempt is not None:
            held.attempt.read_answer(body)
        elapsed_s = self._clock() - record.started_at
        record.usage, record.is_answered = usage, True  # made and paid for, even if the client takes none of it
        if job.request.generates:
            record.first_byte_s = elapsed_s
        await reply.json(200, body, _answer_headers(job, record, elapsed_s))
        if job.staged:
            await asyncio.sleep(0)
        self._settle(usage, job, held, record)

    def _read_response(self, body: bytes, job: Job, record: Record) -> Usage | None:
        """Of a new response its usage; one that was there already is counted no second time."""
        response = parse_response(body)
        if job.request.subpath:
            return None
        self._remember(response.id, job, record)
        return response.usage

    def _remember(self, response_id: str, job: Job, record: Record) -> None:
        """Where a response was made, and where the one that it followed must have been known."""
        assert record.decision is not None
        home = Home(record.decision.replica_id, job.request.model)
        for name in (response_id, job.request.follows if job.home is None else None):
            if name:
                self._homes.made(job.owner, name, home)

    async def _relay_stream(
        self, response: UpstreamResponse, job: Job, held: Held, reply: Reply, record: Record, early: EarlyCommit
    ) -> None:
        relay = ResponseRelay() if job.request.is_response else SseRelay(strip_usage=not job.request.include_usage)
        try:
            _require_event_stream(response)
            data = await _first_output(response, relay)
        except (UpstreamError, ApiError) as error:
            raise held.failed(error) from error

        held.answered()
        if held.attempt is not None:
            held.attempt.read_event(data)
        early.end()
        if isinstance(relay, ResponseRelay) and not job.request.subpath:
            self._remember(relay.response_id, job, record)
        forwarding = Forwarding(relay, reply, job.request.model, self._clock, self._on_gap)
        record.first_byte_s = forwarding.last_at - record.started_at
        try:
            if reply.status is None:
                await reply.start(200, [*STREAM_HEADERS, *_answer_headers(job, record, record.first_byte_s)])
            await reply.chunk(data)
            await forwarding.run(response)
        except UpstreamError as error:
            complete = False
            if isinstance(error, UpstreamClosed):
                self._crashed(job, held.replica_id, held.begun_at)
        else:
            complete = relay.done
        finally:
            record.output_events = relay.events
        if held.attempt is not None:
            held.attempt.finished(relay.finish_reasons)
        if not complete:
            held.outcome = Outcome.FAILED
            record.error_code = "upstream_lost"
            message = "The replica was lost in the middle of this answer."
            await reply.end(relay.error_event(message, code="upstream_lost"))
            return
        await reply.end()
        self._settle(relay.usage if not job.request.subpath else None, job, held, record)
        if not response.ended:
            await _read_to_end(response)

    def _crashed(self, job: Job, replica_id: str, begun_at: float) -> bool:
        return self._quarantine.crashed(job.fingerprint, replica_id, begun_at, self._clock())

    def _settle(self, usage: Usage | None, job: Job, held: Held, record: Record) -> None:
        held.outcome = Outcome.OK
        record.usage = held.usage = usage
        record.is_answered = True
        if usage is not None:
            self._admission.answered(job.request.model, job.owner, usage.completion_tokens)


@lru_cache(maxsize=1024)
def _address(url: str, credential: str, method: str) -> tuple[Origin, str, tuple[Header, ...]]:
    """Origin and path prefix of a replica, and what is the same in the heads of all requests to it."""
    origin, prefix = Origin.parse(url)
    headers: list[Header] = []
    if method == "POST":
        headers.append((b"content-type", b"application/json"))
    if credential:
        headers.append((b"authorization", b"Bearer " + credential.encode()))
    return origin, prefix, tuple(headers)


async def _first_output(response: UpstreamResponse, relay: EventRelay) -> bytes:
    """Everything up to and with the first event that carries a part of the answer: what comes before it commits nothing."""
    output = b""
    while not relay.events:
        chunk = await response.read_chunk()
        output += relay.feed(chunk) if chunk is not None else relay.flush()
        if chunk is None and not relay.events:
            raise bad_upstream("A replica ended its stream before it began.")
        if len(output) > 2 * relay.max_event_bytes:
            raise bad_upstream("A replica did not begin its answer.")
    return output


async def _read_to_end(response: UpstreamResponse) -> None:
    """Only a connection whose answer was read to its end can be used again; usually that end is here already."""
    with contextlib.suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(_END_S):
            await response.read(_MAX_END_BYTES)


def _require_event_stream(response: UpstreamResponse) -> None:
    kind = dict(response.headers).get(b"content-type", b"")
    if not kind.startswith(b"text/event-stream"):
        raise bad_upstream("A replica answered a stream request with something else.")


def _retry_after(headers: Mapping[bytes, bytes]) -> float | None:
    value = headers.get(b"retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return 1.0
    return 1.0 if math.isnan(seconds) else max(seconds, 0.0)


def _answer_headers(job: Job, record: Record, elapsed_s: float) -> list[Header]:
    headers = [(b"openai-processing-ms", b"%d" % (1000 * elapsed_s))]
    if job.debug and record.decision is not None:
        headers.append(_decision_header(record.decision))
    return headers


def _decision_header(decision: Decision) -> Header:
    value = (
        f'replica="{decision.replica_id}", matched={decision.matched_tokens}, prompt={decision.prompt_tokens}, '
        f'reason="{decision.reason}"'
    )
    return b"x-warmpath-decision", value.encode("latin-1", "replace")
