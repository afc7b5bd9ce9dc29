"""What a check is and what it says.

Codes are stable: a code keeps its meaning for ever, and is never given to another check.

======  ===================
range   category
======  ===================
1xxx    efa-fabric
20xx    nixl-handshake
30xx    config-mismatch
40xx    kv-expiry
45xx    silent-recompute
50xx    block-leak
55xx    router-session
60xx    streaming-metadata
65xx    version-skew
70xx    memory-sizing
75xx    observability
80xx    security
85xx    launch-lifecycle
90xx    benchmark-method
======  ===================

In a range the last two digits 00-59 are checks over logs, configuration and metrics, 60-99 those
over live facts of the machine and of running legs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pdctl.doctor.evidence.facts import Evidence


class Category(str, Enum):
    EFA_FABRIC = "efa-fabric"
    NIXL_HANDSHAKE = "nixl-handshake"
    CONFIG_MISMATCH = "config-mismatch"
    KV_EXPIRY = "kv-expiry"
    SILENT_RECOMPUTE = "silent-recompute"
    BLOCK_LEAK = "block-leak"
    ROUTER_SESSION = "router-session"
    STREAMING_METADATA = "streaming-metadata"
    VERSION_SKEW = "version-skew"
    MEMORY_SIZING = "memory-sizing"
    OBSERVABILITY = "observability"
    SECURITY = "security"
    LAUNCH_LIFECYCLE = "launch-lifecycle"
    BENCHMARK_METHOD = "benchmark-method"


Severity = Literal["error", "warning", "info"]
"""error: turns fail, are wrong, or reuse does not work. warning: it works, worse than it should or
not for long. info: worth knowing, nothing to do."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

Confidence = Literal["certain", "likely", "possible"]
"""certain: the evidence names it. likely: the evidence fits and little else does. possible: one
of several explanations."""
CONFIDENCES: tuple[Confidence, ...] = ("certain", "likely", "possible")

DEPLOYMENT = "deployment"
"""The ``leg`` of what belongs to no single leg."""


LONGEST_VALUE = 300
"""Characters of a named group that are kept: no name, address or number is longer. It bounds what
a hostile line can make of a number."""
TIME_OF_DAY = re.compile(r"\d\d:\d\d:\d\d\b")


@dataclass(frozen=True)
class Pattern:
    """A line of a log that a check wants to know of.

    Logs are read once for all checks, gigabytes of them, so a line is looked at only when it
    contains one of the literal texts ``any_of`` (compared byte by byte, case and all): choose ones
    that are rare in a healthy log. ``regex`` is searched in the line without colours; its named
    groups are kept with the hit. Line numbers of source files differ between releases: never
    match them. ``timed``: the time of day in front of the match is kept as the group "when"; a
    regex that looked for it would have to try every line from its begin. Not ``counted``: how
    often each value of a group came is not asked for, as in statistics that are always logged.
    ``longest``: characters of a group that are kept, where one is more than a single value.
    """

    name: str
    any_of: tuple[str, ...]
    regex: str | None = None
    timed: bool = False
    counted: bool = True
    longest: int = LONGEST_VALUE

    def __post_init__(self) -> None:
        if not self.any_of or not all(len(text) >= 3 for text in self.any_of):
            raise ValueError(f"pattern {self.name}: any_of needs texts of 3 characters or more")
        if self.regex is not None:
            re.compile(self.regex)

    def groups(self, match: re.Match[str]) -> dict[str, str]:
        """The named groups of a match that took part in it."""
        named = match.groupdict().items()
        found = {name: value[: self.longest] for name, value in named if value is not None}
        if self.timed and (when := TIME_OF_DAY.search(match.string, 0, match.start())):
            found["when"] = when[0]
        return found


