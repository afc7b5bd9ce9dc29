"""The dashboards as one page of HTML, drawn from Prometheus; it asks nobody for anything."""

import html
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pd_connector.telemetry import PROMPT_BANDS
from pdctl.observe import svg
from pdctl.observe.alerts import playbook_url, slug_of
from pdctl.observe.boards import BOARDS
from pdctl.observe.check import reason
from pdctl.observe.conditions import JOB
from pdctl.observe.panel import Board, Panel, Query, Scope, fill
from pdctl.observe.prometheus import Prometheus, Series
from pdctl.observe.promql import span
from pdctl.observe.units import shown
from pdctl.render import template

_POINTS = 120
_HEATMAP_POINTS = 40
_LEGEND = 14
"""Series that a legend names; the rest is counted."""


@dataclass(frozen=True)
class Look:
    """What is drawn: Unix times in seconds, one deployment or all, where playbooks are."""

    start: float
    end: float
    deployment: str | None
    playbooks: str
    objective: str
    theme: str


def report(prometheus: Prometheus, look: Look, progress: Callable[[str], None]) -> str:
    """The page.

    Args:
        progress: called with every dashboard's title before it is drawn.
    """
    drawer = _Drawer(prometheus, look)
    boards = []
    for board in BOARDS:
        progress(board.title)
        boards.append(drawer.board(board))
    return template("report.html.j2").render(
        title=f"pdctl: {look.deployment or 'all deployments'}",
        start=_time(look.start),
        end=_time(look.end),
        source=prometheus.url,
        theme=look.theme,
        alerts=_alerts(prometheus, look.deployment),
        boards=boards,
    )


class _Drawer:
    def __init__(self, prometheus: Prometheus, look: Look):
        self._prometheus = prometheus
        self._look = look
        self._names = prometheus.names()
        seconds = look.end - look.start
        self._step = max(seconds / _POINTS, 1.0)
        rate = max(4 * prometheus.scrape_interval(JOB), self._step)
        values = {"deployment": look.deployment} if look.deployment else {}
        self._scope = Scope(span(rate), span(seconds), look.objective, values)

    def board(self, board: Board) -> dict[str, Any]:
        return {
            "title": board.title.removeprefix("pdctl / "),
            "text": board.text,
            "uid": board.uid,
            "rows": [
                {"title": row.title, "panels": [self._panel(panel) for panel in row.panels]}
                for row in board.rows
            ],
        }

    def _panel(self, panel: Panel) -> dict[str, Any]:
        found = [self._ask(panel, query) for query in panel.queries]
        has_data = any(series.has_data for each in found for series in each)
        return {
            "title": panel.title,
            "kind": panel.kind,
            "wide": panel.width > 12,
            "narrow": panel.kind == "stat",
            "good": panel.good,
            "playbook": playbook_url(self._look.playbooks, slug_of(panel.alert)),
            "body": self._draw(panel, found) if has_data else "",
            "empty": "" if has_data else self._why(panel, found),
        }

    def _ask(self, panel: Panel, query: Query) -> list[Series]:
        expr, look = fill(query.expr, self._scope), self._look
        if panel.kind in ("stat", "bars", "table"):
            return self._prometheus.instant(expr, look.end)
        step = self._step
        if panel.kind == "heatmap":
            step = max((look.end - look.start) / _HEATMAP_POINTS, 1.0)
            expr = fill(query.expr, Scope(span(step), self._scope.window))
        return self._prometheus.range(expr, look.start, look.end, step)

    def _why(self, panel: Panel, found: list[list[Series]]) -> str:
        reasons = [
            reason(self._prometheus, self._names, fill(query.expr, self._scope), len(series))
            for query, series in zip(panel.queries, found, strict=True)
        ]
        return "; ".join(dict.fromkeys(reasons))

    def _draw(self, panel: Panel, found: list[list[Series]]) -> str:
        if panel.kind == "stat":
            return _tiles(panel, found)
        if panel.kind == "table":
            return _table(panel, found)
        if panel.kind == "bars":
            return _bars(panel, found)
        look = self._look
        if panel.kind == "heatmap":
            return _heatmap(panel, found, look)
        lines = sorted(_named(panel, found), key=_natural)
        lines = [line for line in lines if any(math.isfinite(value) for _, value in line.points)]
        chart = svg.line_chart(
            lines,
            panel.unit,
            look.start,
            look.end,
            panel.kind == "stacked",
            panel.limit,
            panel.top,
        )
        return chart + _legend(lines, panel.unit)


