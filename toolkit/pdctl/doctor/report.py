"""A diagnosis as text, JSON and Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from pdctl.doctor.evidence import redact
from pdctl.doctor.evidence.text import printable
from pdctl.doctor.model import Check, Excerpt, Reported, Severity
from pdctl.doctor.run import Diagnosis, Open

SCHEMA_VERSION = 1
"""Of the JSON. It grows when a field changes its meaning or goes; new fields may come."""

_EXCERPT_CHARACTERS = 1000
_EXCERPT_LINES = 12
_MOST_EXCERPTS = 6


def playbook_of(check: Check) -> str:
    """Path of a check's playbook in the project."""
    return f"playbooks/{check.code}-{check.playbook}.md"


def as_json(diagnosis: Diagnosis, subject: str) -> dict[str, Any]:
    """What ``-o json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "subject": subject,
        "findings": [_finding(each) for each in diagnosis.findings],
        "checks_run": diagnosis.checks_run,
        "unknown": [
            {
                "code": each.check.code,
                "title": each.check.title,
                "category": each.check.category.value,
                "missing": each.missing,
                "how": each.how,
            }
            for each in diagnosis.unknown
        ],
        "skipped": [
            {"code": each.check.code, "title": each.check.title, "because": each.because}
            for each in diagnosis.skipped
        ],
        "gaps": [redact.text(gap) for gap in diagnosis.gaps],
    }


def _finding(reported: Reported) -> dict[str, Any]:
    check, finding = reported.check, reported.finding
    return {
        "code": check.code,
        "title": check.title,
        "category": check.category.value,
        "severity": reported.severity,
        "confidence": finding.confidence,
        "leg": finding.leg,
        "evidence": [
            {"source": source, "excerpt": text} for source, text in excerpts(finding.evidence)
        ],
        "cause": shown(finding.cause),
        "fix": shown(finding.fix),
        "playbook": playbook_of(check),
        "consequences": [_finding(each) for each in reported.consequences],
    }


def shown(text: str) -> str:
    """Text that may be shown: without secrets and without what a terminal would act on."""
    return redact.text(printable(text))


def excerpts(evidence: Sequence[Excerpt]) -> Iterator[tuple[str, str]]:
    """(source, text) of what a finding rests on, cut to a size that can be read."""
    for excerpt in dict.fromkeys(evidence[:_MOST_EXCERPTS]):
        lines = shown(excerpt.text).strip().split("\n")
        if len(lines) > _EXCERPT_LINES:
            lines = [*lines[:_EXCERPT_LINES], f"... {len(lines) - _EXCERPT_LINES} more lines"]
        text = "\n".join(lines)
        if len(text) > _EXCERPT_CHARACTERS:
            text = f"{text[:_EXCERPT_CHARACTERS]}..."
        yield shown(excerpt.source), text


def counts(diagnosis: Diagnosis) -> dict[Severity, int]:
    """Causes by severity."""
    found: dict[Severity, int] = {"error": 0, "warning": 0, "info": 0}
    for each in diagnosis.findings:
        found[each.severity] += 1
    return found


def summary(diagnosis: Diagnosis) -> str:
    """One line: what was found and how much was looked at."""
    found = counts(diagnosis)
    parts = [f"{n} {word}{'s' if n != 1 else ''}" for word, n in found.items() if n]
    checks = (
        f"{len(diagnosis.checks_run)} checks run, {len(diagnosis.unknown)} unknown, "
        f"{len(diagnosis.skipped)} skipped"
    )
    return f"{', '.join(parts) or 'nothing found'} ({checks})"


def as_text(diagnosis: Diagnosis, subject: str, width: int, verbose: bool) -> str:
    """What a terminal shows: causes with their fix, then what stayed open."""
    lines = [f"{subject}: {summary(diagnosis)}"]
    for reported in diagnosis.findings:
        lines += ["", *_block(reported, width)]
    lines += _open(diagnosis, width, verbose)
    return "\n".join(lines)


def _head(reported: Reported) -> str:
    check, finding = reported.check, reported.finding
    return (
        f"{reported.severity} {check.code} {finding.leg}: {check.title} "
        f"[{check.category.value}, {finding.confidence}]"
    )


def _block(reported: Reported, width: int) -> Iterator[str]:
    yield _head(reported)
    finding = reported.finding
    yield from _field("cause", shown(finding.cause), width)
    for source, text in excerpts(finding.evidence):
        first, *rest = text.split("\n")
        yield from _field("evidence", f"{source}: {first}", width)
        for line in rest:
            yield from _field("", line, width)
    yield from _field("fix", shown(finding.fix), width)
    yield from _field("playbook", f"pdctl runbook {reported.check.code}", width)
    for each in _below(reported):
        yield from _field("explains", _head(each), width)


def _below(reported: Reported) -> Iterator[Reported]:
    for each in reported.consequences:
        yield each
        yield from _below(each)


def _field(name: str, text: str, width: int) -> list[str]:
    return _wrapped(f"  {name:<10}", " " * 12, text, width)


def _item(text: str, width: int) -> list[str]:
    return _wrapped("  ", "    ", text, width)


def _wrapped(first: str, other: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 60),
        initial_indent=first,
        subsequent_indent=other,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _open(diagnosis: Diagnosis, width: int, verbose: bool) -> Iterator[str]:
    if diagnosis.unknown:
        yield ""
        yield "unknown, for want of evidence:"
        for (missing, how), codes in _together(diagnosis.unknown).items():
            names = ", ".join(codes) if verbose or len(codes) <= 6 else f"{len(codes)} checks"
            yield from _item(f"{missing}: {names}. To know: {how}", width)
    if diagnosis.skipped:
        yield ""
        yield "skipped:"
        for each in diagnosis.skipped:
            yield from _field(
                "", f"{each.check.code} {each.check.title}: because of {each.because}", width
            )
    if diagnosis.gaps:
        yield ""
        yield "not read or collected:"
        for gap in diagnosis.gaps[:50]:
            yield from _item(shown(gap), width)


def _together(unknown: Sequence[Open]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for each in unknown:
        found.setdefault((each.missing, each.how), []).append(each.check.code)
    return found


def as_markdown(diagnosis: Diagnosis, subject: str) -> str:
    """For a ticket or a chat."""
    lines = [f"# {subject}", "", summary(diagnosis).capitalize() + "."]
    for reported in diagnosis.findings:
        check, finding = reported.check, reported.finding
        lines += [
            "",
            f"## {check.code} {check.title}",
            "",
            f"**{reported.severity}**, {finding.confidence}, leg `{finding.leg}`, "
            f"{check.category.value}",
            "",
            shown(finding.cause),
            "",
            f"**Fix:** {shown(finding.fix)} ([playbook]({playbook_of(check)}))",
        ]
        for source, text in excerpts(finding.evidence):
            lines += ["", f"`{source}`", "", *(f"    {line}" for line in text.split("\n"))]
        below = list(_below(reported))
        if below:
            lines += ["", "Explains:", "", *(f"- {_head(each)}" for each in below)]
    if diagnosis.unknown:
        lines += ["", "## Unknown", ""]
        for (missing, how), codes in _together(diagnosis.unknown).items():
            lines.append(f"- {missing} ({', '.join(codes)}): {how}")
    if diagnosis.gaps:
        lines += ["", "## Not read or collected", "", *(f"- {shown(g)}" for g in diagnosis.gaps)]
    return "\n".join(lines)
