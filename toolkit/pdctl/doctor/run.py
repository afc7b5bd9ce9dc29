"""Running checks over evidence: premises first, causes before their consequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import (
    CONFIDENCES,
    NEEDS,
    SEVERITIES,
    Check,
    Pattern,
    Reported,
    Severity,
    Unknown,
)


@dataclass(frozen=True)
class Open:
    """A question that stays open: not enough evidence, or (``because``) without sense."""

    check: Check
    missing: str
    how: str
    because: str | None = None


@dataclass
class Diagnosis:
    """``findings`` has causes only, the worst first, their consequences within them."""

    findings: list[Reported] = field(default_factory=list)
    unknown: list[Open] = field(default_factory=list)
    skipped: list[Open] = field(default_factory=list)
    checks_run: list[str] = field(default_factory=list)
    gaps: tuple[str, ...] = ()

    def worst(self) -> Severity | None:
        """The highest severity of any finding, consequences included."""
        found = {severity for each in self.findings for severity in _severities(each)}
        return next((severity for severity in SEVERITIES if severity in found), None)


def patterns(checks: Sequence[Check]) -> list[Pattern]:
    """What the logs have to be searched for."""
    return [pattern for check in checks for pattern in check.patterns]


def diagnose(evidence: Evidence, checks: Sequence[Check]) -> Diagnosis:
    """What the checks say of the evidence."""
    run = _Run(evidence, checks)
    for check in checks:
        run.answer(check)
    diagnosis = run.diagnosis
    diagnosis.findings = _grouped(run.found)
    diagnosis.checks_run.sort()
    diagnosis.gaps = evidence.gaps
    return diagnosis


class _Run:
    def __init__(self, evidence: Evidence, checks: Sequence[Check]):
        self.diagnosis = Diagnosis()
        self.found: list[Reported] = []
        self._evidence = evidence
        self._checks = {check.code: check for check in checks}
        self._answers: dict[str, bool] = {}

    def answer(self, check: Check) -> bool:
        """Run a check once; whether it found something that is wrong."""
        if check.code in self._answers:
            return self._answers[check.code]
        self._answers[check.code] = False
        for premise in check.premises:
            if premise in self._checks and self.answer(self._checks[premise]):
                self.diagnosis.skipped.append(Open(check, "", "", premise))
                return False
        for need in check.needs:
            kinds = need.split("|")
            if not any(self._evidence.has(kind) for kind in kinds):
                how = "; or ".join(NEEDS[kind] for kind in kinds)
                self.diagnosis.unknown.append(Open(check, f"no {' or '.join(kinds)}", how))
                return False
        wrong = self._run(check)
        self._answers[check.code] = wrong
        return wrong

    def _run(self, check: Check) -> bool:
        wrong = False
        try:
            answers = list(check.run(self._evidence))
        except Exception as error:  # One check's fault must not hide what the others find.
            self.diagnosis.unknown.append(
                Open(check, f"the check failed ({type(error).__name__}: {error})", "report this")
            )
            return False
        self.diagnosis.checks_run.append(check.code)
        for answer in answers:
            if isinstance(answer, Unknown):
                self.diagnosis.unknown.append(Open(check, answer.missing, answer.how))
            else:
                reported = Reported(check, answer)
                self.found.append(reported)
                wrong = wrong or reported.severity != "info"
        return wrong


def _rank(reported: Reported) -> tuple[int, int, str, str]:
    return (
        SEVERITIES.index(reported.severity),
        CONFIDENCES.index(reported.finding.confidence),
        reported.check.code,
        reported.finding.leg,
    )


def _explains(cause: Reported, other: Reported) -> bool:
    if other.check.symptom and not cause.check.symptom:
        same_leg = cause.finding.leg == other.finding.leg
        return same_leg and cause.severity == "error" and cause.finding.confidence != "possible"
    return other.check.code in (*cause.check.explains, *cause.finding.explains)


def _grouped(found: list[Reported]) -> list[Reported]:
    """Causes, the worst first; every other finding below the first cause that explains it."""
    found = sorted(found, key=_rank)
    parent: dict[int, int] = {}
    for index, reported in enumerate(found):
        for other, cause in enumerate(found):
            if other != index and _explains(cause, reported) and not _below(parent, other, index):
                parent[index] = other
                break
    children: dict[int, list[int]] = {}
    for index, cause_index in parent.items():
        children.setdefault(cause_index, []).append(index)

    def whole(index: int) -> Reported:
        below = tuple(whole(child) for child in children.get(index, []))
        return Reported(found[index].check, found[index].finding, below)

    causes = [whole(index) for index in range(len(found)) if index not in parent]
    # A cause is as bad as the worst of what comes of it.
    causes.sort(key=lambda cause: (min(map(SEVERITIES.index, _severities(cause))), _rank(cause)))
    return causes


def _below(parent: dict[int, int], index: int, ancestor: int) -> bool:
    while index in parent:
        index = parent[index]
        if index == ancestor:
            return True
    return False


def _severities(reported: Reported) -> list[Severity]:
    return [reported.severity, *(s for each in reported.consequences for s in _severities(each))]
