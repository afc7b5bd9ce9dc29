"""doctor, collect and the preflight over a deployment of fake engines and a real router."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_connector import contract
from tests.launch.conftest import Place, running
from tests.programs import program
from tests.waiting import until


class Watched(Place):
    """Fake engines whose NIXL side channels the test answers for."""

    def __init__(self, folder: Path):
        super().__init__(folder, "watched")
        self.side_channels: dict[str, socket.socket] = {}
        self.spec["decode"]["env"] = {"MY_API_KEY": "very-secret-77", "HARMLESS": "kept-88"}
        self.write()

    def open(self, role: str) -> None:
        port = self.spec[role]["legs"][0]["side_channel_port"]
        self.side_channels[role] = socket.create_server(("127.0.0.1", port))

    def close(self, role: str) -> None:
        self.side_channels.pop(role).close()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, env=self.env, check=False
        )

    def doctor(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = self.run("doctor", *words, "-o", "json")
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)

    def log(self, leg: str) -> Path:
        return self.folder / "state" / self.name / f"{leg}.log"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    place = Watched(tmp_path_factory.mktemp("doctor"))
    try:
        place.pdctl("up", "SPEC")
        # What the fakes' log lacks of a real engine's.
        with place.log("decode-0").open("a") as log:
            log.write(f"{contract.LOG_STREAM_ACTIVE}\n")
        yield place
    finally:
        for pid in running(f"PDCTL_STATE_DIR={place.folder / 'state'}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def healthy(deployed: Watched) -> Iterator[Watched]:
    for role in ("prefill", "decode"):
        deployed.open(role)
    yield deployed
    for role in list(deployed.side_channels):
        deployed.close(role)


def bad(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (each["code"], each["leg"]) for each in report["findings"] if each["severity"] != "info"
    ]


def test_a_healthy_deployment_is_quiet_and_its_bundle_says_the_same(healthy: Watched) -> None:
    code, live = healthy.doctor("SPEC", "--fail-on", "warning")
    assert (code, bad(live)) == (0, [])
    bundle = healthy.folder / "b.tar.gz"
    done = healthy.run("collect", "SPEC", "-o", str(bundle))
    assert done.returncode == 0, done.stderr
    _, offline = healthy.doctor("--bundle", str(bundle))
    for part in ("findings", "checks_run", "unknown", "skipped"):
        assert _codes(offline[part]) == _codes(live[part])


def _codes(part: list[Any]) -> list[str]:
    return [each["code"] if isinstance(each, dict) else each for each in part]


def test_a_side_channel_that_does_not_answer(healthy: Watched) -> None:
    healthy.close("decode")
    code, live = healthy.doctor("SPEC")
    assert code == 1
    assert bad(live) == [("PD2005", "decode-0")]
    bundle = healthy.folder / "silent.tar.gz"
    healthy.run("collect", "SPEC", "-o", str(bundle))
    _, offline = healthy.doctor("--bundle", str(bundle))
    assert bad(offline) == bad(live)


def test_the_json_report(healthy: Watched) -> None:
    healthy.close("prefill")
    _, report = healthy.doctor("SPEC")
    assert set(report) == {
        "schema_version", "subject", "findings", "checks_run", "unknown", "skipped", "gaps",
    }  # fmt: skip
    assert report["schema_version"] == 1
    finding = report["findings"][0]
    assert set(finding) == {
        "code", "title", "category", "severity", "confidence", "leg", "evidence", "cause", "fix",
        "playbook", "consequences",
    }  # fmt: skip
    assert finding["playbook"].startswith("playbooks/PD2005-")
    assert set(finding["evidence"][0]) == {"source", "excerpt"}


def test_text_and_markdown_hold_the_fix(healthy: Watched) -> None:
    healthy.close("decode")
    for output in ("text", "markdown"):
        done = healthy.run("doctor", "SPEC", "-o", output)
        assert done.returncode == 1
        words = " ".join(done.stdout.split())
        assert "PD2005" in words
        assert "side_channel_host to an address that the other legs reach" in words


def test_only_some_checks(healthy: Watched) -> None:
    healthy.close("decode")
    assert healthy.doctor("SPEC", "--only", "efa-fabric")[0] == 0
    _, report = healthy.doctor("SPEC", "--only", "pd2005", "--only", "PD8560")
    assert report["checks_run"] == ["PD2005", "PD8560"]
    done = healthy.run("doctor", "SPEC", "--only", "kv-expirey")
    assert done.returncode == 2
    assert "did you mean kv-expiry" in done.stderr


def test_a_bundle_holds_no_secret(healthy: Watched) -> None:
    with healthy.log("decode-0").open("a") as log:
        log.write("Received request c-1: prompt: 'my salary is 7', params: n=1\n")
        log.write("headers: Authorization: Bearer abcdef123456\n")
    bundle = healthy.folder / "secrets.tar.gz"
    healthy.run("collect", "SPEC", "-o", str(bundle))
    with tarfile.open(bundle) as archive:
        texts = {
            member.name: file.read().decode()
            for member in archive.getmembers()
            if (file := archive.extractfile(member))
        }
    everything = "\n".join(texts.values())
    for secret in ("very-secret-77", "salary", "abcdef123456"):
        assert secret not in everything
    assert "HARMLESS=kept-88" in texts["decode-0/env.txt"]
    assert "redacted_lines: 2" in texts["manifest.yaml"]
    assert {"bundle.yaml", "decode-0/log.txt", "router-0/metrics.txt"} <= set(texts)
    assert bundle.stat().st_mode & 0o077 == 0


def test_watch_tells_what_comes_and_goes(healthy: Watched) -> None:
    watching = healthy.start("doctor", "SPEC", "--watch", "--every", "1")
    lines: list[str] = []

    def said(what: str) -> bool:
        assert watching.stdout
        lines.append(watching.stdout.readline())
        return what in lines[-1]

    try:
        until("the first look", lambda: said("nothing found"))
        healthy.close("decode")
        until("it is found", lambda: said("found error PD2005 decode-0"))
        healthy.open("decode")
        until("it is gone", lambda: said("gone PD2005 decode-0"))
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=20)
    assert watching.returncode == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a SPEC or --bundle"),
        (["missing.yaml"], "missing.yaml"),
        (["--bundle", "missing.tar.gz"], "no such bundle"),
        (["SPEC", "--bundle", "x", "--watch"], "not a bundle"),
        (["SPEC", "--watch", "-o", "json"], "text only"),
    ],
)
def test_what_cannot_be_tried(deployed: Watched, words: list[str], said: str) -> None:
    done = deployed.run("doctor", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bundle_that_cannot_be_written(deployed: Watched) -> None:
    done = deployed.run("collect", "SPEC", "-o", "/nowhere/b.tar.gz")
    assert done.returncode == 2
    assert "there is no folder /nowhere" in done.stderr


def test_the_cause_of_a_failed_start_is_found_after_it(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    place.spec["decode"]["env"] = {"FAKE_START": "fail"}
    place.write()
    place.pdctl("up", "SPEC", code=1)
    _, report = place.doctor("SPEC")
    assert "no room for the KV cache" in json.dumps(report["findings"])


def test_nothing_runs(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    code, report = place.doctor("SPEC")
    assert (code, bad(report)) == (0, [("PD8560", "deployment")])
    assert place.doctor("SPEC", "--fail-on", "warning")[0] == 1


def test_a_leg_that_died(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    try:
        place.pdctl("up", "SPEC")
        with place.log("decode-0").open("a") as log:
            log.write(f"{contract.LOG_STREAM_ACTIVE}\n")
        for role in ("prefill", "decode"):
            place.open(role)
        os.kill(place.pids()["decode-0"], signal.SIGKILL)
        until("it is dead", lambda: place.legs()["decode-0"]["phase"] == "dead")
        code, report = place.doctor("SPEC")
        assert code == 1
        assert bad(report)[0] == ("PD8560", "decode-0")
        assert "router-0" not in {leg for _, leg in bad(report)}
    finally:
        place.pdctl("down", "SPEC")


def test_up_refuses_a_node_that_cannot_run_it(tmp_path: Path) -> None:
    program("fi_info")
    place = Watched(tmp_path)
    place.spec["kv_transfer"]["backend"] = "LIBFABRIC"
    place.spec["fabric"] = {"provider": "efa"}
    place.write()
    up = place.pdctl("up", "SPEC", code=1)
    assert "PD1001" in up.stderr
    assert "--skip-checks" in up.stderr
    assert place.legs() == {}
    try:
        place.pdctl("up", "SPEC", "--skip-checks")
        assert set(place.legs()) == {"prefill-0", "decode-0", "router-0"}
    finally:
        place.pdctl("down", "SPEC")
