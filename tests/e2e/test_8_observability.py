"""The real pair under load, watched by real Prometheus and Alertmanager, its spans received.

One deployment: its start, then load, then two troubles that operators meet. A third, a leg that
disagrees, is in test_2_doctor.
"""

import bisect
import json
import math
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_connector import telemetry
from pd_connector.contract import READ_MARGIN_SECONDS
from pdctl.observe.boards import BOARDS
from pdctl.observe.panel import Panel, Scope, fill
from tests.observe.exemplars import bucket_traces
from tests.observe.otlp_receiver import OtlpReceiver
from tests.ports import free_ports

from .conftest import Deployment
from .legs import metric
from .watch import ANSWER_TOKENS, Load, Sample, Watch, until

pytestmark = pytest.mark.e2e_observability

TURNS, BEGINNINGS = 4, 4
DECODE_TTL = 20


class Watched(Watch):
    """What the tests share."""

    def __init__(self, deployment: Deployment, receiver: OtlpReceiver) -> None:
        super().__init__(deployment, ttft_slo="25s")
        self.receiver = receiver
        self.load = Load(deployment.router_url)

    def panel(self, title: str) -> Panel:
        return next(panel for board in BOARDS for panel in board.panels if panel.title == title)

    def numbers(self, title: str, label: str) -> dict[str, float]:
        """What a panel of totals shows, by a label."""
        scope = Scope("1m", "5m", values={"deployment": self.deployment.name})
        (query,) = self.panel(title).queries
        found = self.prometheus.instant(fill(query.expr, scope))
        return {series.labels.get(label, ""): series.value for series in found}


@pytest.fixture(scope="module")
def watched(deployment: Deployment) -> Iterator[Watched]:
    """Legs restarted for this, so that every counter starts at zero."""
    before = json.loads(json.dumps(deployment.spec))
    receiver = OtlpReceiver(*free_ports(2))
    spec = deployment.spec
    spec["kv_transfer"]["decode_ttl"] = f"{DECODE_TTL}s"
    spec["router"] |= {"handle_ttl": f"{DECODE_TTL - 1}s", "route": "readback"}
    spec["observability"] |= {"otlp_endpoint": receiver.grpc_url, "otlp_protocol": "grpc"}
    watched = Watched(deployment, receiver)
    deployment.pdctl("down", deployment.name, "--grace", "10", ok=False)
    deployment.pdctl("up", "SPEC")
    deployment.pdctl("observe", "up", "SPEC")
    try:
        yield watched
    finally:
        watched.load.client.close()
        deployment.pdctl("observe", "down", deployment.name)
        deployment.pdctl("down", deployment.name, "--grace", "10")
        receiver.close()
        deployment.spec = before
        deployment.write()


@pytest.fixture(scope="module")
def loaded(watched: Watched) -> Watched:
    """Conversations, one after the other, until Prometheus has seen several begin and the last
    turn of all."""
    misses = (
        f'{telemetry.ROUTER_TURNS.name}{{deployment="{watched.deployment.name}",outcome="miss"}}'
    )

    def more() -> bool:
        name: str = uuid.uuid4().hex
        talk: list[dict[str, str]] = []
        for _ in range(TURNS):
            watched.load.turn(talk, name)
        return bool(watched.prometheus.instant(f"changes({misses}[1m]) >= {BEGINNINGS}"))

    until("conversations began between looks", more)
    until(
        "all turns are counted",
        lambda: (
            sum(watched.numbers("Turns by outcome since the router's start", "outcome").values())
            == len(watched.load.samples)
        ),
    )
    return watched


def test_panels_show_what_the_load_recorded(loaded: Watched) -> None:
    samples = loaded.load.samples
    outcomes = Counter(sample.outcome for sample in samples)
    assert outcomes["miss"] >= BEGINNINGS
    assert outcomes == {"miss": outcomes["miss"], "hit": outcomes["miss"] * (TURNS - 1)}
    shown = loaded.numbers("Turns by outcome since the router's start", "outcome")
    assert {name: count for name, count in shown.items() if count} == outcomes
    tokens = loaded.numbers("Prompt tokens since the router's start", "kind")
    assert tokens["read"] == sum(sample.tokens_read for sample in samples) > 0
    assert tokens["prompt"] == sum(sample.prompt_tokens for sample in samples)
    until(
        "the engine's last transfer is counted",
        lambda: (
            loaded.numbers("Bytes per pair since the legs' start", "direction").get("d2p")
            == sum(sample.read_bytes for sample in samples)
        ),
    )
    pairs = loaded.numbers("Bytes per pair since the legs' start", "direction")
    vllm = loaded.numbers("NIXL bytes since the legs' start, counted by vLLM", "leg")
    until(
        "vLLM has counted too",
        lambda: (
            loaded.numbers("NIXL bytes since the legs' start, counted by vLLM", "leg")
            == {"prefill-0": pairs["d2p"], "decode-0": pairs["p2d"]}
        ),
    )
    assert vllm


