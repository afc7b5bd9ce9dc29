"""An OTLP receiver: the collector's gRPC service and its HTTP twin, kept in memory."""

import gzip
import json
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class OtlpReceiver(TraceServiceServicer):  # type: ignore[misc]
    """Listens on both ports until closed."""

    def __init__(self, grpc_port: int, http_port: int):
        self.grpc_url = f"http://127.0.0.1:{grpc_port}"
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._grpc)
        self._grpc.add_insecure_port(f"127.0.0.1:{grpc_port}")
        self._grpc.start()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    receiver.requests.append(("http", ExportTraceServiceRequest.FromString(body)))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", http_port), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        self.requests.append(("grpc", request))
        return ExportTraceServiceResponse()

    def close(self) -> None:
        self._grpc.stop(1).wait()
        self._http.shutdown()
        self._http.server_close()

    def spans(self) -> list[Any]:
        """All spans that have come in, as the protocol has them."""
        return [
            span
            for _, request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def span_names(self, trace: str) -> list[str]:
        """Names of a trace's spans that have come in."""
        return [span.name for span in self.spans() if span.trace_id.hex() == trace]

    def traces(self) -> set[str]:
        """Ids of all traces that have come in."""
        return {span.trace_id.hex() for span in self.spans()}

    def protocols(self) -> set[str]:
        return {protocol for protocol, _ in list(self.requests)}

    def write(self, path: Path) -> None:
        """As the Collector's file exporter writes: one request a line, ids in hex."""
        with path.open("w", encoding="utf-8") as file:
            for _, request in list(self.requests):
                told = MessageToDict(request)
                for resource, sent in zip(
                    told.get("resourceSpans", []), request.resource_spans, strict=True
                ):
                    for scope, sent_scope in zip(
                        resource.get("scopeSpans", []), sent.scope_spans, strict=True
                    ):
                        for span, sent_span in zip(scope["spans"], sent_scope.spans, strict=True):
                            span["traceId"] = sent_span.trace_id.hex()
                            span["spanId"] = sent_span.span_id.hex()
                            span["parentSpanId"] = sent_span.parent_span_id.hex()
                file.write(json.dumps(told) + "\n")
