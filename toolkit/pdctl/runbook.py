"""The playbooks: pages by finding code or alert, found by code, alert, symptom or words."""

from __future__ import annotations

import importlib.resources
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

import yaml

_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_NAME = re.compile(r"(PD\d{4})-([a-z0-9-]+)\.md")
_WORD = re.compile(r"[A-Za-z0-9_]{2,}")
_COMMON = frozenset("the of to and is in it on that for not an with are be by or as at".split())


@dataclass(frozen=True)
class Playbook:
    """A page. ``severity`` is a finding's (error, warning, info) or an alert's (critical,
    warning); ``body`` is Markdown without the front matter."""

    code: str
    slug: str
    title: str
    category: str
    severity: str
    alerts: tuple[str, ...]
    symptoms: tuple[str, ...]
    body: str

    @property
    def name(self) -> str:
        return f"{self.code}-{self.slug}.md"


@dataclass(frozen=True)
class Match:
    """A page that a search found and the symptom that fits best ("" when none does)."""

    playbook: Playbook
    score: float
    symptom: str


@cache
def playbooks() -> tuple[Playbook, ...]:
    """All pages, by code."""
    found = []
    for file in importlib.resources.files("pdctl.playbooks").iterdir():
        if name := _NAME.fullmatch(file.name):
            found.append(_read(name[1], name[2], file.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda each: each.code))


def _read(code: str, slug: str, text: str) -> Playbook:
    """Raises ValueError: the front matter is not what a page needs."""
    match = _FRONT_MATTER.match(text)
    head = yaml.safe_load(match[1]) if match else None
    if match is None or not isinstance(head, dict) or head.get("code") != code:
        raise ValueError(f"{code}-{slug}.md: no front matter with code {code}")
    return Playbook(
        code=code,
        slug=slug,
        title=str(head["title"]),
        category=str(head["category"]),
        severity=str(head["severity"]),
        alerts=tuple(head["alerts"]),
        symptoms=tuple(map(str, head["symptoms"])),
        body=text[match.end() :],
    )


def find(query: str) -> Playbook | None:
    """The page of a code (``PD2006``, ``2006``), of an alert, or of a slug."""
    wanted = query.strip().lower()
    for each in playbooks():
        if wanted in (each.code.lower(), each.code[2:], each.slug, each.name.lower()):
            return each
    # An alert has a page of its own, before those of its causes.
    return next(
        (each for each in playbooks() if wanted in map(str.lower, each.alerts)),
        None,
    )


def search(query: str) -> list[Match]:
    """Pages that fit a symptom, a log line or words, the best first."""
    wanted = _words(query)
    pages = playbooks()
    holds = Counter(word for page in pages for word in set(_words(_all_text(page))))
    weight = {word: math.log(1 + len(pages) / (1 + holds[word])) for word in wanted}
    matches = []
    for page in pages:
        symptoms = {symptom: _score(wanted, symptom, weight) for symptom in page.symptoms}
        best = max(symptoms, key=lambda each: symptoms[each], default="")
        score = (
            2 * symptoms.get(best, 0)
            + 2 * _score(wanted, f"{page.title} {page.category} {' '.join(page.alerts)}", weight)
            + 0.5 * _score(wanted, page.body, weight)
        )
        if score > 0:
            matches.append(Match(page, score, best if symptoms.get(best) else ""))
    matches.sort(key=lambda each: (-each.score, each.playbook.code))
    return [each for each in matches if each.score >= matches[0].score / 4]


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text) if word.lower() not in _COMMON]


def _all_text(page: Playbook) -> str:
    return f"{page.title} {page.category} {' '.join(page.symptoms)} {page.body}"


def _score(wanted: list[str], text: str, weight: dict[str, float]) -> float:
    words = set(_words(text))
    return sum(weight[word] for word in set(wanted) if word in words)


def symptom_index() -> str:
    """docs/symptoms.md: every symptom with its page, by category."""
    lines = [
        "# By symptom",
        "",
        "What you see, and the page that says what to do. `pdctl runbook WORDS` searches these",
        "pages, `pdctl doctor` finds the cause by itself. Made by `pdctl runbook --index`.",
    ]
    sections: dict[str, list[Playbook]] = {}
    for page in playbooks():
        section = "Alerts" if page.code.startswith("PD00") else page.category
        sections.setdefault(section, []).append(page)
    for section, pages in sections.items():
        lines += ["", f"## {section}", "", "| symptom | page |", "|---|---|"]
        for page in pages:
            link = f"[{page.code}](../playbooks/{page.name}) {page.title}"
            for symptom in page.symptoms:
                cell = symptom.replace("|", "\\|").replace("<", "&lt;")
                lines.append(f"| {cell} | {link} |")
    return "\n".join(lines) + "\n"
