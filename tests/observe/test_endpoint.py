"""One `observability.otlp_endpoint` leads spans of router, connector and vLLM to a collector."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from pdctl.plan import plan
from pdctl.spec.load import load
from tests.observe.conftest import REFERENCE
from tests.observe.otlp_receiver import OtlpReceiver
from tests.ports import free_ports

EXPORTERS = """
import json, os, sys, time
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanContext, set_span_in_context, NonRecordingSpan, TraceFlags
from pd_connector import telemetry, tracing
from pd_router import spans
from vllm.tracing.otel import get_span_exporter

for case in json.loads(sys.argv[1]):
    os.environ.update(case["env"])
    trace, now = case["trace"], time.time_ns()
    engine = tracing.otlp_export(case["flag"], "prefill-0")
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    lost = engine([tracing.Record(telemetry.SPAN_DECISION, headers, now, now, {}, None)])
    router = spans.otlp_export(case["endpoint"], case["protocol"], "router-0")
    turn = spans.Ended(telemetry.SPAN_TURN, int(trace, 16), 1, None, now, now, {}, None)
    lost += router([turn])
    assert not lost, (case, lost)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(get_span_exporter(case["flag"])))
    parent = NonRecordingSpan(SpanContext(int(trace, 16), 1, True, TraceFlags(1)))
    vllm = provider.get_tracer("vllm")
    vllm.start_span("llm_request", context=set_span_in_context(parent)).end()
"""
"""The exporters of the three: the connector's, the router's, vLLM's."""
SUFFIXES = {"grpc": ("", "/"), "http/protobuf": ("", "/", "/v1/traces")}


def test_one_value_for_all_legs(tmp_path: Path) -> None:
    receiver = OtlpReceiver(*free_ports(2))
    urls = {"grpc": receiver.grpc_url, "http/protobuf": receiver.http_url}
    cases = []
    for protocol, suffixes in SUFFIXES.items():
        for suffix in suffixes:
            spec = yaml.safe_load(REFERENCE.read_text())
            endpoint = f"{urls[protocol]}{suffix}"
            spec["observability"] |= {"otlp_endpoint": endpoint, "otlp_protocol": protocol}
            path = tmp_path / "spec.yaml"
            path.write_text(yaml.safe_dump(spec))
            deployment = plan(load(path).spec, tmp_path)
            leg = deployment.engines[0]
            flags = {flag.words[0]: flag.words[-1] for flag in leg.flags}
            cases.append(
                {
                    "trace": f"{len(cases) + 1:032x}",
                    "env": {each.name: each.value for each in leg.env},
                    "flag": flags["--otlp-traces-endpoint"],
                    "endpoint": deployment.router.config["otlp_endpoint"],
                    "protocol": deployment.router.config["otlp_protocol"],
                }
            )
    try:
        ended = subprocess.run(
            [sys.executable, "-c", EXPORTERS, json.dumps(cases)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert {case["trace"]: sorted(receiver.span_names(case["trace"])) for case in cases} == {
            case["trace"]: ["llm_request", "pd.decision", "pd.turn"] for case in cases
        }
        by_protocol = [protocol for protocol, _ in receiver.requests]
        assert by_protocol == ["grpc"] * 3 * 2 + ["http"] * 3 * 3
    finally:
        receiver.close()
