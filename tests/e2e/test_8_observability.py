"""The real pair under load, watched by real Prometheus and Alertmanager, its spans received.

One deployment: its start, then load, then the three troubles that operators meet.
"""

import bisect
import json
import math
import os
import signal
import statistics
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_connector import contract, telemetry
from pdctl.conversation import user_text
from pdctl.launch.local import cannot_listen
from pdctl.observe.boards import BOARDS
from pdctl.observe.panel import Panel, Scope, fill
from pdctl.observe.prometheus import Prometheus
from tests.e2e.conftest import Deployment
from tests.observe.exemplars import bucket_traces
from tests.observe.otlp_receiver import OtlpReceiver
from tests.ports import free_ports
from tests.programs import program
from tests.waiting import until as until_within

pytestmark = pytest.mark.e2e_observability

ANSWER_TOKENS = 16
TURNS, BEGINNINGS = 4, 4
DECODE_TTL = 20
ALERT_WINDOW = 4


def until(what: str, holds: Callable[[], Any], seconds: float = 150.0) -> None:
    """Engines start and stop, and blocks live half a minute."""
    until_within(what, holds, seconds)


@dataclass(frozen=True)
class Sample:
    """One turn as its client saw it."""

    outcome: str
    prompt_tokens: int
    tokens_read: int
    read_bytes: int
    ttft: float


@dataclass
class Load:
    """Conversations through the router, and the record of their turns."""

    router: str
    samples: list[Sample] = field(default_factory=list)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=300, trust_env=False))

    def turn(self, talk: list[dict[str, str]], name: str, **headers: str) -> Sample:
        """The next turn of a conversation; its answer joins it."""
        talk.append({"role": "user", "content": user_text(f"{name}-{len(talk)}", 400)})
        body = {
            "model": Deployment.model,
            "messages": talk,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            contract.CONVERSATION_ID: name,
        }
        text, seconds, began = "", math.nan, time.perf_counter()
        url = f"{self.router}/v1/chat/completions"
        with self.client.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if math.isnan(seconds):
                    seconds = time.perf_counter() - began
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
        talk.append({"role": "assistant", "content": text})
        told = answer.headers
        sample = Sample(
            told[contract.HEADER_REUSE],
            int(told[contract.HEADER_PROMPT_TOKENS]),
            int(told.get(contract.HEADER_TOKENS_READ, 0)),
            int(told.get(contract.HEADER_READ_BYTES, 0)),
            seconds,
        )
        self.samples.append(sample)
        return sample


@dataclass
class Watched:
    """What the tests share."""

    deployment: Deployment
    receiver: OtlpReceiver
    load: Load
    prometheus: Prometheus
    alertmanager: str

    def panel(self, title: str) -> Panel:
        return next(panel for board in BOARDS for panel in board.panels if panel.title == title)

    def numbers(self, title: str, label: str) -> dict[str, float]:
        """What a panel of totals shows, by a label."""
        scope = Scope("1m", "5m", values={"deployment": self.deployment.name})
        (query,) = self.panel(title).queries
        found = self.prometheus.instant(fill(query.expr, scope))
        return {series.labels.get(label, ""): series.value for series in found}

    def firing(self, name: str) -> dict[str, Any] | None:
        """An alert as Alertmanager has it."""
        alerts = self.load.client.get(f"{self.alertmanager}/api/v2/alerts").json()
        return next((each for each in alerts if each["labels"]["alertname"] == name), None)

    def playbook(self, name: str) -> str:
        """The page that a firing alert's runbook_url leads to."""
        alert = self.firing(name)
        assert alert is not None
        answer = self.load.client.get(alert["annotations"]["runbook_url"])
        assert answer.status_code == 200
        return answer.text


@pytest.fixture(scope="module")
def watched(deployment: Deployment) -> Iterator[Watched]:
    """Legs restarted for this, so that every counter starts at zero."""
    for name in ("prometheus", "prometheus-alertmanager"):
        program(name)
    ports = free_ports(5)
    receiver = OtlpReceiver(*ports[:2])
    before = json.loads(json.dumps(deployment.spec))
    spec = deployment.spec
    spec["kv_transfer"]["decode_ttl"] = f"{DECODE_TTL}s"
    spec["router"] |= {"handle_ttl": f"{DECODE_TTL - 1}s", "route": "readback"}
    spec["observability"] |= {"otlp_endpoint": receiver.grpc_url, "otlp_protocol": "grpc"}
    spec["observability"]["stack"] |= {
        "prometheus_port": ports[2],
        "alertmanager_port": ports[3],
        "grafana_port": ports[4],
        "scrape_interval": "1s",
        "alert_window": f"{ALERT_WINDOW}s",
        "ttft_slo": "25s",
    }
    deployment.write()
    deployment.pdctl("down", deployment.name, "--grace", "10", ok=False)
    deployment.pdctl("up", "SPEC")
    deployment.pdctl("observe", "up", "SPEC")
    load = Load(deployment.router_url)
    try:
        yield Watched(
            deployment,
            receiver,
            load,
            Prometheus(f"http://127.0.0.1:{ports[2]}"),
            f"http://127.0.0.1:{ports[3]}",
        )
    finally:
        load.client.close()
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
    alerts = loaded.load.client.get(f"{loaded.alertmanager}/api/v2/alerts").json()
    assert [alert["labels"]["alertname"] for alert in alerts] == []


def test_turns_that_come_too_late(loaded: Watched) -> None:
    talks: dict[str, list[dict[str, str]]] = {uuid.uuid4().hex: [] for _ in range(6)}
    for name, talk in talks.items():
        loaded.load.turn(talk, name)
    pins = f'{telemetry.ENGINE_PINS.name}{{deployment="{loaded.deployment.name}",role="decode"}}'
    until(
        "decode has let all turns go",
        lambda: [series.value for series in loaded.prometheus.instant(pins)] == [0],
    )
    late = [loaded.load.turn(talk, name).outcome for name, talk in talks.items()]
    assert late == ["expired"] * 6
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


def test_always_a_miss(loaded: Watched) -> None:
    """Decode was left without bidirectional transfer: it returns no handles."""
    deployment = loaded.deployment
    scripts = deployment.folder / "off"
    secret = deployment.folder / "state" / deployment.name / "secret"
    deployment.pdctl("render", "SPEC", "--bidir", "off", "-o", str(scripts))
    leg = deployment.status()["decode-0"]
    os.kill(leg["pid"], signal.SIGTERM)
    side_channel = deployment.spec["decode"]["legs"][0]["side_channel_port"]
    until("decode has ended", lambda: deployment.status()["decode-0"]["phase"] == "dead")
    until("its ports are free", lambda: not cannot_listen("127.0.0.1", side_channel))
    with (deployment.folder / "decode-off.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", str(scripts / "decode-0.sh")],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {contract.SECRET_FILE_VARIABLE: str(secret)},
        )
    try:
        health = f"{deployment.decode_url}/health"
        until("decode is back", lambda: _answers(loaded.load.client, health), 240)
        until(
            "the router sees it",
            lambda: _answers(loaded.load.client, f"{deployment.router_url}/health"),
        )
        name: str = uuid.uuid4().hex
        talk: list[dict[str, str]] = []

        def missed() -> bool:
            if len(talk) > 16:
                talk.clear()
            assert loaded.load.turn(talk, name).outcome == "miss"
            return loaded.firing("PdAlwaysMiss") is not None

        until("the alert", missed, 180)
        assert "bidirectional" in loaded.playbook("PdAlwaysMiss")
        until("legs disagree", lambda: loaded.firing("PdBidirectionalDisagree"))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
