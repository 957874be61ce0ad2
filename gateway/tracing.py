"""OpenTelemetry traces of the data path: one SERVER span a request, one CLIENT span for each try at a replica.

    POST /v1/chat/completions     SERVER: from the request's arrival to the end of its answer
      chat qwen3-8b               CLIENT: one try; a replica that knows `traceparent` hangs its own spans below it

Every name of a span or attribute is here. They follow the semantic conventions for HTTP and generative AI; what those have no
name for is ``warmpath.*``. Content is never recorded: no prompt, answer, header, key, path or query of the client's, only
our own ids, names of models and replicas, numbers, and error codes from fixed sets.

Whether a trace is recorded is decided when the request arrives, by its caller's flag or by chance, and its ids are drawn then.
The spans themselves are made when the request has ended, from what its record says: a request that is not sampled takes a
`Trace` that was made with many others, and one that is costs nothing before its last byte went out. What sends them is
`gateway.otlp`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from gateway.openai import Usage
from router import Decision, Outcome
from router.trace_context import TraceContext, parse_traceparent

if TYPE_CHECKING:
    from gateway.job import Record

__all__ = ["TRACE_HEADERS", "UNTRACED", "Attempt", "SpanExport", "Trace", "Tracer", "Value"]

Header = tuple[bytes, bytes]
Value = str | int | float | bool | Sequence[str]

_OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""``gen_ai.operation.name``; others are named by their path."""

TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate", b"baggage"})
"""All that `Tracer.begin` looks at."""

_TRACE_CHARS: Final = 32
_SPAN_CHARS: Final = 16
_MADE_AT_ONCE: Final = 64
"""Traces, in a tenth of a millisecond."""

_MAX_READ_BYTES: Final = 1 << 20
"""Of a body or answer that is looked at once more for a span's attributes: 1 ms. What is longer goes without them."""
_MAX_ID_CHARS: Final = 128
_NO_PARAMETERS: Final[Mapping[str, Value]] = MappingProxyType({})


@dataclass(slots=True)
class Attempt:
    """One try at a replica, as its span will tell it: filled in as it happens. Times are monotonic seconds."""

    context: TraceContext
    """Of the span. Its replica sees this one as its parent, not the client's."""
    decision: Decision
    provider: str
    url: str
    began_at: float
    ended_at: float = 0.0
    first_byte_at: float | None = None
    outcome: Outcome = Outcome.CANCELLED
    error_code: str = ""
    usage: Usage | None = None
    answer: dict[str, Value] = field(default_factory=dict)
    """Attributes found in the answer."""

    def read_answer(self, body: bytes) -> None:
        """Note id, model and finish reasons of a whole answer."""
        if len(body) <= _MAX_READ_BYTES:
            self.answer.update(_answer_attributes(body))

    def read_event(self, data: bytes) -> None:
        """The same of the first events of a stream."""
        begin = data.find(b"data: {")
        if begin >= 0 and len(data) <= _MAX_READ_BYTES:
            self.answer.update(_answer_attributes(data[begin + 6 :].partition(b"\n")[0]))

    def ended(self, now: float, outcome: Outcome, usage: Usage | None) -> None:
        self.ended_at, self.outcome, self.usage = now, outcome, usage

    def finished(self, reasons: Sequence[str]) -> None:
        """Why the choices of a stream ended."""
        if reasons:
            self.answer["gen_ai.response.finish_reasons"] = reasons


class Trace(msgspec.Struct):
    """One request's place in the traces. Made for every request; only a sampled one has spans."""

    context: TraceContext | None
    """Of the SERVER span; of the client's own where nothing is recorded; None where there is no trace at all."""
    parent: TraceContext | None
    """The client's span."""
    told: Sequence[Header]
    """To replicas, where nothing is recorded: `traceparent`, if there is a trace, then `tracestate` and `baggage` as they
    came."""
    sampled: bool = False
    """Whether spans are wanted."""
    attempts: Sequence[Attempt] = ()
    parameters: Mapping[str, Value] = _NO_PARAMETERS
    """Attributes found in the request."""

    @property
    def trace_id(self) -> str:
        return self.context.trace_id if self.context is not None else ""

    def begin_attempt(self, decision: Decision, provider: str, url: str, now: float) -> Attempt | None:
        """None where nothing is recorded."""
        if not self.sampled:
            return None
        assert self.context is not None
        context = TraceContext(self.context.trace_id, _new_span_id(), sampled=True)
        attempt = Attempt(context, decision, provider, url, now)
        self.attempts = [*self.attempts, attempt]
        return attempt

    def headers(self, attempt: Attempt | None) -> Sequence[Header]:
        """For the replica. Of a try that is recorded, that one is its parent."""
        if attempt is None:
            return self.told
        return [(b"traceparent", attempt.context.traceparent), *self.told[1:]]

    def read_request(self, body: bytes) -> None:
        """Note what the request asks for, as far as it is numbers. Called for sampled ones only."""
        if len(body) <= _MAX_READ_BYTES:
            self.parameters = _request_attributes(body)