def test_ttft_on_panels_is_the_load_s_within_a_bucket(loaded: Watched) -> None:
    buckets = [*telemetry.ROUTER_TTFT.buckets, math.inf]
    name = f"{telemetry.ROUTER_TTFT.name}_bucket"
    times = sorted(sample.ttft for sample in loaded.load.samples)
    for share, own in ((0.5, statistics.median(times)), (0.9, times[int(len(times) * 0.9)])):
        (shown,) = loaded.prometheus.instant(f"histogram_quantile({share}, sum by (le) ({name}))")
        places = [bisect.bisect_left(buckets, seconds) for seconds in (own, shown.value)]
        assert abs(places[0] - places[1]) <= 1


def test_every_query_that_the_load_can_feed_finds_data(loaded: Watched) -> None:
    words = ("--prometheus", loaded.prometheus.url, "--deployment", loaded.deployment.name)
    ended = loaded.deployment.pdctl(
        "dashboards", "check", *words, "--window", "1m", "--json", ok=False
    )
    rows = json.loads(ended.stdout)["queries"]
    empty = {row["where"]: row["reason"] for row in rows if row["found"] != "data"}
    assert {where: reason.partition(": ")[0] for where, reason in empty.items()} == NOT_FED


NOT_FED = {
    # The spec names no provider.
    "PdProviderFallback": "label missing",
    # Every later turn was read back.
    "pd-turns: What a later turn without readback costs": "no series",
}
"""What an undisturbed load has no numbers for, and how its reason begins."""


def test_one_trace_across_three_processes(loaded: Watched, tmp_path: Path) -> None:
    trace, client = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    name: str = uuid.uuid4().hex
    talk: list[dict[str, str]] = []
    loaded.load.turn(talk, name)
    sample = loaded.load.turn(talk, name, traceparent=f"00-{trace}-{client}-01")
    assert sample.outcome == "hit"
    expected = Counter(
        ["pd.turn", "pd.claim", "pd.prefill", "pd.decode", "pd.decode.first_token", "pd.decision"]
        + ["pd.transfer", "llm_request"] * 2
    )
    until("the trace is whole", lambda: Counter(loaded.receiver.span_names(trace)) == expected)
    assert loaded.receiver.protocols() == {"grpc"}
    file = tmp_path / "traces.jsonl"
    loaded.receiver.write(file)
    told = loaded.deployment.pdctl("trace", trace, "--file", str(file), "--json")
    spans = json.loads(told.stdout)["spans"]
    check_tree(spans, client)
    check_times(spans, sample)
    picture = loaded.deployment.pdctl("trace", "--slowest", "--file", str(file)).stdout
    assert "pd.turn" in picture
    print(loaded.deployment.pdctl("trace", trace, "--file", str(file)).stdout)


def test_buckets_lead_to_traces(loaded: Watched) -> None:
    until(
        "Prometheus has exemplars, and the receiver their traces",
        lambda: (found := bucket_traces(loaded.prometheus)) and found <= loaded.receiver.traces(),
    )
    ours = {span.trace_id.hex() for span in loaded.receiver.spans() if span.name == "pd.turn"}
    assert bucket_traces(loaded.prometheus) <= ours


def check_tree(spans: list[dict[str, Any]], client: str) -> None:
    by_id = {span["span_id"]: span for span in spans}
    (turn,) = (span for span in spans if span["name"] == "pd.turn")
    assert turn["parent_id"] == client
    parents = {
        (span["name"], span["attributes"].get("pd.direction")): by_id[span["parent_id"]]["name"]
        for span in spans
        if span is not turn and span["name"] != "llm_request"
    }
    assert parents == {
        ("pd.claim", None): "pd.turn",
        ("pd.prefill", None): "pd.turn",
        ("pd.decision", None): "pd.prefill",
        ("pd.transfer", "d2p"): "pd.prefill",
        ("pd.decode", None): "pd.turn",
        ("pd.transfer", "p2d"): "pd.decode",
        ("pd.decode.first_token", None): "pd.turn",
    }
    engines = {
        by_id[span["parent_id"]]["name"]: span["service"]
        for span in spans
        if span["name"] == "llm_request"
    }
    assert engines == {"pd.prefill": "prefill-0", "pd.decode": "decode-0"}
    assert {span["service"] for span in spans} == {"router-0", "prefill-0", "decode-0"}


