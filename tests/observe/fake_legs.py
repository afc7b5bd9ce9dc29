"""Fake legs: three HTTP servers whose /metrics show what a deployment under load would.

Every metric is made from its record in telemetry.py; vLLM's own have vLLM's names and labels.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from pd_connector import contract, telemetry
from pd_connector.contract import Outcome, Route
from pd_connector.telemetry import Metric, prompt_band, turn_band

PREFILL, DECODE = "prefill-0", "decode-0"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class FakeLeg:
    """One process' metrics, on a port of its own. The router speaks OpenMetrics, vLLM does not."""

    def __init__(self, port: int, speaks_openmetrics: bool = False):
        self.speaks_openmetrics = speaks_openmetrics
        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = {}
        leg = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                accept = self.headers.get("Accept", "") if leg.speaks_openmetrics else ""
                encode, content_type = choose_encoder(accept)
                text = encode(leg._registry)
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __getitem__(self, metric: Metric) -> Any:
        """The instrument of a record, made when it is first asked for."""
        if metric.name not in self._made:
            kinds = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
            more = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            self._made[metric.name] = kinds[metric.kind](
                metric.name, metric.text, metric.labels, registry=self._registry, **more
            )
        return self._made[metric.name]

    def of(self, metric: Metric, *values: str) -> Any:
        """Its child with these label values."""
        return self[metric].labels(*values) if metric.labels else self[metric]


def vllm(name: str, kind: Any, *labels: str) -> Metric:
    """A metric of vLLM's; its engine and model labels come first."""
    return Metric(name, kind, "vLLM's.", ("engine", "model_name", *labels), (0.01, 0.1, 1, 10))


SOURCES = vllm(contract.ENGINE_PROMPT_TOKENS_BY_SOURCE, "counter", "source")
NIXL_BYTES = vllm(contract.ENGINE_NIXL_BYTES.removesuffix("_sum"), "histogram")
COUNTERS = [
    vllm(name, "counter")
    for name in (
        contract.ENGINE_NIXL_FAILED,
        contract.ENGINE_NIXL_EXPIRED,
        contract.ENGINE_PREEMPTIONS,
        contract.ENGINE_GENERATION_TOKENS,
    )
]
GAUGES = [vllm(name, "gauge") for name in (contract.ENGINE_KV_USAGE, contract.ENGINE_RUNNING)]
WAITING = vllm(contract.ENGINE_WAITING_BY_REASON, "gauge", "reason")
QUEUE = vllm(contract.ENGINE_QUEUE_SECONDS, "histogram")
V = ("0", "canary")


