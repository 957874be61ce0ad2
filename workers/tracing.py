"""A replica's part of a trace: where the time of one sequence went, below the span of the gateway that sent it.

    queue      from its submission to the first step that ran some of it
    prefill    from there to its first token: what the cache did not hold was computed
    decode     from there to its end

The engine measures the prefill, since only it sees its steps; the spans are made after the fact, when the sequence has ended.
A request without a sampled ``traceparent`` has none: whoever sends requests here decides what is recorded. Content is never
in them. The SDK is imported where traces are on and nowhere else; a thread of its own sends them from a bounded queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from starlette.types import Scope

from router.trace_context import TraceContext, parse_traceparent
from workers.asgi import headers_named
from workers.life import Life

__all__ = ["Tracer", "otlp_tracer", "sampled_parent"]

_SERVICE: Final = "warmpath-worker"
_CLOSE_S: Final = 3.0


class Tracer(Protocol):
    def tell(self, life: Life, parent: TraceContext) -> None:
        """Record a sequence's spans. Never waits."""
        ...

    def close(self) -> None:
        """Send what is left, and wait for it, at most a few seconds."""
        ...


def sampled_parent(scope: Scope) -> TraceContext | None:
    """The span that sent this request, if its trace is recorded."""
    given = headers_named(scope, b"traceparent")
    parent = parse_traceparent(given[0]) if len(given) == 1 else None
    return parent if parent is not None and parent.sampled else None


def otlp_tracer(endpoint: str, unix_offset: Callable[[], float]) -> Tracer:
    """Spans by OTLP over HTTP to `endpoint`. `unix_offset`: add it to a monotonic time to get Unix seconds."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the environment gives none
        resource = resource.merge(Resource({SERVICE_NAME: _SERVICE}))
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    tracer = provider.get_tracer(_SERVICE)

    class Otlp:
        def tell(self, life: Life, parent: TraceContext) -> None:
            ids = int(parent.trace_id, 16), int(parent.span_id, 16)
            sender = SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            below = set_span_in_context(NonRecordingSpan(sender))
            offset = unix_offset()
            about: dict[str, str | int] = {
                "gen_ai.request.model": life.model,
                "warmpath.request_id": life.request_id,
                "warmpath.choice": life.choice,
            }
            prefill: dict[str, str | int] = {
                "gen_ai.usage.input_tokens": life.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": life.cached_tokens,
            }
            decode: dict[str, str | int] = {
                "gen_ai.usage.output_tokens": life.generated_tokens,
                "warmpath.ending": life.ending,
            }
            stages: list[tuple[str, float | None, float, dict[str, str | int]]] = [
                ("queue", life.submitted_at, life.ended_at if life.prefill_at is None else life.prefill_at, {}),
                ("prefill", life.prefill_at, life.ended_at if life.first_at is None else life.first_at, prefill),
                ("decode", life.first_at, life.ended_at, decode),
            ]
            for name, began_at, ended_at, more in stages:
                if began_at is None:
                    break
                start_time = int((began_at + offset) * 1e9)
                span = tracer.start_span(name, below, attributes={**about, **more}, start_time=start_time)
                if life.ending == "error" and ended_at == life.ended_at:
                    span.set_status(Status(StatusCode.ERROR))
                span.end(int((ended_at + offset) * 1e9))

        def close(self) -> None:
            closing = threading.Thread(target=provider.shutdown, name="traces-close", daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    return Otlp()