UNTRACED: Final = Trace(None, None, ())
"""Of requests that neither their client nor we know a trace for. It has no spans, so nothing is ever written to it."""


class SpanExport(Protocol):
    """Where finished spans go."""

    def emit(
        self,
        name: str,
        *,
        client: bool,
        context: TraceContext,
        parent: TraceContext | None,
        attributes: Mapping[str, Value],
        failed: bool,
        began_at: float,
        ended_at: float,
    ) -> None:
        """Never waits. Times are Unix seconds."""
        ...

    def close(self) -> None:
        """Send what is left, and wait for it, at most a few seconds."""
        ...


class Tracer:
    """Decides which requests have traces, and tells theirs. `export` is None where traces are off."""

    def __init__(
        self,
        export: SpanExport | None = None,
        *,
        sample_ratio: float = 0.0,
        follow_caller: bool = True,
        unix_offset: Callable[[], float] = lambda: 0.0,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`follow_caller`: a client that says whether its trace is recorded decides it for us, too. `unix_offset`: add it to
        a time of the records to get Unix seconds.
        """
        self._export = export
        self._ratio = sample_ratio
        self._follow_caller = follow_caller
        self._unix_offset = unix_offset
        self._draw = draw
        self._unsampled: list[Trace] = []
        """Nobody's yet."""

    def begin(self, headers: Sequence[Header]) -> Trace:
        """A request's trace, from its headers, or from those of `TRACE_HEADERS`."""
        return self._follow(headers) if headers else self._begin()

    def _begin(self) -> Trace:
        """Of a client that has none."""
        if self._export is None:
            return UNTRACED
        if self._draw() < self._ratio:
            return _trace(_new_contexts(1, sampled=True)[0])
        if not self._unsampled:
            self._unsampled = [_trace(context) for context in _new_contexts(_MADE_AT_ONCE, sampled=False)]
        return self._unsampled.pop()

    def _follow(self, headers: Sequence[Header]) -> Trace:
        """Of a client that says something of its own one."""
        given = [value for name, value in headers if name == b"traceparent"]
        parent = parse_traceparent(given[0]) if len(given) == 1 else None
        if parent is None:  # and without it a tracestate means nothing
            trace = self._begin()
            return msgspec.structs.replace(
                trace, told=[*trace.told, *(pair for pair in headers if pair[0] == b"baggage")]
            )
        passed_on = [pair for pair in headers if pair[0] in (b"tracestate", b"baggage")]
        if self._export is None or not self._wants(parent):
            return _trace(parent, parent, passed_on)
        return _trace(TraceContext(parent.trace_id, _new_span_id(), sampled=True), parent, passed_on)

    def _wants(self, parent: TraceContext) -> bool:
        return parent.sampled if self._follow_caller else self._draw() < self._ratio

    def finished(self, record: Record) -> None:
        """Hand the spans of a request that ended to the exporter."""
        trace = record.trace
        if self._export is None or not trace.sampled or trace.context is None:
            return
        offset = self._unix_offset()
        for attempt in trace.attempts:
            self._export.emit(
                f"{_operation(record.endpoint)} {record.model}",
                client=True,
                context=attempt.context,
                parent=trace.context,
                attributes=_attempt_attributes(record, attempt),
                failed=bool(_error_type(record, attempt)),
                began_at=attempt.began_at + offset,
                ended_at=attempt.ended_at + offset,
            )
        self._export.emit(
            f"{record.method} {record.endpoint}",
            client=False,
            context=trace.context,
            parent=trace.parent,
            attributes=_request_span_attributes(record),
            failed=record.status >= 500,
            began_at=record.started_at + offset,
            ended_at=record.started_at + record.duration_s + offset,
        )

    async def aclose(self) -> None:
        """Send what is left. Bounded, whatever the collector does."""
        if self._export is not None:
            await asyncio.to_thread(self._export.close)


def _trace(context: TraceContext, parent: TraceContext | None = None, passed_on: Sequence[Header] = ()) -> Trace:
    """`context` is the client's own, `parent`, where nothing is recorded."""
    told = [(b"traceparent", context.traceparent), *passed_on]
    return Trace(context, parent, told, sampled=context.sampled and context is not parent)


def _new_contexts(count: int, *, sampled: bool) -> list[TraceContext]:
    """Of traces that begin here."""
    step = _TRACE_CHARS + _SPAN_CHARS
    drawn = f"{random.getrandbits(4 * step * count):0{step * count}x}"
    return [
        TraceContext(drawn[start : start + _TRACE_CHARS], drawn[start + _TRACE_CHARS : start + step], sampled)
        for start in range(0, len(drawn), step)
    ]


def _new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def _operation(endpoint: str) -> str:
    return _OPERATIONS.get(endpoint, endpoint.lstrip("/"))


def _request_span_attributes(record: Record) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "http.request.method": record.method,
        "http.route": record.endpoint,
        "url.path": record.endpoint,
        "url.scheme": "http",
        "http.response.status_code": record.status,
        "warmpath.request_id": record.request_id,
        "warmpath.tries": record.tries,
        "warmpath.queue_wait": record.queued_s,
    }
    optional: dict[str, Value | None] = {
        "error.type": record.error_code or (str(record.status) if record.status >= 500 else None),
        "warmpath.key_id": record.key_id or None,
        "warmpath.tenant": record.tenant or None,
    }
    attributes.update({name: value for name, value in optional.items() if value is not None})
    return attributes


