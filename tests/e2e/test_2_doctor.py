"""pdctl doctor on the real pair: quiet while it is healthy, and right when one leg is not. So are
verify and the alerts."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_connector.contract import Outcome
from pdctl.launch import processes
from pdctl.launch.local import new_record, start
from pdctl.launch.state import DeploymentState
from pdctl.plan import plan
from pdctl.spec import load

from .conftest import Conversation, Deployment
from .routers import listens
from .watch import Load, Watch, until


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


@pytest.fixture(scope="module")
def one_sided(deployment: Deployment) -> Iterator[Watch]:
    """Decode is started anew without bidirectional transfer, as by a script of before."""
    watch = Watch(deployment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCTL_STATE_DIR", str(deployment.folder / "state"))
        state = DeploymentState(deployment.name)
        spec = load(deployment.spec_file, bidirectional=False).spec
        leg = next(leg for leg in plan(spec, deployment.folder).legs if leg.name == "decode-0")
        processes.stop([state.records()["decode-0"].launch_id], 10.0)
        start(state, leg, new_record(leg, False))
    deployment.pdctl("observe", "up", "SPEC")
    until("decode-0 is healthy", lambda: deployment.status()["decode-0"]["phase"] == "healthy", 240)
    until("the router sees it", lambda: listens(deployment.router_url))
    yield watch
    deployment.pdctl("observe", "down", deployment.name)


def test_a_decode_leg_without_bidirectional_transfer(
    deployment: Deployment, one_sided: Watch, tmp_path: Path
) -> None:
    live = doctor(deployment, "SPEC")
    assert bad(live)[0][:2] == ("PD3007", "decode-0")
    assert live["findings"][0]["playbook"].startswith("playbooks/PD3007-")
    bundle = tmp_path / "one-sided.tar.gz"
    deployment.pdctl("collect", "SPEC", "-o", str(bundle))
    assert bad(doctor(deployment, "--bundle", str(bundle))) == bad(live)


def test_verify_tells_that_no_handle_comes(deployment: Deployment, one_sided: Watch) -> None:
    told = deployment.pdctl("verify", "SPEC", ok=False)
    assert told.returncode == 1
    assert "FAIL  decode returned a handle" in told.stdout


def test_always_a_miss(deployment: Deployment, one_sided: Watch) -> None:
    """Decode returns no handles, and that is told."""
    load, name = Load(deployment.router_url), uuid.uuid4().hex
    talk: list[dict[str, str]] = []

    def missed() -> bool:
        if len(talk) > 16:
            talk.clear()
        assert load.turn(talk, name).outcome == Outcome.MISS.value
        return one_sided.firing("PdAlwaysMiss") is not None

    until("the alert", missed, 180)
    load.client.close()
    assert "bidirectional" in one_sided.playbook("PdAlwaysMiss")
    until("legs disagree", lambda: one_sided.firing("PdBidirectionalDisagree"))


def test_its_fix_mends_it(deployment: Deployment, one_sided: Watch) -> None:
    up = deployment.pdctl("up", "SPEC", "--bidir", "on")
    assert "decode-0: changed in the spec, restarting it" in up.stderr
    assert bad(doctor(deployment, "SPEC")) == []
