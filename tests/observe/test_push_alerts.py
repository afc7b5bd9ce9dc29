"""`pdctl dashboards push --alerts` into a fake of Grafana's API."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from pdctl.observe.alerts import ALERTS
from pdctl.observe.boards import BOARDS
from tests.cli import Ended, pdctl
from tests.observe.conftest import REFERENCE
from tests.observe.fake_grafana import FakeGrafana
from tests.observe.test_dashboards import lost

TWO_NODES = REFERENCE.with_name("p5en-qwen3-32b.yaml")
OTHERS = 1 + 2 + len(BOARDS)
"""Folder, data sources and dashboards."""


def push(grafana: FakeGrafana, spec: Path, *words: object) -> Ended:
    return pdctl("dashboards", "push", "--grafana", grafana.url, "--spec", spec, "--alerts", *words)


def told(ended: Ended) -> list[str]:
    """What was said of the rule group and its rules."""
    assert ended.code == 0, ended.err
    return ended.out.splitlines()[OTHERS:]


def group(grafana: FakeGrafana, folder: str = "pdctl") -> dict[str, Any]:
    (title,) = (title for where, title in grafana.groups if where == folder)
    return grafana.groups[folder, title]


def test_the_second_time_changes_nothing(grafana: FakeGrafana) -> None:
    first = told(push(grafana, TWO_NODES))
    name = yaml.safe_load(TWO_NODES.read_text())["name"]
    assert first == [
        f"create    rule group pdctl-{name}",
        *(f"create    alert rule {alert.name} ({name})" for alert in ALERTS),
    ]
    grafana.writes.clear()
    assert {line.split()[0] for line in told(push(grafana, TWO_NODES))} == {"unchanged"}
    assert grafana.writes == []


def test_rules_are_grafana_s_to_change(grafana: FakeGrafana) -> None:
    """Without provenance, so that an on-call may pause one."""
    push(grafana, TWO_NODES)
    assert not any("provenance" in rule for rule in group(grafana)["rules"])


def test_a_rule_fires_on_any_answer_of_its_query(grafana: FakeGrafana) -> None:
    push(grafana, TWO_NODES)
    rules = {rule["title"].split()[0]: rule for rule in group(grafana)["rules"]}
    alert = rules["PdScrapeMissing"]
    query, fires = alert["data"]
    assert query["model"]["expr"] == 'up{job="pdctl",deployment="p5en-qwen3-32b"} == 0'
    assert query["datasourceUid"] in grafana.sources
    assert query["model"]["instant"] is True
    assert fires["model"]["expression"] == "is_number($query) || is_inf($query)"
    assert (alert["condition"], alert["noDataState"], alert["execErrState"]) == (
        "fires",
        "OK",
        "Error",
    )
    assert alert["for"] == "5m"
    assert alert["labels"] == {"severity": "critical"}
    assert alert["annotations"]["runbook_url"].endswith("/scrape-missing.html")
    assert (
        "{{ $values.query.Value | humanizePercentage }}"
        in (rules["PdPinnedKvFull"]["annotations"]["summary"])
    )
    assert not any("$value " in rule["annotations"]["summary"] for rule in rules.values())


def test_no_rule_of_what_a_spec_does_not_expect(grafana: FakeGrafana) -> None:
    spec = yaml.safe_load(REFERENCE.read_text())
    assert not spec["fabric"].get("provider")
    push(grafana, REFERENCE)
    names = {rule["title"].split()[0] for rule in group(grafana)["rules"]}
    assert names == {alert.name for alert in ALERTS} - {"PdProviderFallback"}


def test_deployments_side_by_side(grafana: FakeGrafana) -> None:
    push(grafana, REFERENCE)
    push(grafana, TWO_NODES)
    assert len(grafana.groups) == 2
    uids = [rule["uid"] for each in grafana.groups.values() for rule in each["rules"]]
    assert len(set(uids)) == len(uids)
    grafana.writes.clear()
    push(grafana, REFERENCE, "--dry-run")
    for (_, title), each in grafana.groups.items():
        deployment = title.removeprefix("pdctl-")
        for rule in each["rules"]:
            expr = rule["data"][0]["model"]["expr"]
            assert set(re.findall(r'deployment="([^"]*)"', expr)) == {deployment}


def test_dry_run_shows_the_difference(grafana: FakeGrafana, tmp_path: Path) -> None:
    push(grafana, TWO_NODES)
    changed = yaml.safe_load(TWO_NODES.read_text())
    changed.setdefault("observability", {}).setdefault("stack", {})["alert_window"] = "1m"
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(changed))
    grafana.writes.clear()
    said = told(push(grafana, spec, "--dry-run"))
    assert "          for: '5m' -> '1m'" in said
    assert grafana.writes == []
    assert "          interval: 30 -> 20" in said
    push(grafana, spec)
    assert {line.split()[0] for line in told(push(grafana, spec))} == {"unchanged"}


def test_what_others_did_stays(grafana: FakeGrafana) -> None:
    push(grafana, TWO_NODES)
    rules = group(grafana)["rules"]
    rules[0]["isPaused"] = True
    rules[0]["labels"]["team"] = "inference"
    rules[1]["for"] = "1h"
    rules.append({**rules[2], "uid": "mine", "title": "Mine"})
    said = told(push(grafana, TWO_NODES))
    assert [line.split()[0] for line in said if not line.startswith(" ")].count("update") == 1
    after = {rule["uid"]: rule for rule in group(grafana)["rules"]}
    assert after[rules[0]["uid"]]["isPaused"] is True
    assert after[rules[0]["uid"]]["labels"] == {"severity": "critical", "team": "inference"}
    assert after[rules[1]["uid"]]["for"] == "5m"
    assert "mine" in after
    assert not any({"id", "updated", "provenance"} & rule.keys() for rule in grafana.sent["rules"])


def test_a_rule_that_is_no_more_is_deleted(grafana: FakeGrafana) -> None:
    push(grafana, TWO_NODES)
    rules = group(grafana)["rules"]
    prefix = rules[0]["uid"].rpartition("-")[0]
    rules.append({**rules[2], "uid": f"{prefix}-old", "title": "PdOld (p5en-qwen3-32b)"})
    assert "delete    alert rule PdOld (p5en-qwen3-32b)" in told(push(grafana, TWO_NODES))
    assert not any(rule["uid"].endswith("-old") for rule in group(grafana)["rules"])


def test_a_group_that_a_file_provisions_is_left_alone(grafana: FakeGrafana) -> None:
    push(grafana, TWO_NODES)
    for rule in group(grafana)["rules"]:
        rule["provenance"] = "file"
        rule["for"] = "1h"
    ended = push(grafana, TWO_NODES)
    assert ended.code == 1
    assert len(ended.lines) == 1
    assert "cannot update with provided provenance '', needs 'file'" in ended.lines[0]
    assert {rule["for"] for rule in group(grafana)["rules"]} == {"1h"}


def test_what_was_done_before_a_failure_is_told(grafana: FakeGrafana) -> None:
    grafana.refuses_rules = True
    ended = push(grafana, TWO_NODES)
    assert ended.code == 1
    assert [line.split()[0] for line in ended.out.splitlines()] == ["create"] * OTHERS
    assert len(ended.lines) == 1
    assert "may not GET /api/v1/provisioning/folder/pdctl/rule-groups/" in ended.lines[0]
    assert "Admin for data sources and alert rules" in ended.lines[0]


def test_alerts_without_a_spec_are_wrong_use(grafana: FakeGrafana) -> None:
    ended = pdctl("dashboards", "push", "--grafana", grafana.url, "--alerts")
    assert ended.code == 2
    assert "--alerts needs --spec" in ended.err


def test_grafana_s_own_types_read_them(grafana: FakeGrafana) -> None:
    """Through the typed model and back nothing is lost."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415
    from grafana_foundation_sdk.cog.plugins import register_default_plugins  # noqa: PLC0415
    from grafana_foundation_sdk.models.alerting import RuleGroup  # noqa: PLC0415

    register_default_plugins()
    push(grafana, TWO_NODES)
    read = RuleGroup.from_json(json.loads(json.dumps(grafana.sent)))
    assert list(lost(grafana.sent, json.loads(json.dumps(read, cls=JSONEncoder)), "")) == []