def _attempt_attributes(record: Record, attempt: Attempt) -> dict[str, Value]:
    decision, usage = attempt.decision, attempt.usage
    address = urlsplit(attempt.url)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": _operation(record.endpoint),
        "gen_ai.provider.name": attempt.provider,
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        **record.trace.parameters,
        **attempt.answer,
        "server.address": address.hostname or "",
        "warmpath.replica": decision.replica_id,
        "warmpath.decision.policy": decision.policy,
        "warmpath.decision.reason": decision.reason,
        "warmpath.predicted_cached_tokens": decision.matched_tokens,
        "warmpath.outcome": attempt.outcome.value,
    }
    first_s = attempt.first_byte_at - attempt.began_at if attempt.first_byte_at is not None else None
    optional: dict[str, Value | None] = {
        "server.port": address.port or (443 if address.scheme == "https" else 80),
        "gen_ai.response.time_to_first_chunk": first_s if record.stream else None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens if usage is not None else None,
        "gen_ai.usage.output_tokens": usage.completion_tokens if usage is not None else None,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens if usage is not None else None,
        "error.type": _error_type(record, attempt),
    }
    attributes.update({name: value for name, value in optional.items() if value is not None})
    return attributes


def _error_type(record: Record, attempt: Attempt) -> str | None:
    match attempt.outcome:
        case Outcome.OK:
            return None
        case Outcome.CANCELLED:
            return "client_gone"
        case Outcome.CLIENT_ERROR:
            return str(record.status)
        case _:
            return attempt.error_code or record.error_code or "upstream_lost"


# --- attributes from bodies: types are checked here, so that a number's field can carry no text ---------------------------


class _Parameters(msgspec.Struct):
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    n: Any = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    id: str = ""
    model: str = ""
    choices: list[_Choice] = []


_parameters_decoder = msgspec.json.Decoder(_Parameters)
_answer_decoder = msgspec.json.Decoder(_Answer)


def _request_attributes(body: bytes) -> dict[str, Value]:
    try:
        found = _parameters_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    most = next((n for n in (found.max_completion_tokens, found.max_tokens, found.max_output_tokens) if n), None)
    asked: dict[str, Any] = {
        "gen_ai.request.max_tokens": most,
        "gen_ai.request.temperature": found.temperature,
        "gen_ai.request.top_p": found.top_p,
        "gen_ai.request.seed": found.seed,
        "gen_ai.request.choice.count": found.n if found.n != 1 else None,
    }
    return {name: value for name, value in asked.items() if type(value) in (int, float) and abs(value) < 1 << 63}


def _answer_attributes(body: bytes) -> dict[str, Value]:
    try:
        found = _answer_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    reasons = [choice.finish_reason for choice in found.choices if choice.finish_reason]
    told: dict[str, Value] = {
        "gen_ai.response.id": found.id[:_MAX_ID_CHARS],
        "gen_ai.response.model": found.model[:_MAX_ID_CHARS],
        "gen_ai.response.finish_reasons": reasons,
    }
    return {name: value for name, value in told.items() if value}
