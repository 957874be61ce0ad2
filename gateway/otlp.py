"""Spans to a collector: the one place that knows OpenTelemetry's SDK, imported only where traces are on.

The SDK's own thread sends them, from a bounded queue that drops what is too much; nobody ever waits for a collector, but for a
moment at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from gateway.tracing import Value
from router.trace_context import TraceContext

__all__ = ["OtlpExport"]

_CLOSE_S: Final = 3.0


class _GivenIds(IdGenerator):
    """The ids of the span that is being made: they were drawn, and told to replicas, long before."""

    context: TraceContext

    def generate_trace_id(self) -> int:
        return int(self.context.trace_id, 16)

    def generate_span_id(self) -> int:
        return int(self.context.span_id, 16)


class OtlpExport:
    """`gateway.tracing.SpanExport` by OTLP over HTTP. Called by one thread."""

    def __init__(self, *, endpoint: str | None, service_name: str, version: str) -> None:
        """`endpoint`: where to POST; None: as the ``OTEL_EXPORTER_OTLP_*`` variables say."""
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # what is made is wanted
            resource=Resource.create({"service.name": service_name, "service.version": version}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("warmpath", version)

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
        self._ids.context = context
        span = self._tracer.start_span(
            name,
            context=Context() if parent is None else set_span_in_context(NonRecordingSpan(_remote(parent))),
            kind=SpanKind.CLIENT if client else SpanKind.SERVER,
            attributes=attributes,
            start_time=int(began_at * 1e9),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(int(ended_at * 1e9))

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _remote(context: TraceContext) -> SpanContext:
    ids = int(context.trace_id, 16), int(context.span_id, 16)
    return SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