@dataclass(frozen=True)
class Excerpt:
    """A piece of evidence as it stands in its source (``prefill-0/log.txt:17``)."""

    source: str
    text: str


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``leg`` is the leg to act on, :data:`DEPLOYMENT` for none.

    ``severity`` overrides the check's, ``explains`` adds to the check's ``explains``.
    """

    leg: str
    confidence: Confidence
    evidence: tuple[Excerpt, ...]
    cause: str
    fix: str
    severity: Severity | None = None
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unknown:
    """What a check could not tell for want of evidence, and how to get that."""

    missing: str
    how: str


Answer = Finding | Unknown


@dataclass(frozen=True)
class Check:
    """One rule.

    ``needs`` are kinds of evidence (:data:`NEEDS`); with ``a|b`` either will do. When no leg has
    one of them the check is not run and its answer is "unknown". ``premises`` are codes: when one
    of them found something, this check is skipped, since its question makes no sense then.
    ``explains`` are codes whose findings are consequences of this check's: they are shown below
    it, not beside it. ``playbook`` is the slug of ``playbooks/<code>-<slug>.md``. ``run`` is pure.
    ``cheap`` checks are also made before a deployment is started. A ``symptom`` (a leg that is
    not healthy) is shown below any other error of its leg.
    """

    code: str
    title: str
    category: Category
    severity: Severity
    playbook: str
    run: Callable[[Evidence], Iterable[Answer]]
    needs: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    premises: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    cheap: bool = False
    symptom: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"PD\d{4}", self.code):
            raise ValueError(f"{self.code!r} is not PD and four digits")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.playbook):
            raise ValueError(f"{self.code}: {self.playbook!r} is not a slug")
        for need in self.needs:
            if unknown := set(need.split("|")) - set(NEEDS):
                raise ValueError(f"{self.code}: no such evidence: {', '.join(unknown)}")


@dataclass(frozen=True)
class More:
    """Another way to see what a check looks for: asked when the check itself finds nothing.

    ``needs`` are kinds of evidence of which any will do, beside the check's own.
    """

    code: str
    run: Callable[[Evidence], Iterable[Answer]] = lambda _: ()
    needs: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    explains: tuple[str, ...] = ()
    cheap: bool = False

    def added_to(self, check: Check) -> Check:
        """The check with this beside its own rule."""
        return replace(
            check,
            run=_first_of(check.run, self.run),
            needs=("|".join(dict.fromkeys([*"|".join(check.needs).split("|"), *self.needs])),),
            patterns=(*check.patterns, *self.patterns),
            explains=(*check.explains, *self.explains),
            cheap=check.cheap or self.cheap,
        )


def _first_of(
    *runs: Callable[[Evidence], Iterable[Answer]],
) -> Callable[[Evidence], Iterable[Answer]]:
    def run(evidence: Evidence) -> Iterable[Answer]:
        unknown: list[Answer] = []
        for each in runs:
            answers = list(each(evidence))
            if any(isinstance(answer, Finding) for answer in answers):
                return answers
            unknown += answers
        return unknown

    return run


NEEDS = {
    "log": "the legs' logs: pdctl collect on each node, or put them at LEG/log.txt of the bundle",
    "metrics": "the legs' /metrics: pdctl collect while they run",
    "env": "the legs' environment: pdctl collect on their node",
    "config": "the legs' settings or command lines: pdctl collect on their node",
    "versions": "the legs' versions: pdctl collect on their node",
    "http": "captured answers of the legs: pdctl collect --probe",
    "commands": "what commands print on the legs' nodes: pdctl collect on each node",
    "settings": "the legs' effective settings: legs that run pdctl's connector and answer",
    "spec": "the spec: give it to pdctl collect or pdctl doctor",
}
"""Kinds of evidence, and how to get them."""


@dataclass(frozen=True)
class Reported:
    """A finding with its check, and the findings that it explains."""

    check: Check
    finding: Finding
    consequences: tuple[Reported, ...] = field(default=())

    @property
    def severity(self) -> Severity:
        return self.finding.severity or self.check.severity
