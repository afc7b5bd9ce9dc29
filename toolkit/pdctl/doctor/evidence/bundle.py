"""Evidence bundles: a folder or a tar file, any part of it missing.

bundle.yaml              format, legs: [{name, role}]
LEG/log.txt              engine or router log; log.txt.1, log.txt.2.gz ... are older parts
LEG/metrics.txt          Prometheus text; scrapes are separated by a line '# --- scrape'
LEG/env.txt              KEY=VALUE lines
LEG/config.txt           settings in use: YAML, JSON or a command line
LEG/versions.txt         NAME==VERSION or 'name version' lines
LEG/settings.json        what the leg's settings endpoint answers
LEG/http/NN.txt          a captured request, response or stream
LEG/commands/NN.txt      '$ command' and what it printed
deployment/...           what belongs to no single leg; deployment/spec.yaml is the spec
gaps.txt                 what could not be collected, one a line
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdctl.doctor.evidence.archive import Entry, Refused, open_tar, unzipped
from pdctl.doctor.evidence.config import parse_config
from pdctl.doctor.evidence.facts import Capture, Command, Evidence, LegEvidence
from pdctl.doctor.evidence.metrics import parse_metrics
from pdctl.doctor.evidence.scan import Scanner
from pdctl.doctor.evidence.small import (
    load_yaml,
    parse_commands,
    parse_env,
    parse_settings,
    parse_versions,
)
from pdctl.doctor.evidence.text import decoded, printable, tame
from pdctl.doctor.model import DEPLOYMENT, Pattern
from pdctl.errors import PdctlError
from pdctl.plan import plan
from pdctl.spec.model import Spec

FORMAT = "pdctl-bundle/1"
SMALL_BYTES = 4 << 20
"""What is read of a file that is not a log."""
MOST_FILES = 20_000
MOST_LEGS = 1_100

_LEG = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,99})")
_LOG = re.compile(r"(?:[\w.-]*[._-])?log(?:\.txt)?(?:\.(\d{1,4}))?(?:\.gz)?", re.ASCII)
_ROLES = ("prefill", "decode", "router", "client", DEPLOYMENT)


@dataclass
class _Texts:
    """The small files of one leg, by name, and its logs."""

    files: dict[str, str] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    evidence: LegEvidence = field(default_factory=lambda: LegEvidence("", ""))


def read_bundles(
    paths: Sequence[Path],
    patterns: Iterable[Pattern],
    logs: dict[str, list[Path]] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Evidence:
    """The evidence in a bundle, or in several of one deployment's nodes; nothing is written, links
    are not followed.

    Args:
        logs: further logs by leg that are read where they lie.
        progress: called with the name of every log that is about to be read.

    Raises:
        PdctlError: there is no such bundle, it is no bundle, or it holds nothing that is evidence
            (code 2). What is wrong with a part of it is among the evidence's gaps.
    """
    reading = _Bundle(Scanner(patterns), progress)
    for path in paths:
        if path.is_dir():
            reading.read(_folder(path, reading.gaps))
        elif path.is_file():
            reading.read(open_tar(path, reading.gaps))
        else:
            raise PdctlError(f"{path}: no such bundle; a folder or a .tar or .tar.gz file", 2)
    for leg, own in (logs or {}).items():
        for log in own:
            reading.read_log(leg, log.name, log)
    return reading.evidence(paths[0])


class _Bundle:
    def __init__(self, scanner: Scanner, progress: Callable[[str], None]):
        self.gaps: list[str] = []
        self._scanner = scanner
        self._progress = progress
        self._legs: dict[str, _Texts] = {}
        self._roles: dict[str, str] = {}

    def read(self, entries: Iterable[Entry]) -> None:
        for count, entry in enumerate(entries):
            if count >= MOST_FILES:
                self.gaps.append(f"only the first {MOST_FILES} files were read")
                return
            self._entry(entry)

    def read_log(self, leg: str, name: str, path: Path) -> None:
        try:
            with path.open("rb") as stream:
                self._log(leg, Entry(f"{leg}/{name}", stream))
        except OSError as error:
            self.gaps.append(f"{leg}/{name}: {error.strerror}")

    def _entry(self, entry: Entry) -> None:
        parts = [part for part in entry.name.split("/") if part not in ("", ".")]
        if ".." in parts or entry.name.startswith("/"):
            self.gaps.append(f"{printable(entry.name)[:200]!r}: refused, it points outside")
            return
        match parts:
            case [*_, "bundle.yaml"]:
                self._read_head(self._small(entry))
            case [*_, "gaps.txt"]:
                self.gaps += [line for line in self._small(entry).splitlines() if line][:200]
            case [*_, leg, ("http" | "commands") as kind, name] if _LEG.fullmatch(leg):
                self._keep(leg, f"{kind}/{name}", entry)
            case [*_, leg, "logs", name] if _LEG.fullmatch(leg) and _LOG.fullmatch(name):
                self._log(leg, entry)
            case [*_, leg, name] if _LEG.fullmatch(leg):
                if _LOG.fullmatch(name):
                    self._log(leg, entry)
                elif name.rpartition(".")[2] in ("txt", "yaml", "json"):
                    self._keep(leg, name, entry)

    def _keep(self, leg: str, name: str, entry: Entry) -> None:
        if texts := self._leg(leg):
            # Of two nodes that know something of a leg, the one that knows more.
            text = self._small(entry)
            if len(text) >= len(texts.files.get(name, "")):
                texts.files[name] = text

    def _leg(self, leg: str) -> _Texts | None:
        if leg not in self._legs and len(self._legs) >= MOST_LEGS:
            return None
        return self._legs.setdefault(leg, _Texts())

    def _small(self, entry: Entry) -> str:
        try:
            data = entry.stream.read(SMALL_BYTES + 1)
        except (OSError, EOFError) as error:
            self.gaps.append(f"{printable(entry.name)}: {error}")
            return ""
        if len(data) > SMALL_BYTES:
            self.gaps.append(f"{entry.name}: only its first {SMALL_BYTES >> 20} MiB were read")
        return tame(decoded(data[:SMALL_BYTES]))

    def _log(self, leg: str, entry: Entry) -> None:
        texts = self._leg(leg)
        if not texts:
            return
        source = f"{leg}/{entry.name.rpartition('/')[2]}"
        self._progress(source)
        try:
            stream = unzipped(entry)
        except Refused as error:
            self.gaps.append(f"{source}: {error}")
            return
        texts.logs.append(source)
        problem = self._scanner.scan(stream, leg, source, texts.evidence.hits)
        if problem:
            self.gaps.append(problem)

    def evidence(self, path: Path) -> Evidence:
        roles = self._roles
        legs = []
        for name, texts in sorted(self._legs.items(), key=lambda item: _order(roles, item[0])):
            legs.append(_leg_evidence(name, roles.get(name) or _role(name), texts))
        whole = self._legs[DEPLOYMENT].files if DEPLOYMENT in self._legs else {}
        spec = self._spec(whole["spec.yaml"]) if "spec.yaml" in whole else None
        if not spec and not any(leg.has(need) for leg in legs for need in _KINDS):
            detail = f": {self.gaps[0]}" if self.gaps else ""
            raise PdctlError(
                f"{path}: holds no evidence{detail}; `pdctl collect SPEC -o {path.name}` makes one",
                2,
            )
        return Evidence(
            tuple(legs),
            spec,
            plan(spec, Path("/")) if spec else None,
            whole.get("model.json"),
            tuple(self.gaps),
        )

    def _spec(self, text: str) -> Spec | None:
        try:
            return Spec.model_validate(load_yaml(text))
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            self.gaps.append(f"deployment/spec.yaml cannot be used: {reason}")
            return None

    def _read_head(self, text: str) -> None:
        try:
            head = load_yaml(text)
        except ValueError:
            self.gaps.append("bundle.yaml is not YAML; roles are taken from the legs' names")
            return
        if not isinstance(head, dict):
            return
        if str(head.get("format", FORMAT)) != FORMAT:
            said = printable(str(head.get("format")))[:100]
            raise PdctlError(
                f"bundle.yaml: format {said!r} is not {FORMAT}: use the pdctl that wrote it", 2
            )
        legs = head.get("legs")
        self._roles |= {
            str(leg["name"]): str(leg["role"])
            for leg in (legs if isinstance(legs, list) else [])
            if isinstance(leg, dict) and leg.get("role") in _ROLES and "name" in leg
        }


_KINDS = ("log", "metrics", "env", "config", "versions", "settings", "http", "commands")


def _role(name: str) -> str:
    return next((role for role in _ROLES if name.startswith(role)), DEPLOYMENT)


def _order(roles: dict[str, str], name: str) -> tuple[int, str]:
    return _ROLES.index(roles.get(name) or _role(name)), name


def _leg_evidence(name: str, role: str, texts: _Texts) -> LegEvidence:
    leg, files = texts.evidence, texts.files
    leg.name, leg.role, leg.log_sources = name, role, tuple(texts.logs)
    leg.metrics = parse_metrics(files.get("metrics.txt", ""), f"{name}/metrics.txt")
    leg.env = parse_env(files["env.txt"]) if "env.txt" in files else None
    leg.config = parse_config(files.get("config.txt", ""))
    leg.versions = parse_versions(files.get("versions.txt", ""))
    leg.settings = parse_settings(files.get("settings.json", ""))
    numbered = sorted(files.items())
    leg.http = tuple(
        Capture(f"{name}/{file}", text) for file, text in numbered if file.startswith("http/")
    )
    leg.commands = tuple(
        Command(f"{name}/{file}", line, output)
        for file, text in numbered
        if file.startswith("commands/")
        for line, output in parse_commands(text)
    )
    return leg


def _folder(root: Path, gaps: list[str]) -> Iterator[Entry]:
    """Regular files below a folder, older parts of a log before newer ones."""
    for folder, names, files in os.walk(root, followlinks=False):
        names.sort()
        for name in sorted(files, key=_age):
            path = Path(folder, name)
            shown = path.relative_to(root).as_posix()
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    gaps.append(f"{printable(shown)}: refused, it is not a regular file")
                    continue
                with path.open("rb") as stream:
                    yield Entry(shown, stream)
            except OSError as error:
                gaps.append(f"{printable(shown)}: {error.strerror}")


def _age(name: str) -> tuple[str, int]:
    match = _LOG.fullmatch(name)
    return (name.partition("log")[0], -int(match[1] or 0)) if match else (name, 0)
