"""Spans to a collector: the one place that knows OpenTelemetry's SDK, imported only where traces are on.

The SDK's own thread sends them, from a bounded queue that drops what is too much; nobody ever waits for a collector, but for a
moment at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NoOpTracer, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes

from gateway.tracing import Value
from router.trace_context import TraceContext

__all__ = ["OtlpExport"]

_CLOSE_S: Final = 3.0
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_FAILED: Final = Status(StatusCode.ERROR)


class OtlpExport:
    """`gateway.tracing.SpanExport` by OTLP over HTTP. Called by one thread.

    A span is over when it comes here, and whether it is wanted, and by which ids, was decided long before. So what the SDK's
    tracer would do (ask a sampler, draw ids, look for a current span, copy each attribute) is left out: it is three quarters of
    what a span costs, and all of it on the event loop.
    """

    def __init__(self, *, endpoint: str | None, service_name: str, version: str) -> None:
        """`endpoint`: where to POST; None: as the ``OTEL_EXPORTER_OTLP_*`` variables say."""
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service_name, "service.version": version}),
            shutdown_on_exit=False,
        )
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
        self._provider.add_span_processor(self._processor)
        self._scope = InstrumentationScope("warmpath", version)
        self._is_disabled = isinstance(self._provider.get_tracer("warmpath"), NoOpTracer)
        """By ``OTEL_SDK_DISABLED``."""
        limits = SpanLimits()
        self._most_attributes, self._most_chars = limits.max_span_attributes, limits.max_span_attribute_length
        """By ``OTEL_*_LIMIT``. None is no limit."""

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
        if self._is_disabled:
            return
        self._processor.on_end(
            ReadableSpan(
                name,
                context=_span_context(context, is_remote=False),
                parent=_span_context(parent, is_remote=True) if parent is not None else None,
                resource=self._provider.resource,
                attributes=self._limited(attributes),
                kind=SpanKind.CLIENT if client else SpanKind.SERVER,
                status=_FAILED if failed else _UNSET,
                start_time=int(began_at * 1e9),
                end_time=int(ended_at * 1e9),
                instrumentation_scope=self._scope,
            )
        )

    def _limited(self, attributes: Mapping[str, Value]) -> Attributes:
        if self._most_chars is None and (self._most_attributes is None or len(attributes) <= self._most_attributes):
            return attributes
        return BoundedAttributes(self._most_attributes, attributes, max_value_len=self._most_chars)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _span_context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote, _SAMPLED)
