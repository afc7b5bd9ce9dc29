"""Spans of turns, exported over OTLP.

A turn only appends what ended to a bounded queue; a thread makes spans of it and sends them.
With no endpoint there is neither, and OpenTelemetry is not imported.
"""

import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pd_connector import contract
from pd_connector.telemetry import Attribute, Span

log = logging.getLogger("pd_router")

MOST_QUEUED = 8192
"""Spans that wait for the exporter; beyond it they are dropped, and counted."""
BATCH = 512
INTERVAL_SECONDS = 1.0
EXPORT_SECONDS = 5
CLOSE_SECONDS = 3.0

# Source: https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")

_ids = random.Random(os.urandom(32))


class Ended(NamedTuple):
    """A span that has ended. Times are nanoseconds since 1970."""

    span: Span
    trace: int
    id: int
    parent: int | None
    started: int
    ended: int
    attributes: Mapping[Attribute, Any]
    error: str | None


Export = Callable[[Sequence[Ended]], int]
"""Sends spans; returns how many were lost."""


class Trace:
    """The spans of one turn."""

    def __init__(self, spans: "Spans", trace: int, parent: int | None) -> None:
        self._spans = spans
        self._trace = trace
        self._parent = parent
        self._turn = _ids.getrandbits(64) or 1

    @property
    def hex_id(self) -> str:
        return f"{self._trace:032x}"

    def child(self) -> int:
        """An id for a child span, before it has ended."""
        return _ids.getrandbits(64) or 1

    def traceparent(self, child: int) -> str:
        """The header that makes an engine's span a child of ``child``."""
        return f"00-{self._trace:032x}-{child:016x}-01"

    def end(
        self,
        span: Span,
        child: int | None,
        started: int,
        attributes: Mapping[Attribute, Any],
        error: str | None = None,
    ) -> None:
        """A span has ended; ``child`` None is the turn's own."""
        own, parent = (self._turn, self._parent) if child is None else (child, self._turn)
        kept = {attribute: value for attribute, value in attributes.items() if value is not None}
        ended = Ended(span, self._trace, own, parent, started, time.time_ns(), kept, error)
        self._spans.add(ended)


class Spans:
    """The queue of a process's spans."""

    def __init__(self, export: Export, dropped: Callable[[int], None]) -> None:
        self._export = export
        self._dropped = dropped
        self._queue: deque[Ended] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pd-spans", daemon=True)
        self._thread.start()

    def trace(self, traceparent: str | None) -> Trace | None:
        """A turn's spans; None when the client's own trace is not sampled."""
        found = _TRACEPARENT.fullmatch(traceparent or "")
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            return Trace(self, _ids.getrandbits(128) or 1, None)
        if not int(found[3], 16) & 1:
            return None
        return Trace(self, int(found[1], 16), int(found[2], 16))

    def add(self, ended: Ended) -> None:
        if len(self._queue) >= MOST_QUEUED:
            self._dropped(1)
            return
        self._queue.append(ended)
        if len(self._queue) >= BATCH:
            self._wake.set()

    def close(self) -> None:
        """Send what waits, for a bounded time."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(INTERVAL_SECONDS)
            self._wake.clear()
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))])

    def _send(self, batch: Sequence[Ended]) -> None:
        try:
            lost = self._export(batch)
        except Exception as error:
            log.debug("spans could not be exported: %s", error)
            lost = len(batch)
        if lost:
            self._dropped(lost)


def otlp_export(endpoint: str, protocol: str, name: str) -> Export:
    """Export to an OTLP endpoint.

    Args:
        protocol: grpc or http/protobuf; the latter posts to ``endpoint``/v1/traces.
        name: the router's, as the spans' service instance.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags  # noqa: PLC0415
    from opentelemetry.trace.status import Status, StatusCode  # noqa: PLC0415

    exporter = _exporter(endpoint, protocol)
    resource = Resource.create({"service.name": "pd_router", "service.instance.id": name})
    scope = InstrumentationScope("pd_router")
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def context(trace: int, span: int, remote: bool) -> SpanContext:
        return SpanContext(trace, span, is_remote=remote, trace_flags=sampled)

    def readable(ended: Ended) -> ReadableSpan:
        own_parent = ended.span.parent is not None
        return ReadableSpan(
            name=ended.span.name,
            context=context(ended.trace, ended.id, False),
            parent=(
                None if ended.parent is None else context(ended.trace, ended.parent, not own_parent)
            ),
            resource=resource,
            attributes={key.name: value for key, value in ended.attributes.items()},
            kind=SpanKind.INTERNAL if own_parent else SpanKind.SERVER,
            instrumentation_scope=scope,
            status=(
                Status(StatusCode.UNSET)
                if ended.error is None
                else Status(StatusCode.ERROR, ended.error)
            ),
            start_time=ended.started,
            end_time=ended.ended,
        )

    def export(batch: Sequence[Ended]) -> int:
        result = exporter.export([readable(ended) for ended in batch])
        return 0 if result is SpanExportResult.SUCCESS else len(batch)

    return export


def _exporter(endpoint: str, protocol: str) -> Any:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        secure = endpoint.startswith("https:")
        return GrpcExporter(endpoint=endpoint, insecure=not secure, timeout=EXPORT_SECONDS)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter(endpoint=contract.otlp_http_url(endpoint), timeout=EXPORT_SECONDS)
