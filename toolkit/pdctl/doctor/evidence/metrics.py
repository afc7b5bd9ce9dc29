"""Prometheus text, one scrape or several, read with tolerance: a bundle may hold a part."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pdctl.doctor.model import Excerpt

SCRAPE_SEPARATOR = "# --- scrape"

_SAMPLE = re.compile(
    r"^(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)\s*(?:\{(?P<labels>.*)\})?\s+"
    r"(?P<value>[-+]?[0-9][^\s]*|[-+]?Inf|NaN)(?P<rest>.*)$"
)
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ARROW = re.compile(r"->\s*([-+]?[0-9][^\s]*)")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metrics:
    """Scrapes of one leg, in order. A series that repeats within one text starts a new scrape."""

    source: str
    scrapes: tuple[dict[tuple[str, Labels], float], ...]

    def series(self, name: str, **labels: str) -> list[float]:
        """Per scrape that has it: the sum over the samples of this name and these labels."""
        values = []
        for scrape in self.scrapes:
            found = [
                value
                for (sample, had), value in scrape.items()
                if sample == name and labels.items() <= dict(had).items()
            ]
            if found:
                values.append(sum(found))
        return values

    def value(self, name: str, **labels: str) -> float | None:
        """In the last scrape that has it; None when none has."""
        values = self.series(name, **labels)
        return values[-1] if values else None

    def gain(self, name: str, **labels: str) -> float | None:
        """From the first scrape to the last; None without two of them."""
        values = self.series(name, **labels)
        return values[-1] - values[0] if len(values) > 1 else None

    def label(self, name: str, label: str) -> str | None:
        """A label's value of the last sample of this name that has it."""
        for scrape in reversed(self.scrapes):
            for sample, had in scrape:
                if sample == name and label in dict(had):
                    return dict(had)[label]
        return None

    def excerpt(self, name: str, **labels: str) -> Excerpt:
        """The values as evidence."""
        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
        values = " -> ".join(f"{value:g}" for value in self.series(name, **labels)) or "no data"
        return Excerpt(self.source, f"{name}{{{shown}}} {values}" if shown else f"{name} {values}")


def parse_metrics(text: str, source: str) -> Metrics | None:
    """None when nothing in the text is a sample."""
    scrapes: list[dict[tuple[str, Labels], float]] = []
    current: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        if line.startswith(SCRAPE_SEPARATOR):
            scrapes.append(current)
            current = {}
        for key, value in _samples(line):
            if key in current:
                scrapes.append(current)
                current = {}
            current[key] = value
    scrapes.append(current)
    filled = tuple(scrape for scrape in scrapes if scrape)
    return Metrics(source, filled) if filled else None


def _samples(line: str) -> list[tuple[tuple[str, Labels], float]]:
    match = None if line.startswith("#") else _SAMPLE.match(line.strip())
    if not match:
        return []
    labels = tuple(sorted(_LABEL.findall(match["labels"] or "")))
    texts = [match["value"], *_ARROW.findall(match["rest"])]
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return []
    # What is not a number, or no finite one, is no data.
    return [((match["name"], labels), value) for value in values if math.isfinite(value)]