class FakeDeployment:
    """Router, prefill and decode, and turns that leave their marks on all three."""

    def __init__(self, router_port: int, prefill_port: int, decode_port: int):
        self.router = FakeLeg(router_port, speaks_openmetrics=True)
        self.prefill = FakeLeg(prefill_port)
        self.decode = FakeLeg(decode_port)
        self._settled()

    def close(self) -> None:
        for leg in (self.router, self.prefill, self.decode):
            leg.close()

    def turn(self, number: int, tokens: int, outcome: Outcome) -> None:
        """One turn of a conversation."""
        hit = outcome is Outcome.HIT
        read = tokens - 128 if hit else 0
        seconds = 0.2 + (0.0001 if hit else 0.0004) * tokens
        route = (Route.READBACK if hit else Route.RECOMPUTE).value
        band, r, t = prompt_band(tokens), self.router, telemetry
        r.of(t.ROUTER_TURNS, outcome.value, route).inc()
        r.of(t.ROUTER_ROUTES, route, "fastest").inc()
        for kind, count in (("prompt", tokens), ("read", read), ("computed", tokens - read)):
            r.of(t.ROUTER_TOKENS, kind).inc(count)
        labels = (outcome.value, route, turn_band(number), band)
        r.of(t.ROUTER_TTFT, *labels).observe(seconds, {t.EXEMPLAR_TRACE_ID: TRACE_ID})
        r.of(t.ROUTER_PREFILL, PREFILL, outcome.value, band).observe(seconds * 0.8)
        r.of(t.ROUTER_REQUESTS, "/v1/chat/completions", "200").inc()
        r.of(t.ROUTER_ENDINGS, "ok").inc()
        r.of(t.ROUTER_HANDLES_STORED).inc()
        if number > 1:
            r.of(t.ROUTER_TOKENS, "offered").inc(tokens - 128)
            r.of(t.ROUTER_HANDLE_AGE).observe(12.0)
        p, d = self.prefill, self.decode
        p.of(t.ENGINE_DECISIONS, outcome.value).inc()
        p.of(SOURCES, *V, contract.SOURCE_LOCAL_COMPUTE).inc(tokens - read)
        if hit:
            r.of(t.ROUTER_HANDLES_SENT, PREFILL).inc()
            r.of(t.ROUTER_READBACK, PREFILL, band).observe(0.00001 * tokens)
            p.of(SOURCES, *V, contract.SOURCE_EXTERNAL_KV).inc(read)
            d.of(t.ENGINE_PINS_ENDED, "read").inc()
            self._moved(p, "d2p", DECODE, read)
        self._moved(d, "p2d", PREFILL, tokens)
        for leg in (p, d):
            leg.of(QUEUE, *V).observe(0.004)
            leg.of(vllm(contract.ENGINE_GENERATION_TOKENS, "counter"), *V).inc(32)

    def _moved(self, leg: FakeLeg, direction: str, peer: str, tokens: int) -> None:
        labels, t = (direction, "UCX", peer), telemetry
        leg.of(t.ENGINE_TRANSFER_SECONDS, *labels).observe(0.00001 * tokens)
        leg.of(t.ENGINE_TRANSFER_POST, *labels).observe(0.000001 * tokens)
        leg.of(t.ENGINE_TRANSFER_BYTES, *labels).observe(2048.0 * tokens)
        leg.of(t.ENGINE_TRANSFER_DESCRIPTORS, *labels).observe(tokens // 128)
        leg.of(NIXL_BYTES, *V).observe(2048.0 * tokens)

    def _settled(self) -> None:
        """What is there from the start, at rest."""
        r, t = self.router, telemetry
        for leg, role in ((PREFILL, "prefill"), (DECODE, "decode")):
            r.of(t.ROUTER_LEG_UP, leg, role).set(1)
            r.of(t.ROUTER_LEG_REQUESTS, leg, role).set(2)
            r.of(t.ROUTER_LEG_TOKENS, leg, role).set(4000)
            r.of(t.ROUTER_LEG_RESTARTS, leg).inc(0)
        r.of(t.ROUTER_PAIR_UP, PREFILL, DECODE).set(1)
        r.of(t.ROUTER_HANDLES_HELD, DECODE).set(20)
        r.of(t.ROUTER_HANDLES_LIMIT).set(1000)
        r.of(t.ROUTER_HANDLES_BYTES).set(40_000)
        r.of(t.ROUTER_HANDLES_BYTES_LIMIT).set(1_000_000)
        r.of(t.ROUTER_HANDLE_TTL).set(450)
        r.of(t.ROUTER_INFO, "0.1.0", "pdctl", "on", "connector", "auto").set(1)
        for outcome in Outcome:
            for route in Route:
                r.of(t.ROUTER_TURNS, outcome.value, route.value)
        for reason in ("expired", "history_changed"):
            r.of(t.ROUTER_HANDLES_REFUSED, reason)
            r.of(t.ROUTER_HANDLES_DROPPED, reason)
        r.of(t.ROUTER_PREFILL_RETRIES, PREFILL, "failed")
        r.of(t.ROUTER_STRIPPED)
        r.of(t.ROUTER_SPANS_DROPPED)
        for leg, role in ((self.prefill, "prefill"), (self.decode, "decode")):
            info = dict.fromkeys(t.ENGINE_INFO.labels, "1") | {
                "role": role,
                "bidirectional": "on",
                "provider": "tcp",
                "backend": "UCX",
            }
            leg.of(t.ENGINE_INFO, *info.values()).set(1)
            leg.of(t.ENGINE_SPANS_DROPPED)
            leg.of(t.ENGINE_DECLINED)
            leg.of(t.ENGINE_REFUSED, "foreign")
            leg.of(t.ENGINE_REJECTED, "forged")
            leg.of(t.ENGINE_TRANSFER_FAILURES, "d2p", "UCX", "peer")
            leg.of(t.ENGINE_BLOCKS).set(100)
            for metric in COUNTERS:
                leg.of(metric, *V)
            for metric in GAUGES:
                leg.of(metric, *V).set(0.4)
            for reason in ("capacity", "deferred"):
                leg.of(WAITING, *V, reason).set(0)
        self.decode.of(t.ENGINE_PINS_ENDED, "high_water")
        self.decode.of(t.ENGINE_PINS).set(20)
        self.decode.of(t.ENGINE_PINNED_BLOCKS).set(35)