def legend(form: str, labels: dict[str, str]) -> str:
    """A legend with its ``{{label}}`` filled in."""
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda match: labels.get(match[1], ""), form).strip()


def _named(panel: Panel, found: list[list[Series]]) -> list[svg.Line]:
    return [
        svg.Line(legend(query.legend, each.labels) or panel.title, each.points)
        for query, series in zip(panel.queries, found, strict=True)
        for each in series
    ]


def _natural(line: svg.Line) -> list[tuple[int, str]]:
    """Sorts numbers in names by their value."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", line.name)
        if part
    ]


def _legend(lines: list[svg.Line], unit: str) -> str:
    items = [
        f'<li><svg class="key" viewBox="0 0 18 8"><line x1="0" x2="18" y1="4" y2="4" '
        f'stroke="{svg.color(index)}" stroke-width="3" stroke-dasharray="{svg.dash(index)}"/></svg>'
        f"{html.escape(line.name)} <b>{shown(_last(line), unit)}</b></li>"
        for index, line in enumerate(lines[:_LEGEND])
    ]
    if len(lines) > _LEGEND:
        items.append(f"<li>and {len(lines) - _LEGEND} more</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _last(line: svg.Line) -> float:
    return next((value for _, value in reversed(line.points) if math.isfinite(value)), math.nan)


def _tiles(panel: Panel, found: list[list[Series]]) -> str:
    tiles = [
        f"<div><b>{shown(_last(line), panel.unit)}</b><span>{html.escape(line.name)}</span></div>"
        for line in sorted(_named(panel, found), key=_natural)
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _table(panel: Panel, found: list[list[Series]]) -> str:
    only_labels = panel.unit == "none"
    heads = [*panel.by, *([] if only_labels else [panel.title])]
    rows = []
    for series in sorted(
        (each for one in found for each in one),
        key=lambda each: [each.labels.get(label, "") for label in panel.by],
    ):
        cells = [html.escape(series.labels.get(label, "")) for label in panel.by]
        if not only_labels:
            if math.isnan(series.value):
                continue
            cells.append(f"<b>{shown(series.value, panel.unit)}</b>")
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _bars(panel: Panel, found: list[list[Series]]) -> str:
    (label,) = panel.by
    by_name = [{each.labels.get(label, ""): each.value for each in series} for series in found]
    categories = sorted({category for values in by_name for category in values})
    names = [query.legend for query in panel.queries]
    values = [[row.get(category, math.nan) for category in categories] for row in by_name]
    told = [_band(category) if label == "prompt" else category for category in categories]
    lines = [
        svg.Line(name, tuple((0.0, value) for value in row if math.isfinite(value))[-1:])
        for name, row in zip(names, values, strict=True)
    ]
    chart = svg.bar_chart(told, names, values, panel.unit)
    items = [
        f'<li><svg class="key" viewBox="0 0 18 8"><rect width="18" height="8" '
        f'fill="{svg.color(index)}"/></svg>{html.escape(line.name)}</li>'
        for index, line in enumerate(lines)
    ]
    return chart + (f'<ul class="legend">{"".join(items)}</ul>' if len(lines) > 1 else "")


def _band(prompt: str) -> str:
    """A prompt band's label for people: tokens."""
    return f"≤ {int(prompt) // 1024}k" if prompt.isdigit() else f"> {PROMPT_BANDS[-1] // 1024}k"


def _heatmap(panel: Panel, found: list[list[Series]], look: Look) -> str:
    cumulative = {
        float(each.labels.get("le", "inf").replace("+", "")): dict(each.points) for each in found[0]
    }
    bounds = sorted(cumulative)
    cells, below = [], dict[float, float]()
    for bound in bounds:
        points = cumulative[bound]
        counts = tuple((at, max(points[at] - below.get(at, 0.0), 0.0)) for at in points)
        cells.append(svg.Line(str(bound), counts))
        below = points
    return svg.heatmap(bounds, cells, panel.unit, look.start, look.end)


def _alerts(prometheus: Prometheus, deployment: str | None) -> list[dict[str, str]]:
    found = []
    for alert in prometheus.alerts():
        labels, notes = alert["labels"], alert["annotations"]
        if deployment and labels.get("deployment", deployment) != deployment:
            continue
        url = notes.get("runbook_url", "")
        found.append(
            {
                "name": labels.get("alertname", ""),
                "severity": labels.get("severity", ""),
                "state": alert["state"],
                "summary": notes.get("summary", ""),
                "url": url if url.startswith(("http://", "https://")) else "",
            }
        )
    return sorted(found, key=lambda each: (each["state"], each["severity"], each["name"]))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
