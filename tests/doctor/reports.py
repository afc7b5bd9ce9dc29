"""Reports of failures as data (``cases/``, ``variants/``, ``quiet/``) and bundles made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdctl.doctor.checks import ALL
from pdctl.doctor.diagnose import of_bundles
from pdctl.doctor.run import Diagnosis

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """``finding`` is the code that must be found first, None where all must stay quiet."""

    title: str
    category: str | None
    finding: str | None
    legs: dict[str, dict[str, Any]]


def cases(folder: str) -> list[Case]:
    found = []
    for path in sorted((HERE / folder).glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        for case in document["cases"]:
            found.append(
                Case(
                    case["title"],
                    case.get("category", document.get("category")),
                    case.get("finding"),
                    case["legs"],
                )
            )
    return found


def write_bundle(case: Case, root: Path) -> Path:
    legs = []
    for name, parts in case.legs.items():
        if name != "deployment":
            legs.append({"name": name, "role": name.rpartition("-")[0]})
        for kind, content in parts.items():
            if isinstance(content, list):
                for number, text in enumerate(content, 1):
                    _write(root / name / kind / f"{number:02}.txt", text)
            else:
                _write(root / name / f"{kind}.{'json' if kind == 'settings' else 'txt'}", content)
    _write(root / "bundle.yaml", yaml.safe_dump({"format": "pdctl-bundle/1", "legs": legs}))
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def diagnosis(case: Case, root: Path) -> Diagnosis:
    return of_bundles((write_bundle(case, root),), list(ALL), lambda _: None)


def fits(case: Case, found: Diagnosis) -> tuple[bool, list[str]]:
    """Whether the first cause is the case's, and codes of other errors that stand beside it.

    A case whose finding is information is named when nothing worse is said.
    """
    first = found.findings[0] if found.findings else None
    right = (
        first is not None
        and first.check.code == case.finding
        and first.check.category.value == case.category
    )
    extra = [
        each.check.code
        for each in found.findings
        if each.severity == "error" and each.check.code != case.finding
    ]
    return right, extra
