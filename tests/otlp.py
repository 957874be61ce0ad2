"""A collector of OpenTelemetry traces: an HTTP server that decodes what exporters POST to it."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    kind: int
    """OTLP's: 1 internal, 2 server, 3 client."""
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Value]


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""
    """All that came, decompressed."""

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            service=str(about["service.name"]),
                            name=span.name,
                            kind=span.kind,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            begin_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            failed=span.status.code == 2,
                            attributes=_attributes(span.attributes),
                        )
                    )

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found


def _attributes(pairs) -> dict[str, Value]:  # type: ignore[no-untyped-def]
    found: dict[str, Value] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
