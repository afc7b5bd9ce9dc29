"""Playbooks: a page for every finding and alert, and every command in them exists."""

import ast
import importlib
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from pdctl.cli import COMMANDS
from pdctl.doctor.checks import ALL
from pdctl.doctor.model import SEVERITIES, Category, Check
from pdctl.runbook import Playbook, playbooks, symptom_index
from pdctl.spec.model import Spec
from tests.cli import pdctl

ROOT = Path(__file__).parents[2]
SECTIONS = ["Meaning", "Impact", "Confirm", "Fix", "Prevent", "Related"]
PROGRAMS = frozenset(
    """aws chronyc cat curl dmesg env fi_info fi_pingpong getent grep ibv_devinfo ip kubectl
    ldconfig ldd ls lsmod lspci lstopo-no-graphics modinfo nc nixlbench nvidia-smi pip python ss
    strings timedatectl ucx_info ucx_perftest ulimit""".split()
)
PAGES = {page.code: page for page in playbooks()}


def commands(page: Playbook) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.body, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.code)
def test_every_check_has_its_page(check: Check) -> None:
    page = PAGES[check.code]
    assert (page.slug, page.title) == (check.playbook, check.title)
    assert (page.category, page.severity) == (check.category.value, check.severity)


def test_every_alert_has_a_page_and_every_page_names_alerts_that_exist() -> None:
    alerts = pytest.importorskip("pdctl.observe.alerts").ALERTS
    slugs = {page.slug: page for page in playbooks()}
    for alert in alerts:
        assert alert.name in slugs[alert.slug].alerts
    named = {name for page in playbooks() for name in page.alerts}
    assert named == {alert.name for alert in alerts}


@pytest.mark.parametrize("page", playbooks(), ids=lambda page: page.code)
def test_front_matter_and_sections_are_whole(page: Playbook) -> None:
    assert page.code in {check.code for check in ALL} or page.code.startswith("PD00")
    assert page.category in {category.value for category in Category}
    assert page.severity in (*SEVERITIES, "critical")
    assert page.symptoms
    headings = re.findall(r"(?m)^## (.+)$", page.body)
    assert headings == [each for each in SECTIONS if each in headings]
    assert {"Meaning", "Impact", "Confirm", "Fix"} <= set(headings)
    assert commands(page)
    for target in re.findall(r"\]\((PD[^)]+)\)", page.body):
        assert (ROOT / "playbooks" / target).is_file(), target
    for code in re.findall(r"\bPD\d{4}\b", page.body):
        assert code in PAGES, code


@pytest.mark.parametrize("page", playbooks(), ids=lambda page: page.code)
def test_every_command_exists_and_parses(
    page: Playbook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "examples/laptop.yaml", tmp_path / "spec.yaml")
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "pdctl":
            _parses(words[1:])
        else:
            assert words[0] in PROGRAMS, line
    for name in re.findall(r"\bpdctl ([a-z]+) (?:[\w-]+\.yaml|SPEC|-)", page.body):
        assert name in COMMANDS, name


def _parses(words: list[str]) -> None:
    assert words[0] in COMMANDS, words
    command: click.Command = importlib.import_module(f"pdctl.cli.{words[0]}").command
    command.make_context(words[0], words[1:])


def test_only_what_is_asked_for_is_named_in_only_options() -> None:
    known = {check.code for check in ALL} | {category.value for category in Category}
    for page in playbooks():
        for name in re.findall(r"--only (\S+)", page.body):
            assert name.rstrip(".;,") in known, (page.code, name)


def test_the_index_of_symptoms_is_up_to_date() -> None:
    text = (ROOT / "docs/symptoms.md").read_text(encoding="utf-8")
    assert text == symptom_index(), "run: pdctl runbook --index > docs/symptoms.md"


def test_runbook_shows_the_page_of_a_code_an_alert_and_a_slug() -> None:
    for query in ("PD5501", "pd5501", "5501", "no-conversation-id"):
        shown = pdctl("runbook", query)
        assert shown.code == 0
        assert "Turns do not name their conversation" in shown.out
    assert "Every turn is a miss" in pdctl("runbook", "PdAlwaysMiss").out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("cache MISS every turn", "PD0002"),
        ("Declining expired remote read for chatcmpl-1 from engine d", "PD4002"),
        ("fi_info is empty", "PD1001"),
        ("request to allocate mask for invalid number", "PD6501"),
        ("version `FABRIC_1.7' not found", "PD6503"),
        ("memlock", "PD1008"),
    ],
)
def test_runbook_finds_a_page_by_symptom(words: str, code: str) -> None:
    shown = pdctl("runbook", *words.split())
    assert shown.code == 0
    assert code in [line[:6] for line in shown.out.splitlines()[:3]], shown.out


def test_runbook_without_a_match_says_so() -> None:
    shown = pdctl("runbook", "qwertyuiop")
    assert shown.code == 1
    assert "no playbook fits 'qwertyuiop'" in shown.err


def test_settings_that_pages_and_fixes_name_exist_in_the_spec() -> None:
    texts = [page.body for page in playbooks()]
    checks = ROOT / "toolkit/pdctl/doctor/checks"
    for path in checks.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts += [
            each.value
            for each in ast.walk(tree)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
    sections = {
        name: section.annotation
        for name, section in Spec.model_fields.items()
        if isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel)
    }
    assert {"kv_transfer", "router", "fabric", "model", "engine"} <= set(sections)
    named = re.findall(rf"(?<![\w./-])({'|'.join(sections)})\.([a-z_]+)\b", "\n".join(texts))
    unknown = {
        f"{section}.{key}" for section, key in named if key not in sections[section].model_fields
    }
    assert unknown == set()