def check_times(spans: list[dict[str, Any]], sample: Sample) -> None:
    slack = 5.0
    by_id = {span["span_id"]: span for span in spans}
    named = {span["name"]: span for span in spans}
    for span in spans:
        parent = by_id.get(span["parent_id"] or "")
        if parent and span["name"] != "pd.decode.first_token":
            assert span["start_ms"] >= parent["start_ms"] - slack
            end = span["start_ms"] + span["duration_ms"]
            assert end <= parent["start_ms"] + parent["duration_ms"] + slack, span["name"]
    turn = named["pd.turn"]
    parts = sum(named[name]["duration_ms"] for name in ("pd.claim", "pd.prefill", "pd.decode"))
    assert parts <= turn["duration_ms"] + slack
    first = named["pd.prefill"]["duration_ms"] + named["pd.decode.first_token"]["duration_ms"]
    assert first <= turn["attributes"]["pd.ttft_ms"] + slack
    (read,) = (span for span in spans if span["attributes"].get("pd.direction") == "d2p")
    assert read["attributes"]["pd.bytes"] == sample.read_bytes
    assert turn["attributes"]["pd.tokens.read"] == sample.tokens_read
    assert turn["attributes"]["pd.outcome"] == "hit"


def test_quiet_before_trouble(loaded: Watched) -> None:
    assert [alert["labels"]["alertname"] for alert in loaded.alerts()] == []


def test_turns_that_come_too_late(loaded: Watched) -> None:
    deployment, load = loaded.deployment, loaded.load
    name, talk = uuid.uuid4().hex, []
    talks: dict[str, list[dict[str, str]]] = {uuid.uuid4().hex: [] for _ in range(6)}
    for each, begun in talks.items():
        load.turn(begun, each)
    load.turn(talk, name)
    finished = time.monotonic()

    # The router still has the handle; prefill declines it, since less than its margin is left.
    until(
        "less than the margin is left",
        lambda: time.monotonic() > finished + DECODE_TTL - READ_MARGIN_SECONDS + 1,
    )
    declined = metric(deployment, deployment.prefill_url, telemetry.ENGINE_DECLINED.name)
    assert load.turn(talk, name).outcome == "expired"
    now = metric(deployment, deployment.prefill_url, telemetry.ENGINE_DECLINED.name)
    assert now == declined + 1
    assert talk[-1]["content"] == deployment.plain(talk[:-1], ANSWER_TOKENS)

    pins = f'{telemetry.ENGINE_PINS.name}{{deployment="{deployment.name}",role="decode"}}'
    until(
        "decode has let all turns go but the last",
        lambda: [series.value for series in loaded.prometheus.instant(pins)] == [1],
    )
    late = [load.turn(begun, each).outcome for each, begun in talks.items()]
    assert late == ["expired"] * 6
    assert begun[-1]["content"] == deployment.plain(begun[:-1], ANSWER_TOKENS)
    until("the alert", lambda: loaded.firing("PdHandlesExpire"))
    assert "decode_ttl" in loaded.playbook("PdHandlesExpire")


def test_another_provider_than_the_spec_names(loaded: Watched) -> None:
    """The pair moves KV over sockets; the rules are told that it should be efa."""
    spec = json.loads(json.dumps(loaded.deployment.spec))
    spec["kv_transfer"]["backend"] = "LIBFABRIC"
    spec["fabric"]["provider"] = "efa"
    file = loaded.deployment.folder / "efa.json"
    file.write_text(json.dumps(spec))
    loaded.deployment.pdctl("observe", "up", str(file))
    until("the alert", lambda: loaded.firing("PdProviderFallback"))
    alert = loaded.firing("PdProviderFallback")
    assert alert is not None
    assert alert["labels"]["provider"] not in ("", "efa")
    assert "efa" in loaded.playbook("PdProviderFallback")
    loaded.deployment.pdctl("observe", "up", "SPEC")
