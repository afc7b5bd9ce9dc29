"""Evidence as checks see it.

"No data" is a value of its own: what was not collected is None (or, for commands and HTTP
captures, an empty tuple), never an empty mapping or a zero.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdctl.doctor.evidence.config import Config
from pdctl.doctor.evidence.metrics import Metrics
from pdctl.doctor.model import DEPLOYMENT, Excerpt, Pattern
from pdctl.plan import Deployment
from pdctl.spec.model import Spec

KEPT_HITS = 20
"""First hits and last hits of a pattern that are kept per leg; all are counted."""
KEPT_VALUES = 1000
"""Different values of a named group that are counted per leg."""


@dataclass(frozen=True)
class Hit:
    """A line of a log that a pattern matched. ``line`` counts from 1; ``groups`` are the named
    groups that took part in the match; ``text`` has no colours and is cut when it is huge."""

    leg: str
    source: str
    line: int
    text: str
    groups: Mapping[str, str]

    @property
    def excerpt(self) -> Excerpt:
        return Excerpt(f"{self.source}:{self.line}", self.text)


@dataclass
class Hits:
    """All hits of a pattern in the logs of some legs, in the order they stand there."""

    count: int = 0
    first: list[Hit] = field(default_factory=list)
    last: list[Hit] = field(default_factory=list)
    values: dict[str, Counter[str]] = field(default_factory=dict)
    """By named group: how often each value came."""

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def excerpts(self) -> tuple[Excerpt, ...]:
        """Up to three of the first hits, as evidence of a finding."""
        return tuple(hit.excerpt for hit in self.first[:3])

    @property
    def legs(self) -> list[str]:
        """Names of the legs whose logs hold it."""
        return list(dict.fromkeys(hit.leg for hit in self.first))

    def value(self, group: str) -> str | None:
        """The most frequent value of a named group."""
        counter = self.values.get(group)
        return counter.most_common(1)[0][0] if counter else None


@dataclass(frozen=True)
class Command:
    """A command and what it printed, errors included. ``line`` has no leading ``$``."""

    source: str
    line: str
    output: str

    @property
    def excerpt(self) -> Excerpt:
        return Excerpt(self.source, f"$ {self.line}\n{self.output}".strip())


@dataclass(frozen=True)
class Capture:
    """A captured HTTP request, response or stream, as text."""

    source: str
    text: str

    @property
    def excerpt(self) -> Excerpt:
        return Excerpt(self.source, self.text.strip())

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects in it: a body, or the events of a stream. What does not parse (cut
        or elided with dots) is left out; search ``text`` for it."""
        return list(_objects(self.text))


@dataclass
class LegEvidence:
    """What is known of one leg, or of the deployment as a whole (``role`` "deployment").

    ``role`` is prefill, decode, router, client or deployment. Keys of ``versions`` are lower case
    with ``-`` for ``_``. ``settings`` is the answer of our connector's settings endpoint.
    ``log_sources`` are the logs that were read (empty: no log), ``hits`` what was found in them.
    """

    name: str
    role: str
    metrics: Metrics | None = None
    env: Mapping[str, str] | None = None
    config: Config | None = None
    versions: Mapping[str, str] | None = None
    settings: Mapping[str, Any] | None = None
    http: tuple[Capture, ...] = ()
    commands: tuple[Command, ...] = ()
    log_sources: tuple[str, ...] = ()
    hits: dict[str, Hits] = field(default_factory=dict)

    def has(self, need: str) -> bool:
        """Whether there is evidence of a kind (a key of :data:`pdctl.doctor.model.NEEDS`)."""
        if need == "log":
            return bool(self.log_sources)
        value = getattr(self, need)
        return value is not None and value != ()

    def command(self, regex: str) -> Command | None:
        """The first command whose line the regex is found in."""
        return next((c for c in self.commands if re.search(regex, c.line)), None)

    def variable(self, name: str) -> str | None:
        """A variable of the environment, or as it stands in the configuration."""
        if self.env is not None and name in self.env:
            return self.env[name]
        value = self.config.get(name) if self.config else None
        return None if value is None else str(value)


@dataclass
class Evidence:
    """All evidence of a deployment. ``legs`` has the pseudo leg "deployment" last if anything is
    known of it. ``model`` is the model's config.json as text. ``gaps`` says what could not be read
    or collected, and why."""

    legs: tuple[LegEvidence, ...]
    spec: Spec | None = None
    plan: Deployment | None = None
    model: str | None = None
    gaps: tuple[str, ...] = ()

    def role(self, *roles: str) -> list[LegEvidence]:
        """Legs of these roles."""
        return [leg for leg in self.legs if leg.role in roles]

    @property
    def engines(self) -> list[LegEvidence]:
        return self.role("prefill", "decode")

    @property
    def deployment(self) -> LegEvidence | None:
        """What belongs to no single leg."""
        return next((leg for leg in self.legs if leg.role == DEPLOYMENT), None)

    def has(self, need: str, *roles: str) -> bool:
        """Whether any leg (of these roles) has evidence of this kind."""
        if need == "spec":
            return self.spec is not None
        return any(leg.has(need) for leg in self.legs if not roles or leg.role in roles)

    def log(self, pattern: Pattern, *roles: str) -> Hits:
        """Hits of a pattern in the logs of all legs, or of legs of these roles.

        Raises:
            KeyError: no check has the pattern among its ``patterns``.
        """
        total = Hits()
        for leg in self.legs:
            if (not roles or leg.role in roles) and (hits := leg.hits.get(pattern.name)):
                add(total, hits)
        return total

    def text(self, regex: str, *kinds: str, roles: tuple[str, ...] = ()) -> list[Found]:
        """Matches in the small texts: "commands", "http", "env", "config", "versions" (all of
        them when none is named), one per line at most, with their leg."""
        compiled = re.compile(regex)
        return [
            Found(leg.name, Excerpt(source, line.strip()), match)
            for leg in self.legs
            if not roles or leg.role in roles
            for source, text in _texts(leg, kinds)
            for line in text.splitlines()
            if (match := compiled.search(line))
        ]


@dataclass(frozen=True)
class Found:
    leg: str
    excerpt: Excerpt
    match: re.Match[str]


def add(total: Hits, more: Hits) -> None:
    """Put the hits of another log behind."""
    total.count += more.count
    total.first += more.first[: max(0, KEPT_HITS - len(total.first))]
    total.last = (total.last + more.last)[-KEPT_HITS:]
    for group, values in more.values.items():
        total.values.setdefault(group, Counter()).update(values)


def _texts(leg: LegEvidence, kinds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    wanted = kinds or ("commands", "http", "env", "config", "versions")
    if "commands" in wanted:
        yield from ((each.source, f"$ {each.line}\n{each.output}") for each in leg.commands)
    if "http" in wanted:
        yield from ((each.source, each.text) for each in leg.http)
    if "env" in wanted and leg.env is not None:
        yield f"{leg.name}/env.txt", "\n".join(f"{k}={v}" for k, v in leg.env.items())
    if "config" in wanted and leg.config is not None:
        yield f"{leg.name}/config.txt", leg.config.text
    if "versions" in wanted and leg.versions is not None:
        yield f"{leg.name}/versions.txt", "\n".join(f"{k} {v}" for k, v in leg.versions.items())


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    at = 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            # Go on behind this line: an elided body has no end to look for.
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if isinstance(value, dict):
            yield value
