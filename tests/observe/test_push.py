"""`pdctl dashboards push` into a fake of Grafana's API."""

import json
import subprocess
from pathlib import Path

import pytest

from pdctl.observe.boards import BOARDS
from tests.cli import Ended, pdctl
from tests.observe.conftest import REFERENCE
from tests.observe.fake_grafana import EDITOR, VIEWER, FakeGrafana
from tests.ports import free_ports


def push(grafana: FakeGrafana, *words: object) -> Ended:
    return pdctl("dashboards", "push", "--grafana", grafana.url, *words)


def actions(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.err
    return [line.split()[0] for line in ended.out.splitlines() if not line.startswith(" ")]


def test_the_second_time_changes_nothing(grafana: FakeGrafana) -> None:
    first = push(grafana, "--spec", REFERENCE)
    assert actions(first) == ["create"] * (1 + 2 + len(BOARDS))
    assert set(grafana.dashboards) == {board.uid for board in BOARDS}
    assert {each["meta"]["folderUid"] for each in grafana.dashboards.values()} == {"pdctl"}
    assert set(grafana.sources) == {"pdctl-prometheus", "pdctl-tempo"}
    grafana.writes.clear()
    second = push(grafana, "--spec", REFERENCE)
    assert actions(second) == ["unchanged"] * (1 + 2 + len(BOARDS))
    assert grafana.writes == []


def test_dashboards_alone_without_a_spec(grafana: FakeGrafana) -> None:
    assert actions(push(grafana)) == ["create"] * (1 + len(BOARDS))
    assert grafana.sources == {}


def test_dry_run_shows_the_difference_and_writes_nothing(grafana: FakeGrafana) -> None:
    push(grafana)
    saved = grafana.dashboards["pd-turns"]["dashboard"]
    saved["title"] = "mine now"
    saved["panels"][1]["targets"][0]["expr"] = "up"
    grafana.writes.clear()
    ended = push(grafana, "--dry-run")
    assert actions(ended).count("update") == 1
    assert "          title: 'mine now' -> 'pdctl / Turns and TTFT'" in ended.out.splitlines()
    assert "          panels[1].targets[0].expr: 'up' -> " in ended.out
    assert grafana.writes == []
    assert actions(push(grafana)).count("update") == 1
    assert set(actions(push(grafana))) == {"unchanged"}
    assert grafana.dashboards["pd-turns"]["dashboard"]["title"] == "pdctl / Turns and TTFT"
    assert grafana.dashboards["pd-turns"]["dashboard"]["version"] == 2


def test_dry_run_into_an_empty_grafana(grafana: FakeGrafana) -> None:
    assert set(actions(push(grafana, "--dry-run", "--spec", REFERENCE))) == {"create"}
    assert grafana.writes == []


def test_what_others_added_to_a_data_source_stays(grafana: FakeGrafana) -> None:
    push(grafana, "--spec", REFERENCE)
    source = grafana.sources["pdctl-prometheus"]
    source["jsonData"]["httpMethod"] = "POST"
    source["url"] = "http://elsewhere:9090"
    ended = push(grafana, "--spec", REFERENCE)
    assert "url: 'http://elsewhere:9090' -> 'http://127.0.0.1:9090'" in ended.out
    assert grafana.sources["pdctl-prometheus"]["jsonData"]["httpMethod"] == "POST"
    assert grafana.sources["pdctl-prometheus"]["url"] == "http://127.0.0.1:9090"


def test_moved_into_the_folder_asked_for(grafana: FakeGrafana) -> None:
    push(grafana)
    ended = push(grafana, "--folder", "On call")
    assert actions(ended) == ["create"] + ["update"] * len(BOARDS)
    assert "          folder: pdctl -> on-call" in ended.out.splitlines()
    assert {each["meta"]["folderUid"] for each in grafana.dashboards.values()} == {"on-call"}


def test_json(grafana: FakeGrafana) -> None:
    told = json.loads(push(grafana, "--json").out)
    assert told["dry_run"] is False
    assert {change["action"] for change in told["changes"]} == {"create"}


def test_somebody_saves_at_the_same_moment(
    grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(grafana)
    grafana.dashboards["pd-turns"]["dashboard"]["title"] = "mine now"
    save = grafana._save

    def saved_before(body: dict) -> tuple[int, object]:  # type: ignore[type-arg]
        grafana.dashboards["pd-turns"]["dashboard"]["version"] += 1
        return save(body)

    monkeypatch.setattr(grafana, "_save", saved_before)
    ended = push(grafana)
    assert ended.code == 1
    assert ended.lines == [
        f"{grafana.url}: POST /api/dashboards/db: The dashboard has been changed by someone else "
        "(412)"
    ]
    assert grafana.dashboards["pd-turns"]["dashboard"]["title"] == "mine now"


def test_no_token(grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN")
    ended = push(grafana)
    assert ended.code == 2
    assert ended.lines == [
        "GRAFANA_TOKEN is not set: it holds the token of a Grafana service account"
    ]


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("glsa_wrong", "Grafana does not know the token in GRAFANA_TOKEN (401)"),
        ("glsa_wröng", "GRAFANA_TOKEN holds characters that no token has"),
        (
            VIEWER,
            "the token may not POST /api/folders (403): You'll need additional permissions. "
            "Permissions needed: folders:create; give its service account the role Editor, or "
            "Admin for data sources and alert rules",
        ),
    ],
)
def test_a_wrong_token_is_one_line(
    grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch, token: str, says: str
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", token)
    ended = push(grafana)
    assert ended.code != 0
    assert len(ended.lines) == 1
    assert ended.lines[0].removeprefix(f"{grafana.url}: ") == says
    assert grafana.dashboards == {}


def test_a_missing_sub_path_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", EDITOR)
    fake = FakeGrafana(free_ports(1)[0], "/grafana")
    try:
        root = fake.url.removesuffix("/grafana")
        ended = pdctl("dashboards", "push", "--grafana", root)
        assert ended.code == 1
        assert ended.lines == [
            f"{root}: no Grafana there (404 on /api/health); does its URL have a sub-path?"
        ]
        assert set(actions(push(fake))) == {"create"}
    finally:
        fake.close()


def test_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", EDITOR)
    both = tmp_path / "both.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=grafana"
    subprocess.run(
        [
            *command.split(),
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            both,
            "-out",
            tmp_path / "ca.pem",
        ],
        check=True,
        capture_output=True,
    )
    both.write_text(both.read_text() + (tmp_path / "ca.pem").read_text())
    fake = FakeGrafana(free_ports(1)[0], certificate=both)
    try:
        ended = push(fake)
        assert ended.code == 1
        assert ended.lines == [
            f"{fake.url}: its certificate is not trusted (self-signed certificate); give its CA "
            "with --ca"
        ]
        assert set(actions(push(fake, "--ca", tmp_path / "ca.pem"))) == {"create"}
        missing = push(fake, "--ca", tmp_path / "none.pem")
        assert (missing.code, len(missing.lines)) == (2, 1)
    finally:
        fake.close()


def test_http_for_https_is_one_line(grafana: FakeGrafana) -> None:
    ended = pdctl("dashboards", "push", "--grafana", grafana.url.replace("http:", "https:"))
    assert ended.code == 1
    assert len(ended.lines) == 1
    assert "is that port http, not https?" in ended.lines[0]
