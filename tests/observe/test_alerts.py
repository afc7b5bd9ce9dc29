"""Every alert fires on what it is for and is quiet on a healthy deployment: promtool's tests."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_connector import contract, telemetry
from pdctl.observe.alerts import ALERTS, rules
from pdctl.observe.conditions import EXPECTED, Settings
from pdctl.observe.grafana_rules import rule_group
from tests.programs import program

D = 'deployment="d"'
ROUTER = f'{D},instance="r:1",job="pdctl"'
PREFILL = f'{D},leg="prefill-0",role="prefill",instance="p:1",job="pdctl"'
DECODE = f'{D},leg="decode-0",role="decode",instance="c:1",job="pdctl"'
SPEC = {"deployment": "d", "bidirectional": "on", "provider": "efa", "connector": "pdctl"}
OTHER = {"deployment": "other", "provider": "efa", "connector": "pdctl"}
MINUTES = 60

TURNS = telemetry.ROUTER_TURNS.name
TTFT = telemetry.ROUTER_TTFT.name
SOURCE = contract.ENGINE_PROMPT_TOKENS_BY_SOURCE
PINS_ENDED = telemetry.ENGINE_PINS_ENDED.name
INFO = telemetry.ENGINE_INFO.name


def rising(per_minute: float) -> str:
    """A counter that rises through the whole test."""
    return f"0+{per_minute:g}x{2 * MINUTES}"


def steady(value: float) -> str:
    return f"{value:g}x{2 * MINUTES}"


PAIR = f'{telemetry.ROUTER_PAIR_UP.name}{{{ROUTER},prefill_leg="prefill-0",decode_leg="decode-0"}}'
HEALTHY = {
    f'{TURNS}{{{ROUTER},outcome="hit"}}': rising(80),
    f'{TURNS}{{{ROUTER},outcome="miss"}}': rising(20),
    f'{TURNS}{{{ROUTER},outcome="expired"}}': rising(1),
    f"{telemetry.ROUTER_HANDLES_SENT.name}{{{ROUTER}}}": rising(80),
    f'{SOURCE}{{{PREFILL},source="external_kv_transfer"}}': rising(80_000),
    f"{contract.ENGINE_NIXL_FAILED}{{{PREFILL}}}": steady(0),
    f"{contract.ENGINE_NIXL_TRANSFERS}{{{PREFILL}}}": rising(80),
    f'{INFO}{{{PREFILL},bidirectional="on",provider="efa"}}': steady(1),
    f'{INFO}{{{DECODE},bidirectional="on",provider="efa"}}': steady(1),
    f'{telemetry.ROUTER_INFO.name}{{{ROUTER},bidirectional="on"}}': steady(1),
    f"{telemetry.ENGINE_PINNED_BLOCKS.name}{{{DECODE}}}": steady(60),
    f"{telemetry.ENGINE_BLOCKS.name}{{{DECODE}}}": steady(100),
    f'{PINS_ENDED}{{{DECODE},reason="read"}}': rising(80),
    f'{PINS_ENDED}{{{DECODE},reason="high_water"}}': rising(1),
    f'{TTFT}_bucket{{{ROUTER},le="2.5"}}': rising(98),
    f"{TTFT}_count{{{ROUTER}}}": rising(100),
    PAIR: steady(1),
    f'{telemetry.ROUTER_LEG_UP.name}{{{ROUTER},leg="decode-0",role="decode"}}': steady(1),
    f'{telemetry.ROUTER_HANDLES_HELD.name}{{{ROUTER},leg="decode-0"}}': steady(100),
    f"{telemetry.ROUTER_HANDLES_LIMIT.name}{{{ROUTER}}}": steady(1000),
    f"{telemetry.ROUTER_HANDLES_BYTES.name}{{{ROUTER}}}": steady(300_000),
    f"{telemetry.ROUTER_HANDLES_BYTES_LIMIT.name}{{{ROUTER}}}": steady(3_000_000),
    f"up{{{PREFILL}}}": steady(1),
    f"up{{{DECODE}}}": steady(1),
}


@dataclass
class Broken:
    """What differs from a healthy deployment (None: the series is not there)."""

    series: dict[str, str | None]
    labels: dict[str, str] = field(default_factory=lambda: {"deployment": "d"})
    summary: str = ""


LEG = {"deployment": "d", "leg": "decode-0"}
WHOLE = {"role": "decode", "instance": "c:1", "job": "pdctl"}
BROKEN = {
    "PdReuseStopped": Broken(
        {f'{SOURCE}{{{PREFILL},source="external_kv_transfer"}}': steady(80_000)},
        summary="d: the router sent 400 handles, and prefill read no token back from decode",
    ),
    "PdAlwaysMiss": Broken(
        {
            f'{TURNS}{{{ROUTER},outcome="hit"}}': steady(0),
            f'{TURNS}{{{ROUTER},outcome="miss"}}': rising(100),
        },
        summary="d: 99.01% of turns had no handle (outcome miss) although bidirectional transfer "
        "is on",
    ),
    "PdHandlesExpire": Broken(
        {f'{TURNS}{{{ROUTER},outcome="expired"}}': rising(20)},
        summary="d: 20% of the turns that had a handle came too late for decode's blocks",
    ),
    "PdTransferFailures": Broken(
        {f"{contract.ENGINE_NIXL_FAILED}{{{PREFILL}}}": rising(20)},
        summary="d: 20% of NIXL transfers fail",
    ),
    "PdProviderFallback": Broken(
        {
            f'{INFO}{{{DECODE},bidirectional="on",provider="efa"}}': None,
            f'{INFO}{{{DECODE},bidirectional="on",provider="tcp"}}': steady(1),
        },
        LEG | WHOLE | {"bidirectional": "on", "provider": "tcp"},
        "d: decode-0 moves KV over provider 'tcp', not over the one that the spec names",
    ),
    "PdBidirectionalDisagree": Broken(
        {
            f'{INFO}{{{PREFILL},bidirectional="on",provider="efa"}}': None,
            f'{INFO}{{{PREFILL},bidirectional="off",provider="efa"}}': steady(1),
        },
        summary="d: its legs disagree on bidirectional transfer (2 settings)",
    ),
    "PdPinnedKvHigh": Broken(
        {f"{telemetry.ENGINE_PINNED_BLOCKS.name}{{{DECODE}}}": steady(85)},
        LEG,
        "d: finished turns hold 85% of the KV blocks of decode-0",
    ),
    "PdPinnedKvFull": Broken(
        {f"{telemetry.ENGINE_PINNED_BLOCKS.name}{{{DECODE}}}": steady(97)},
        LEG,
        "d: finished turns hold 97% of the KV blocks of decode-0",
    ),
    "PdPinnedTurnsCrowdedOut": Broken(
        {f'{PINS_ENDED}{{{DECODE},reason="high_water"}}': rising(20)},
        LEG,
        "d: decode-0 freed 20% of finished turns' blocks for want of memory, before anybody came "
        "back for them",
    ),
    "PdTtftBurnsFast": Broken(
        {f'{TTFT}_bucket{{{ROUTER},le="2.5"}}': rising(20)},
        summary="d: 80% of streamed turns miss the TTFT objective, by far more than it allows",
    ),
    "PdTtftBurnsSlowly": Broken(
        {f'{TTFT}_bucket{{{ROUTER},le="2.5"}}': rising(60)},
        summary="d: 40% of streamed turns have missed the TTFT objective for hours",
    ),
    "PdPairUnhealthy": Broken(
        {PAIR: steady(0)},
        {
            "deployment": "d",
            "instance": "r:1",
            "job": "pdctl",
            "prefill_leg": "prefill-0",
            "decode_leg": "decode-0",
        },
        "d: transfers between prefill-0 and decode-0 do not work",
    ),
    "PdLegDown": Broken(
        {f'{telemetry.ROUTER_LEG_UP.name}{{{ROUTER},leg="decode-0",role="decode"}}': steady(0)},
        LEG | {"role": "decode", "instance": "r:1", "job": "pdctl"},
        "d: decode-0 does not answer the router",
    ),
    "PdRouterMapNearBound": Broken(
        {f'{telemetry.ROUTER_HANDLES_HELD.name}{{{ROUTER},leg="decode-0"}}': steady(950)},
        {"deployment": "d", "instance": "r:1"},
        "d: the router's map of handles is 95% full; the oldest are about to be dropped",
    ),
    "PdScrapeMissing": Broken(
        {f"up{{{DECODE}}}": steady(0)},
        LEG | WHOLE,
        "d: Prometheus gets no metrics from decode-0 at c:1",
    ),
    "PdConnectorSilent": Broken(
        {f'{INFO}{{{DECODE},bidirectional="on",provider="efa"}}': None},
        LEG | WHOLE,
        "d: decode-0 answers but has no pd_engine metrics: pdctl's connector is not at work there",
    ),
}


def test_every_alert_is_tested() -> None:
    assert sorted(BROKEN) == sorted(alert.name for alert in ALERTS)


@pytest.mark.parametrize("name", [alert.name for alert in ALERTS])
def test_fires(name: str, tmp_path: Path) -> None:
    broken = BROKEN[name]
    alert = next(alert for alert in ALERTS if alert.name == name)
    expected = {
        "exp_labels": broken.labels | {"severity": alert.severity},
        "exp_annotations": {
            "summary": broken.summary,
            "runbook_url": f"http://127.0.0.1:9090/consoles/{alert.slug}.html",
        },
    }
    series = {**HEALTHY, **broken.series}
    promtool(tmp_path, series, [{"alertname": name, "exp_alerts": [expected]}])


def test_a_map_can_be_full_of_few_large_handles(tmp_path: Path) -> None:
    series = {f"{telemetry.ROUTER_HANDLES_BYTES.name}{{{ROUTER}}}": steady(2_910_000)}
    name = "PdRouterMapNearBound"
    labels = BROKEN[name].labels | {"severity": "warning"}
    url = "http://127.0.0.1:9090/consoles/router-map-near-bound.html"
    summary = BROKEN[name].summary.replace("95%", "97%")
    fires = {"exp_labels": labels, "exp_annotations": {"summary": summary, "runbook_url": url}}
    promtool(tmp_path, {**HEALTHY, **series}, [{"alertname": name, "exp_alerts": [fires]}])


def test_all_are_quiet_on_a_healthy_deployment(tmp_path: Path) -> None:
    promtool(tmp_path, HEALTHY, [{"alertname": alert.name, "exp_alerts": []} for alert in ALERTS])


def test_a_short_burst_does_not_page(tmp_path: Path) -> None:
    """Half of a long window was healthy; the last three minutes were not."""
    burst = {
        f'{TURNS}{{{ROUTER},outcome="expired"}}': "0x57 10+10x3 40x60",
        f"{contract.ENGINE_NIXL_FAILED}{{{PREFILL}}}": "0x57 5+5x3 20x60",
        f"{telemetry.ENGINE_PINNED_BLOCKS.name}{{{DECODE}}}": "60x57 85x3 60x60",
        PAIR: "1x57 0x3 1x60",
    }
    promtool(
        tmp_path,
        {**HEALTHY, **burst},
        [{"alertname": alert.name, "exp_alerts": []} for alert in ALERTS],
    )


def test_no_objective_no_expectation_no_false_alarm(tmp_path: Path) -> None:
    """Nothing is expected of a deployment that only shares the Prometheus."""
    promtool(
        tmp_path,
        {
            f'{INFO}{{{DECODE},bidirectional="on",provider="tcp"}}': steady(1),
            f"up{{{DECODE}}}": steady(1),
        },
        [{"alertname": alert.name, "exp_alerts": []} for alert in ALERTS],
        rules(Settings(expected=OTHER)),
    )


@pytest.mark.parametrize("deployment", ["d", "e"])
def test_grafana_s_conditions_are_of_one_deployment(deployment: str, tmp_path: Path) -> None:
    """Without the recorded expectation, and over the series of their own deployment alone."""
    settings = Settings(expected=SPEC | {"deployment": deployment})
    alerts = [
        {"alert": rule["title"].split()[0], "expr": rule["data"][0]["model"]["expr"]}
        for rule in rule_group(settings, deployment, "prometheus").rules
    ]
    assert [each["alert"] for each in alerts] == [alert.name for alert in ALERTS]
    cases = []
    for name, broken in BROKEN.items():
        fires = [{"exp_labels": broken.labels}] if deployment == "d" else []
        cases.append(({**HEALTHY, **broken.series}, [{"alertname": name, "exp_alerts": fires}]))
    rule_file = {"groups": [{"name": "grafana", "rules": alerts}]}
    run_promtool(tmp_path, cases, rule_file, interval="10m")


def promtool(
    folder: Path,
    series: dict[str, str | None],
    wanted: list[dict[str, Any]],
    rule_file: dict[str, Any] | None = None,
) -> None:
    """Run the rules over an hour of the series; what fires at its end must be what is wanted."""
    run_promtool(folder, [(series, wanted)], rule_file or rules(Settings(expected=SPEC)))


def run_promtool(
    folder: Path,
    cases: list[tuple[dict[str, str | None], list[dict[str, Any]]]],
    rule_file: dict[str, Any],
    interval: str = "30s",
) -> None:
    """Each case apart: its series, and what must fire."""
    (folder / "rules.yml").write_text(yaml.safe_dump(rule_file))
    tests = []
    for series, wanted in cases:
        assert not any(name.startswith(EXPECTED) for name in series)
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": text}
                    for name, text in series.items()
                    if text is not None
                ],
                "alert_rule_test": [{"eval_time": f"{MINUTES}m", **each} for each in wanted],
            }
        )
    test = {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": tests}
    (folder / "test.yml").write_text(yaml.safe_dump(test))
    ended = subprocess.run(
        [program("promtool"), "test", "rules", "test.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
