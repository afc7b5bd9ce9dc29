"""The dashboards as files: up to date, and complete for whoever is on call."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_connector import contract, telemetry
from pdctl.observe.alerts import ALERTS, slug_of
from pdctl.observe.boards import BOARDS
from pdctl.observe.check import selectors
from pdctl.observe.conditions import EXPECTED
from pdctl.observe.panel import VARIABLES, Panel
from pdctl.runbook import playbooks
from tests.cli import pdctl

FOLDER = Path(__file__).parents[2] / "dashboards"
PANELS = [
    pytest.param(panel, id=f"{board.uid}-{panel.title}")
    for board in BOARDS
    for panel in board.panels
]
OURS = {metric.name: metric for metric in telemetry.METRICS}
VLLM = {value for value in vars(contract).values() if str(value).startswith("vllm:")}
ADDED = {"deployment", "model", "role", "leg", "instance", "job"}
"""Labels that the scrape configuration adds to every target."""


def loaded(board: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{board}.json").read_text())
    return found


def test_files_are_what_build_writes(tmp_path: Path) -> None:
    """Run `pdctl dashboards build -o dashboards` when this fails."""
    ended = pdctl("dashboards", "build", "-o", tmp_path)
    assert ended.code == 0, ended.err
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    there = {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix != ".py"}
    there.pop("__pycache__", None)
    assert made == there


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_grafana_s_fields(board: Any) -> None:
    dashboard = loaded(board.uid)
    assert dashboard["uid"] == board.uid
    assert len(board.uid) <= 40
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert set(VARIABLES) <= set(names)
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in panels] == [panel.title for panel in board.panels]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].startswith("What good looks like: ")
        assert re.fullmatch(r"\$\{playbooks\}/[a-z0-9-]+\.html", panel["links"][0]["url"])
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_s_playbook_is_there(panel: Panel) -> None:
    assert slug_of(panel.alert) in {page.slug for page in playbooks()}


def test_panels_do_not_overlap() -> None:
    for board in BOARDS:
        taken: dict[tuple[int, int], str] = {}
        for panel in loaded(board.uid)["panels"]:
            place = panel["gridPos"]
            for x in range(place["x"], place["x"] + place["w"]):
                assert x < 24
                for y in range(place["y"], place["y"] + place["h"]):
                    assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_names_what_there_is(panel: Panel) -> None:
    for query in panel.queries:
        found = selectors(query.expr)
        assert found
        for name, matchers in found:
            known_metric(name)
            for matcher in matchers:
                known_label(name, re.split("[=!]", matcher)[0])
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert any(known_label(name, label, fail=False) for name, _ in found)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_no_literal_hosts_or_deployments(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://[^\"$]+", text)) == {"http://127.0.0.1:9090/consoles"}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_names_what_there_is(alert: Any) -> None:
    from pdctl.observe.conditions import Settings  # noqa: PLC0415

    found = selectors(alert.expr(Settings()))
    assert found
    for name, matchers in found:
        if name:
            known_metric(name)
        for matcher in matchers:
            known_label(name, re.split("[=!]", matcher)[0])
    assert "$labels" in alert.summary
    assert re.fullmatch(r"[a-z0-9-]+", alert.slug)


def known_metric(name: str) -> None:
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    histogram = base in OURS and OURS[base].kind == "histogram"
    assert (
        (name in OURS and OURS[name].kind != "histogram")
        or histogram
        or name in VLLM
        or (name != base and base in VLLM)
        or name in ("up", EXPECTED)
    ), f"{name} is emitted by nobody"


def known_label(name: str, label: str, fail: bool = True) -> bool:
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    known = (
        label in ADDED
        or (base in OURS and label in (*OURS[base].labels, "le"))
        or (name in OURS and label in OURS[name].labels)
        or (name.startswith("vllm:") and label in ("source", "reason", "le"))
        or name == EXPECTED
        or (not name and label == "__name__")
    )
    assert known or not fail, f"{name} has no label {label}"
    return known


def test_alerts_in_the_docs() -> None:
    text = (FOLDER.parent / "docs/observability.md").read_text()
    for alert in ALERTS:
        assert alert.name in text


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_grafana_s_own_types_read_them(board: Any) -> None:
    """Through the typed model and back nothing is lost."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415
    from grafana_foundation_sdk.cog.plugins import register_default_plugins  # noqa: PLC0415
    from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: PLC0415

    register_default_plugins()
    dashboard = loaded(board.uid)
    read = Dashboard.from_json(dashboard)
    assert list(lost(dashboard, json.loads(json.dumps(read, cls=JSONEncoder)), "")) == []


def lost(before: Any, after: Any, where: str) -> Iterator[str]:
    """What was there and is no more; defaults that came in addition do not count."""
    if isinstance(before, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{where}.{key}")
    elif isinstance(before, list) and len(before) == len(after):
        for index, value in enumerate(before):
            yield from lost(value, after[index], f"{where}[{index}]")
    elif before != after:
        yield f"{where}: {before} became {after}"
