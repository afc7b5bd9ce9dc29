"""One trace per turn, as an OTLP collector receives it."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from router_rig import Chat, StartRouter, free_port, wait_for

from pd_connector import telemetry

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@dataclass
class Collector:
    """What came, by span name."""

    spans: dict[str, list[Any]] = field(default_factory=dict)
    resources: list[dict[str, str]] = field(default_factory=list)

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.resources.append(named)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.name, []).append(span)

    def one(self, span: telemetry.Span) -> Any:
        return wait_for(lambda: self.spans.get(span.name), span.name)[0]


@pytest.fixture(params=["http/protobuf", "grpc"])
def collector(request: pytest.FixtureRequest) -> Iterator[tuple[Collector, dict[str, str]]]:
    """A collector, and the settings that lead there."""
    collector = Collector()
    settings = {"otlp_protocol": request.param}
    if request.param == "grpc":

        class Service(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                collector.take(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        server = grpc.server(futures.ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, settings | {"otlp_endpoint": f"http://127.0.0.1:{port}"}
        server.stop(0)
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                raise AssertionError("compressed")
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    web = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield collector, settings | {"otlp_endpoint": f"http://127.0.0.1:{web.server_port}"}
    web.shutdown()
    web.server_close()


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        values[each.key] = getattr(each.value, kind)
    return values


def test_a_turn_is_one_trace(
    start_router: StartRouter, collector: tuple[Collector, dict[str, str]]
) -> None:
    seen, settings = collector
    router = start_router(**settings)
    chat = Chat(router, "a-secret-name")
    chat.say("Hello")
    for spans in (telemetry.SPAN_TURN, telemetry.SPAN_DECODE):
        seen.one(spans)
    seen.spans.clear()
    router.post(chat.body("Again"), traceparent=f"00-{TRACE}-{PARENT}-01")
    turn = seen.one(telemetry.SPAN_TURN)
    assert (turn.trace_id.hex(), turn.parent_span_id.hex()) == (TRACE, PARENT)
    told = attributes(turn)
    held = router.decode[0].handles[0]["remote_num_tokens"]
    assert told[telemetry.OUTCOME.name] == "hit"
    assert told[telemetry.ROUTE.name] == "readback"
    assert told[telemetry.TOKENS_READ.name] == told[telemetry.TOKENS_OFFERED.name] == held
    assert told[telemetry.TURN_NUMBER.name] == 2
    assert told[telemetry.TTFT_MS.name] > 0
    assert (told[telemetry.PREFILL_LEG.name], told[telemetry.DECODE_LEG.name]) == (
        "prefill-0",
        "decode-0",
    )
    assert "secret" not in str(seen.spans)
    children = (
        telemetry.SPAN_CLAIM,
        telemetry.SPAN_PREFILL,
        telemetry.SPAN_FIRST_TOKEN,
        telemetry.SPAN_DECODE,
    )
    for record in children:
        span = seen.one(record)
        assert (span.trace_id.hex(), span.parent_span_id) == (TRACE, turn.span_id), record.name
        known = {attribute.name for attribute in record.attributes}
        assert attributes(span).keys() <= known
        assert turn.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= turn.end_time_unix_nano
    for engines, record in ((router.prefill, telemetry.SPAN_PREFILL), (router.decode, children[3])):
        headers = engines[0].request_headers[-1]
        assert headers["traceparent"] == f"00-{TRACE}-{seen.one(record).span_id.hex()}-01"
    assert {"service.name": "pd_router", "service.instance.id": "router-0"}.items() <= (
        seen.resources[0].items()
    )


def test_a_trace_that_is_not_sampled_stays_so(
    start_router: StartRouter, collector: tuple[Collector, dict[str, str]]
) -> None:
    seen, settings = collector
    router = start_router(**settings, trace_conversation_ids=True)
    unsampled = f"00-{TRACE}-{PARENT}-00"
    router.post(Chat(router, "c").body("Hello"), traceparent=unsampled)
    assert router.decode[0].request_headers[-1]["traceparent"] == unsampled
    Chat(router, "in-clear").say("Hello")
    turn = seen.one(telemetry.SPAN_TURN)
    assert turn.trace_id.hex() != TRACE
    assert attributes(turn)[telemetry.CONVERSATION.name] == "in-clear"


def test_spans_that_nobody_takes_are_counted_and_block_nothing(start_router: StartRouter) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    router = start_router(otlp_endpoint=endpoint, otlp_protocol="http/protobuf")
    for number in range(3):
        assert Chat(router, f"c{number}").say("Hello").status == 200
    wait_for(lambda: router.metric("pd_router_spans_dropped_total") >= 5, "they are counted")


def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    code = "import sys, pd_router.app; print([m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
