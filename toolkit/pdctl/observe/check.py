"""Whether every query of panels and rules finds data in a live Prometheus, and if not, why."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdctl.observe.panel import Board, Scope, fill
from pdctl.observe.prometheus import Prometheus
from pdctl.observe.promql import SELECTOR

_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*")\s*,?')


class Found(str, Enum):
    DATA = "data"
    NO_DATA = "no data"


@dataclass(frozen=True)
class Row:
    """One query and what came of it.

    Attributes:
        kind: ``panel`` or ``rule``.
        where: dashboard and panel, or the rule's name.
        reason: why there is no data; of a rule with data, its state.
    """

    kind: str
    where: str
    query: str
    found: Found
    series: int
    reason: str


def check_boards(prometheus: Prometheus, boards: Iterable[Board], scope: Scope) -> Iterator[Row]:
    """Every query of every panel, over the scope's spans."""
    names = prometheus.names()
    for board in boards:
        for panel in board.panels:
            for query in panel.queries:
                expr = fill(query.expr, scope)
                series = prometheus.instant(expr)
                good = sum(each.has_data for each in series)
                yield Row(
                    "panel",
                    f"{board.uid}: {panel.title}",
                    expr,
                    Found.DATA if good else Found.NO_DATA,
                    good,
                    "" if good else reason(prometheus, names, expr, len(series)),
                )


def check_rules(prometheus: Prometheus, rules: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """Every alert rule: whether there are series for each selector it is made of.

    A healthy deployment's alert returns nothing itself; what counts is that it could.

    Args:
        rules: as they are in a rule file or in Prometheus' API (``query`` for ``expr``).
    """
    names = prometheus.names()
    for rule in rules:
        name = rule.get("alert") or (rule.get("name") if rule.get("type") == "alerting" else None)
        if not name:
            continue
        expr = str(rule.get("expr") or rule.get("query"))
        missing = [
            why
            for metric, matchers in selectors(expr)
            if (why := _missing(prometheus, names, metric, matchers))
        ]
        state = rule.get("state") or ("firing" if prometheus.instant(expr) else "inactive")
        yield Row(
            "rule",
            str(name),
            expr,
            Found.NO_DATA if missing else Found.DATA,
            0 if missing else len(selectors(expr)),
            "; ".join(dict.fromkeys(missing)) if missing else str(state),
        )


def selectors(expr: str) -> list[tuple[str, tuple[str, ...]]]:
    """Metric names and matchers in a query, each once."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for match in SELECTOR.finditer(expr):
        name, text = match[1] or "", match[2] or match[3] or ""
        matchers = tuple("".join(parts) for parts in _MATCHER.findall(text))
        found[name, matchers] = None
    return list(found)


def reason(prometheus: Prometheus, names: set[str], expr: str, series: int) -> str:
    """Why a query finds no data.

    Args:
        names: all metric names that Prometheus has.
        series: how many series it found, all without a number.
    """
    missing = [
        why
        for metric, matchers in selectors(expr)
        if (why := _missing(prometheus, names, metric, matchers))
    ]
    if missing:
        return "; ".join(dict.fromkeys(missing))
    if series:
        return "no traffic: the counters it divides by did not move in the window"
    return "no traffic: fewer than two samples in the window, or nothing that its parts share"


def _missing(
    prometheus: Prometheus, names: set[str], metric: str, matchers: tuple[str, ...]
) -> str:
    """Why a selector finds no series, or nothing when it finds some."""
    if metric and metric not in names:
        return f"metric unknown: {metric}"
    if prometheus.instant(_count(metric, matchers)):
        return ""
    for matcher in matchers:
        if not prometheus.instant(_count(metric, (matcher,))):
            label = re.split(r"=~|!~|!=|=", matcher)[0]
            if not prometheus.instant(_count(metric, (f'{label}!=""',))):
                return f"label missing: {metric} has no label {label}"
            return f"no series: {metric} has none with {matcher}"
    if metric and not prometheus.instant(_count(metric, ())):
        return f"gone: {metric} has no sample of the last five minutes"
    return f"no series: {metric} has none with {', '.join(matchers)} together"


def _count(metric: str, matchers: tuple[str, ...]) -> str:
    return f"count({metric}{{{','.join(matchers)}}})"
