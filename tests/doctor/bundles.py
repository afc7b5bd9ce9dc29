"""Evidence bundles made by tests, and what doctor says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cli import pdctl

ROOT = Path(__file__).parents[2]


class Bundle:
    """A folder in the layout of a bundle."""

    def __init__(self, folder: Path):
        self.folder = folder

    def add(self, name: str, text: str) -> Bundle:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def commands(self, leg: str, file: str, outputs: dict[str, str]) -> Bundle:
        text = "".join(f"$ {line}\n{output}\n" for line, output in outputs.items())
        return self.add(f"{leg}/commands/{file}.txt", text)

    def spec(self, example: str, **changes: Any) -> Bundle:
        """An example's spec with other values at dotted paths (``__`` for a dot)."""
        spec = yaml.safe_load((ROOT / "examples" / example).read_text())
        for dotted, value in changes.items():
            section = spec
            *path, last = dotted.split("__")
            for part in path:
                section = section.setdefault(part, {})
            section[last] = value
        return self.add("deployment/spec.yaml", yaml.safe_dump(spec))

    def doctor(self, *words: str) -> dict[str, Any]:
        """The JSON report."""
        ended = pdctl("doctor", "--bundle", self.folder, "-o", "json", *words)
        assert ended.code in (0, 1), ended.err
        report: dict[str, Any] = json.loads(ended.out)
        return report

    def codes(self, *words: str) -> list[str]:
        """Codes of the causes that are errors or warnings."""
        found = self.doctor(*words)["findings"]
        return [each["code"] for each in found if each["severity"] != "info"]


def unknown(report: dict[str, Any]) -> set[str]:
    return {each["code"] for each in report["unknown"]}
