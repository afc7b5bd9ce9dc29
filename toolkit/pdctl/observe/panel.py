"""What a dashboard is made of, before it is Grafana's JSON or a page of the report."""

import re
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["lines", "stacked", "stat", "bars", "heatmap", "table"]

VARIABLES = ("deployment", "leg", "role", "model")
"""Template variables of every dashboard; each is a label of every target."""
RATE_INTERVAL = "$__rate_interval"
RANGE = "$__range"
OBJECTIVE = "$ttft_slo"
"""Seconds of the TTFT objective, as a bucket's ``le``."""
PLAYBOOKS = "${playbooks}"
"""URL below which the playbook pages are."""

ROUTER = 'deployment=~"$deployment"', 'model=~"$model"'
"""Matchers of the router's metrics, whose own ``leg`` is the leg they tell of."""
ROUTER_LEG = *ROUTER, 'leg=~"$leg"'
ENGINE = *ROUTER_LEG, 'role=~"$role"'


@dataclass(frozen=True)
class Query:
    """``legend`` names labels as ``{{label}}``; ``exemplars`` asks for traces of slow buckets."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        unit: Grafana's id of a unit.
        good: what good looks like, in a sentence or two.
        alert: the alert whose playbook explains it, or the playbook's own slug.
        by: label along the axis of ``bars``, or the columns of a ``table``.
        limit: a value above which it is bad (None: there is none).
        width: of 24.
    """

    title: str
    unit: str
    good: str
    alert: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    by: tuple[str, ...] = ()
    limit: float | None = None
    top: float | None = None
    width: int = 12


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard; ``uid`` is also the name of its file."""

    uid: str
    title: str
    text: str
    rows: tuple[Row, ...] = field(default=())

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


@dataclass(frozen=True)
class Scope:
    """What the variables of a query stand for; None is everything. Spans are PromQL's."""

    interval: str
    window: str
    objective: str = "2.5"
    values: dict[str, str] = field(default_factory=dict)


def fill(expr: str, scope: Scope) -> str:
    """A query with its variables filled in."""
    expr = expr.replace(RATE_INTERVAL, scope.interval).replace(RANGE, scope.window)
    expr = expr.replace(OBJECTIVE, scope.objective)
    for name in VARIABLES:
        value = scope.values.get(name)
        pattern = ".*" if value is None else re.escape(value).replace("\\", "\\\\")
        expr = expr.replace(f"${name}", pattern)
    return expr
