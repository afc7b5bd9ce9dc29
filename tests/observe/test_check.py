"""`pdctl dashboards check` against a real Prometheus."""

import json
from pathlib import Path

import httpx
import pytest

from pd_connector import telemetry
from pdctl.observe.alerts import ALERTS
from pdctl.observe.boards import BOARDS
from pdctl.observe.prometheus import Prometheus
from tests.cli import pdctl
from tests.observe.conftest import Watched, quick_spec
from tests.observe.exemplars import bucket_traces
from tests.observe.fake_legs import TRACE_ID
from tests.programs import program
from tests.waiting import until

QUERIES = sum(len(panel.queries) for board in BOARDS for panel in board.panels)


def test_every_panel_and_rule_finds_data_under_load(watched: Watched) -> None:
    words = ("--prometheus", watched.prometheus.url, "--window", "20s")
    ended = pdctl("dashboards", "check", *words, "--json")
    rows = json.loads(ended.out)["queries"]
    assert [row for row in rows if row["found"] != "data"] == []
    assert ended.code == 0
    assert [row["kind"] for row in rows].count("panel") == QUERIES
    assert {row["where"] for row in rows if row["kind"] == "rule"} == {a.name for a in ALERTS}


def test_another_deployment_has_no_series(watched: Watched) -> None:
    words = ("--prometheus", watched.prometheus.url, "--deployment", "other")
    ended = pdctl("dashboards", "check", *words)
    assert ended.code == 1
    name = telemetry.ROUTER_TURNS.name
    line = f'pd-turns: Turns per second: no series: {name} has none with deployment=~"other"'
    assert f"panel  {line}" in ended.out.splitlines()


def test_legs_that_are_down_are_named(no_state: Path, tmp_path: Path) -> None:
    for name in ("prometheus", "prometheus-alertmanager"):
        program(name)
    path, spec = quick_spec(tmp_path, "absent")
    assert pdctl("observe", "up", path).code == 0
    try:
        url = f"http://127.0.0.1:{spec['observability']['stack']['prometheus_port']}"
        until("it has looked", lambda: len(Prometheus(url).instant("up == 0")) == 3)
        ended = pdctl("dashboards", "check", "--prometheus", url)
        assert ended.code == 1
        port = spec["decode"]["legs"][0]["port"]
        assert f"decode-0 at 127.0.0.1:{port} does not answer {url}" in ended.lines
    finally:
        assert pdctl("observe", "down", "absent").code == 0


def test_reasons(watched: Watched) -> None:
    """A span before the first sample: metrics are there, but nothing moved."""
    words = ("--prometheus", watched.prometheus.url, "--window", "500ms")
    ended = pdctl("dashboards", "check", *words)
    assert ended.code == 1
    assert "panel  pd-turns: Turns per second: no traffic: " in ended.out


def test_counts_on_panels_are_the_deployment_s_own(watched: Watched) -> None:
    """Totals are not extrapolated: they are what the legs count."""
    panel = next(
        panel
        for panel in BOARDS[0].panels
        if panel.title == "Turns by outcome since the router's start"
    )
    assert "increase" not in panel.queries[0].expr
    assert "rate" not in panel.queries[0].expr


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "http://127.0.0.1:1",
            "http://127.0.0.1:1: [Errno 111] Connection refused; 'pdctl observe up SPEC' runs a "
            "Prometheus, --prometheus says where another is",
        ),
        ("http://127.0.0.1:x", "http://127.0.0.1:x is not a URL: "),
        ("nowhere", "nowhere: Request URL is missing an 'http://' or 'https://' protocol."),
    ],
)
def test_no_prometheus_is_one_line(url: str, says: str) -> None:
    ended = pdctl("dashboards", "check", "--prometheus", url)
    assert ended.code in (1, 2)
    assert len(ended.lines) == 1
    assert ended.lines[0].startswith(says)


def test_a_leg_is_no_prometheus(watched: Watched) -> None:
    leg = watched.prometheus.instant("up")[0].labels["instance"]
    ended = pdctl("dashboards", "check", "--prometheus", f"http://{leg}")
    assert ended.code == 1
    assert ended.lines == [
        f"http://{leg}/api/v1/label/__name__/values answers 200 and no JSON: is that a Prometheus?"
    ]


def test_exemplars_reach_prometheus(watched: Watched) -> None:
    """A slow bucket leads to its trace."""
    assert bucket_traces(watched.prometheus) == {TRACE_ID}


def test_prometheus_serves_the_playbooks(watched: Watched) -> None:
    for rule in watched.prometheus.rules():
        if rule["type"] == "alerting":
            page = httpx.get(rule["annotations"]["runbook_url"], trust_env=False)
            assert page.status_code == 200
            assert "<h1>" in page.text
