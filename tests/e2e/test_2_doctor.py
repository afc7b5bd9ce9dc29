"""pdctl doctor on the real pair: quiet while it is healthy, and right when one leg is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdctl.launch import processes
from pdctl.launch.local import new_record, start
from pdctl.launch.state import DeploymentState
from pdctl.plan import plan
from pdctl.spec import load
from tests.waiting import until

from .conftest import Conversation, Deployment


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def doctor(deployment: Deployment, *words: str) -> dict[str, Any]:
    done = deployment.pdctl("doctor", *words, "-o", "json", ok=False)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def bad(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (each["code"], each["leg"], each["cause"])
        for each in report["findings"]
        if each["severity"] != "info"
    ]


def test_a_healthy_pair_is_quiet_live_and_as_a_bundle(
    deployment: Deployment, tmp_path: Path
) -> None:
    conversation = Conversation(deployment)
    conversation.say()
    conversation.say()
    live = doctor(deployment, "SPEC", "--probe")
    assert bad(live) == []
    assert "PD4563" in live["checks_run"]
    bundle = tmp_path / "healthy.tar.gz"
    deployment.pdctl("collect", "SPEC", "--probe", "-o", str(bundle))
    offline = doctor(deployment, "--bundle", str(bundle))
    assert bad(offline) == []
    assert offline["checks_run"] == live["checks_run"]


def test_a_decode_leg_without_bidirectional_transfer(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PDCTL_STATE_DIR", str(deployment.folder / "state"))
    state = DeploymentState(deployment.name)
    spec = load(deployment.spec_file, bidirectional=False).spec
    leg = next(leg for leg in plan(spec, deployment.folder).legs if leg.name == "decode-0")
    processes.stop([state.records()["decode-0"].launch_id], 10.0)
    start(state, leg, new_record(leg, False))
    until("decode-0 is healthy", lambda: deployment.status()["decode-0"]["phase"] == "healthy", 240)
    live = doctor(deployment, "SPEC")
    assert bad(live)[0][:2] == ("PD3007", "decode-0")
    assert live["findings"][0]["playbook"].startswith("playbooks/PD3007-")
    bundle = tmp_path / "one-sided.tar.gz"
    deployment.pdctl("collect", "SPEC", "-o", str(bundle))
    assert bad(doctor(deployment, "--bundle", str(bundle))) == bad(live)


def test_its_fix_mends_it(deployment: Deployment) -> None:
    up = deployment.pdctl("up", "SPEC", "--bidir", "on")
    assert "decode-0: changed in the spec, restarting it" in up.stderr
    assert bad(doctor(deployment, "SPEC")) == []
