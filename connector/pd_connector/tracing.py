"""Spans of the engine core, exported beside its loop.

The loop only appends a record to a bounded queue; a thread makes spans of the records and sends
them to vLLM's own OTLP endpoint. Without one there is no thread and no queue.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pd_connector.telemetry import Attribute, Span

MOST_QUEUED = 4096
BATCH = 512
INTERVAL_SECONDS = 1.0


class Record(NamedTuple):
    """A span that has ended. Times are nanoseconds since 1970."""

    span: Span
    trace_headers: Mapping[str, str]
    started: int
    ended: int
    attributes: Mapping[Attribute, Any]
    event: str | None


Export = Callable[[Sequence[Record]], int]
"""Sends records; returns how many were lost."""


class Spans:
    """The queue of a process's spans; does nothing without ``export``."""

    def __init__(
        self,
        export: Export | None,
        dropped: Callable[[int], None],
        most: int = MOST_QUEUED,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._export = export
        self._dropped = dropped
        self._most = most
        self._interval = interval
        self._queue: deque[Record] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        if export is not None:
            self._thread = threading.Thread(target=self._run, name="pd-spans", daemon=True)
            self._thread.start()

    @property
    def on(self) -> bool:
        """Whether spans go anywhere."""
        return self._export is not None

    def add(
        self,
        span: Span,
        trace_headers: Mapping[str, str] | None,
        started: int,
        ended: int,
        attributes: Mapping[Attribute, Any],
        event: str | None = None,
    ) -> None:
        """Queue a span as a child of the span in ``trace_headers``; without them it is not told."""
        if self._export is None or not trace_headers:
            return
        if len(self._queue) >= self._most:
            self._dropped(1)
            return
        self._queue.append(Record(span, trace_headers, started, ended, attributes, event))
        if len(self._queue) >= BATCH:
            self._wake.set()

    def close(self, seconds: float = 2.0) -> None:
        """Send what is queued, waiting at most so long."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval)
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._send(batch)
            if self._closing:
                return

    def _send(self, batch: Sequence[Record]) -> None:
        assert self._export is not None
        try:
            lost = self._export(batch)
        except Exception:
            lost = len(batch)
        if lost:
            self._dropped(lost)


def otlp_export(endpoint: str, engine_id: str) -> Export:
    """Export to an OTLP endpoint by the protocol that vLLM uses for its own spans.

    Source: ``vllm/tracing/otel.py`` (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc, the default, or
    http/protobuf). Raises ImportError without OpenTelemetry and ValueError for another protocol.
    """
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415
    from opentelemetry.sdk.trace.id_generator import IdGenerator  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    class SystemIds(IdGenerator):
        """vLLM seeds ``random`` alike in its processes; ids drawn from it would be equal."""

        def generate_span_id(self) -> int:
            return int.from_bytes(os.urandom(8), "big") or 1

        def generate_trace_id(self) -> int:
            return int.from_bytes(os.urandom(16), "big") or 1

    class Collect(SpanProcessor):
        def __init__(self) -> None:
            self.spans: list[ReadableSpan] = []

        def on_end(self, span: ReadableSpan) -> None:
            self.spans.append(span)

    exporter = _exporter(endpoint)
    provider = TracerProvider(
        id_generator=SystemIds(),
        resource=Resource.create(
            {"service.name": "pd_connector", "service.instance.id": engine_id}
        ),
        shutdown_on_exit=False,
    )
    ended = Collect()
    provider.add_span_processor(ended)
    tracer = provider.get_tracer("pd_connector")
    propagator = TraceContextTextMapPropagator()

    def export(records: Sequence[Record]) -> int:
        for record in records:
            span = tracer.start_span(
                record.span.name,
                context=propagator.extract(record.trace_headers),
                start_time=record.started,
                attributes={
                    attribute.name: value for attribute, value in record.attributes.items()
                },
            )
            if record.event is not None:
                span.add_event(record.event, timestamp=record.ended)
            span.end(record.ended)
        # A span whose parent was not sampled is not among them.
        spans, ended.spans = ended.spans, []
        if not spans or exporter.export(spans) is SpanExportResult.SUCCESS:
            return 0
        return len(spans)

    return export


def _exporter(endpoint: str) -> Any:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint, insecure=True)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter(endpoint=endpoint)
    raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol} is not known")


def now() -> int:
    """Nanoseconds since 1970, for a span."""
    return time.time_ns()
