"""`pdctl observe render`: files that the programs they are for accept."""

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_connector.contract import Outcome
from pdctl.observe.alerts import ALERTS
from pdctl.observe.boards import BOARDS
from pdctl.observe.conditions import EXPECTED
from pdctl.runbook import playbooks
from tests.cli import pdctl
from tests.observe.conftest import REFERENCE, quick_spec
from tests.programs import program

PAGES = {html.escape(page.title): page.alerts for page in playbooks()}
EXAMPLES = sorted(REFERENCE.parent.glob("*.yaml"))


def rendered(spec: Path, out: Path) -> dict[str, str]:
    ended = pdctl("observe", "render", spec, "-o", out)
    assert ended.code == 0, ended.err
    return {
        str(path.relative_to(out)): path.read_text()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def load(text: str) -> Any:
    return yaml.safe_load(text)


@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda path: path.stem)
def test_accepted_by_prometheus_and_alertmanager(spec: Path, tmp_path: Path) -> None:
    rendered(spec, tmp_path)
    for command in (
        ("promtool", "check", "config", "prometheus/prometheus.yml"),
        ("amtool", "check-config", "alertmanager/alertmanager.yml"),
    ):
        ended = subprocess.run(
            [program(command[0]), *command[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_router_that_speaks_tls(tmp_path: Path) -> None:
    spec = load(REFERENCE.read_text())
    spec["router"] |= {"tls_certificate": "c.pem", "tls_key": "k.pem"}
    path = tmp_path / "tls.yaml"
    path.write_text(yaml.safe_dump(spec))
    files = rendered(path, tmp_path / "out")
    (job,) = load(files["prometheus/prometheus.yml"])["scrape_configs"]
    schemes = {
        config["labels"]["leg"]: config["labels"].get("__scheme__")
        for config in job["static_configs"]
    }
    assert schemes == {"prefill-0": None, "decode-0": None, "router-0": "https"}
    ended = subprocess.run(
        [program("promtool"), "check", "config", tmp_path / "out/prometheus/prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_twice_the_same(tmp_path: Path) -> None:
    assert rendered(REFERENCE, tmp_path / "a") == rendered(REFERENCE, tmp_path / "b")


def test_every_leg_is_a_target(tmp_path: Path) -> None:
    files = rendered(REFERENCE.with_name("p5en-qwen3-32b.yaml"), tmp_path)
    (job,) = load(files["prometheus/prometheus.yml"])["scrape_configs"]
    spec = load(REFERENCE.with_name("p5en-qwen3-32b.yaml").read_text())
    targets = {
        (config["labels"]["leg"], config["labels"]["role"], *config["targets"])
        for config in job["static_configs"]
    }
    expected = {
        (f"{role}-{index}", role, f"{leg['host']}:{leg['port']}")
        for role in ("prefill", "decode")
        for index, leg in enumerate(spec[role]["legs"])
    }
    assert expected < targets
    assert {leg for leg, role, _ in targets if role == "router"} == {"router-0"}
    assert all(config["labels"]["deployment"] == spec["name"] for config in job["static_configs"])


def test_rules_expect_what_the_spec_says(tmp_path: Path) -> None:
    files = rendered(REFERENCE.with_name("p5en-qwen3-32b.yaml"), tmp_path)
    groups = load(files["prometheus/rules.yml"])["groups"]
    (record,) = (rule for group in groups for rule in group["rules"] if "record" in rule)
    assert record["record"] == EXPECTED
    assert record["labels"]["provider"] == "efa"
    assert record["labels"]["bidirectional"] == "on"
    assert [rule["alert"] for rule in groups[1]["rules"]] == [alert.name for alert in ALERTS]


def test_windows_and_objective_are_the_spec_s(tmp_path: Path) -> None:
    path, spec = quick_spec(
        tmp_path,
        "quick",
        ttft_slo="5s",
        ttft_target=0.9,
        playbooks_url="https://wiki.example/pd",
        alert_webhook='https://pager.example/hook?a=1&b="2',
    )
    files = rendered(path, tmp_path / "out")
    rules = {
        rule["alert"]: rule
        for group in load(files["prometheus/rules.yml"])["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert rules["PdScrapeMissing"]["for"] == "10s"
    assert 'le="5.0"' in rules["PdTtftBurnsSlowly"]["expr"]
    assert "> 0.6)" in rules["PdTtftBurnsSlowly"]["expr"]
    url = rules["PdAlwaysMiss"]["annotations"]["runbook_url"]
    assert url == "https://wiki.example/pd/always-miss.html"
    receivers = load(files["alertmanager/alertmanager.yml"])["receivers"]
    assert receivers[1]["webhook_configs"][0]["url"] == 'https://pager.example/hook?a=1&b="2'
    for board in BOARDS:
        variables = {
            each["name"]: each
            for each in json.loads(files[f"grafana/dashboards/{board.uid}.json"])["templating"][
                "list"
            ]
        }
        assert variables["ttft_slo"]["query"] == "5.0"
        assert variables["playbooks"]["query"] == "https://wiki.example/pd"
    assert spec["name"] in files["compose.yaml"]


def test_the_collector_keeps_every_turn_that_was_not_read_back(tmp_path: Path) -> None:
    config = load(rendered(REFERENCE, tmp_path)["collector/config.yaml"])
    policies = {each["name"]: each for each in config["processors"]["tail_sampling"]["policies"]}
    kept = set(policies["not-read-back"]["string_attribute"]["values"])
    assert kept == {outcome.value for outcome in Outcome} - {"hit"}
    assert policies["late-first-token"]["ottl_condition"]["span"] == [
        'attributes["pd.ttft_ms"] > 2500.0'
    ]
    assert policies["errors"]["status_code"]["status_codes"] == ["ERROR"]
    assert policies["some-hits"]["probabilistic"]["sampling_percentage"] == 5
    pipeline = config["service"]["pipelines"]["traces"]
    defined = {section: set(config[section]) for section in ("receivers", "exporters")}
    assert set(pipeline["receivers"]) <= defined["receivers"]
    assert set(pipeline["exporters"]) <= defined["exporters"]
    assert set(pipeline["processors"]) == set(config["processors"])


def test_one_port_leads_from_collector_to_tempo(tmp_path: Path) -> None:
    files = rendered(REFERENCE, tmp_path)
    tempo = load(files["tempo/tempo.yaml"])
    receiver = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert load(files["collector/config.yaml"])["exporters"]["otlp/tempo"]["endpoint"] == receiver


def test_data_sources_lead_to_each_other(tmp_path: Path) -> None:
    text = rendered(REFERENCE, tmp_path)["grafana/provisioning/datasources/pdctl.yaml"]
    # Grafana reads $$ as $.
    sources = {each["type"]: each for each in load(text.replace("$$", "$"))["datasources"]}
    assert not re.search(r"(?<!\$)\$(?!\$)", text.split("\n", 1)[1])
    exemplars = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplars[0]["datasourceUid"] == sources["tempo"]["uid"]
    links = sources["tempo"]["jsonData"]["tracesToMetrics"]
    assert links["datasourceUid"] == sources["prometheus"]["uid"]
    assert all("{$__tags}" in query["query"] for query in links["queries"])


def test_compose_pins_its_versions_and_mounts_what_is_rendered(tmp_path: Path) -> None:
    files = rendered(REFERENCE, tmp_path)
    services = load(files["compose.yaml"])["services"]
    assert set(services) == {"prometheus", "alertmanager", "tempo", "collector", "grafana"}
    for service in services.values():
        assert re.fullmatch(r"[a-z/-]+:v?[0-9]+\.[0-9]+\.[0-9]+", service["image"])
        for volume in service["volumes"]:
            if volume.startswith("./"):
                folder = volume.split(":")[0].removeprefix("./")
                assert any(name.startswith(f"{folder}/") for name in files)


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = pdctl("observe", "render", REFERENCE, "-o", tmp_path / "file" / "out")
    assert ended.code == 2
    assert len(ended.lines) == 1


def test_up_without_the_programs_says_what_to_install(
    no_state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = pdctl("observe", "up", REFERENCE)
    assert ended.code == 2
    assert ended.lines == [
        "prometheus and alertmanager not installed here (Debian: apt install prometheus "
        "prometheus-alertmanager); or run the compose.yaml of 'pdctl observe render'"
    ]
    assert not no_state.exists()


def test_down_without_up_stops_nothing(no_state: Path) -> None:
    ended = pdctl("observe", "down", "laptop")
    assert (ended.code, ended.out) == (0, "")
    assert ended.lines == ["laptop: nothing that watches it runs"]


def test_every_alert_has_its_page(tmp_path: Path) -> None:
    files = rendered(REFERENCE, tmp_path)
    rules = load(files["prometheus/rules.yml"])["groups"][1]["rules"]
    for rule in rules:
        page = rule["annotations"]["runbook_url"].removeprefix("http://127.0.0.1:9090/")
        assert page.startswith("consoles/")
        assert rule["alert"] in PAGES[files[f"prometheus/{page}"].split("<title>")[1].split("<")[0]]


def test_pages_lead_to_each_other_and_are_safe_for_go_templates(tmp_path: Path) -> None:
    files = rendered(REFERENCE, tmp_path)
    pages = {
        name.removeprefix("prometheus/consoles/"): text
        for name, text in files.items()
        if name.startswith("prometheus/consoles/")
    }
    assert len(pages) > len(ALERTS)
    for text in pages.values():
        assert "{{" not in text
        for link in re.findall(r'href="([^"]+)"', text):
            assert link in pages or link.startswith(("http://", "https://"))
