"""Charts as inline SVG; colours are the page's CSS variables ``--s0`` to ``--s7``."""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from pdctl.observe.units import shown

WIDTH, HEIGHT = 560, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 8, 22
_COLORS = 8
_TICKS = 4
_LETTER = 6.5
"""Width of a letter, at most."""


@dataclass(frozen=True)
class Line:
    """A named series of Unix time and value."""

    name: str
    points: tuple[tuple[float, float], ...]


def color(index: int) -> str:
    return f"var(--s{index % _COLORS})"


def dash(index: int) -> str:
    """Series of the same colour differ in their dashes."""
    return ("", "5 3", "2 3")[index // _COLORS % 3]


def line_chart(
    lines: Sequence[Line],
    unit: str,
    start: float,
    end: float,
    stacked: bool = False,
    limit: float | None = None,
    top: float | None = None,
) -> str:
    """Lines over time, or areas on top of each other."""
    shapes = _stack(lines) if stacked else [(line.points, ()) for line in lines]
    values = [value for upper, _ in shapes for _, value in upper if math.isfinite(value)]
    ticks = _ticks(max([*values, limit or 0.0, 0.0]), top, unit)
    frame = _Frame(start, end, ticks[-1])
    parts = [_grid(frame, ticks, unit), _times(frame)]
    for index, (line, (upper, lower)) in enumerate(zip(lines, shapes, strict=True)):
        title = f"<title>{html.escape(line.name)}</title>"
        if stacked:
            path = frame.area(upper, lower)
            parts.append(f'<path d="{path}" fill="{color(index)}" opacity=".75">{title}</path>')
            continue
        for run in _runs(upper):
            parts.append(_stroke(frame, run, index, title))
    if limit is not None:
        y = frame.y(limit)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>'
        )
    return _svg(parts)


def bar_chart(
    categories: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]], unit: str
) -> str:
    """Groups of bars.

    Args:
        values: by name, then by category; NaN is no bar.
    """
    finite = [value for row in values for value in row if math.isfinite(value)]
    ticks = _ticks(max([*finite, 0.0]), None, unit)
    frame = _Frame(0.0, 1.0, ticks[-1])
    parts = [_grid(frame, ticks, unit)]
    slot = (WIDTH - _LEFT - _RIGHT) / max(len(categories), 1)
    crowded = max(map(len, categories), default=0) * _LETTER > slot
    thick = min(slot * 0.8 / max(len(names), 1), 46)
    for place, category in enumerate(categories):
        middle = _LEFT + slot * (place + 0.5)
        # Labels that would touch stand on two lines by turns.
        lower = crowded and place % 2
        parts.append(_text(middle, HEIGHT - (1 if lower else 11), category, "middle", "category"))
        for index, name in enumerate(names):
            value = values[index][place]
            if not math.isfinite(value):
                continue
            x = middle + (index - len(names) / 2) * thick
            y = frame.y(max(value, 0.0))
            told = html.escape(f"{name}, {category}: {shown(value, unit)}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{thick - 2:.1f}" '
                f'height="{max(frame.y(0) - y, 0.5):.1f}" fill="{color(index)}">'
                f"<title>{told}</title></rect>"
            )
            parts.append(_text(x + thick / 2 - 1, y - 3, shown(value, unit), "middle", "value"))
    return _svg(parts)


def heatmap(
    bounds: Sequence[float], cells: Sequence[Line], unit: str, start: float, end: float
) -> str:
    """Counts by bucket over time.

    Args:
        bounds: upper bounds of the buckets, rising; the last may be infinite.
        cells: per bucket, its counts.
    """
    most = max((value for line in cells for _, value in line.points), default=0.0)
    frame = _Frame(start, end, 1.0)
    height = (HEIGHT - _TOP - _BOTTOM) / max(len(bounds), 1)
    parts = [_times(frame)]
    for row, (bound, line) in enumerate(zip(bounds, cells, strict=True)):
        y = HEIGHT - _BOTTOM - (row + 1) * height
        if row % 2 == 0 or len(bounds) < 9:
            parts.append(_text(_LEFT - 5, y + height / 2 + 3, shown(bound, unit), "end"))
        wide = (WIDTH - _LEFT - _RIGHT) / max(len(line.points), 1)
        for at, value in line.points:
            if not value > 0.005 * most or not most:
                continue
            told = html.escape(f"up to {shown(bound, unit)}: {value:.3g}")
            depth = 0.15 + 0.85 * value / most
            parts.append(
                f'<rect x="{frame.x(at) - wide / 2:.1f}" y="{y:.1f}" width="{wide + 0.4:.1f}" '
                f'height="{height:.1f}" fill="{color(0)}" opacity="{depth:.2f}">'
                f"<title>{told}</title></rect>"
            )
    return _svg(parts)


@dataclass(frozen=True)
class _Frame:
    start: float
    end: float
    top: float

    def x(self, at: float) -> float:
        share = (at - self.start) / ((self.end - self.start) or 1)
        return _LEFT + min(max(share, 0.0), 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = min(max(value / (self.top or 1), 0.0), 1.0)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(at):.1f} {self.y(value):.1f}" for at, value in points)

    def area(
        self, upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]
    ) -> str:
        return f"{self.path(upper)}L{self.path(tuple(reversed(lower)))[1:]}Z" if upper else ""


def _stroke(frame: _Frame, run: list[tuple[float, float]], index: int, title: str) -> str:
    if len(run) == 1:
        at, value = run[0]
        return (
            f'<circle cx="{frame.x(at):.1f}" cy="{frame.y(value):.1f}" r="2.5" '
            f'fill="{color(index)}">{title}</circle>'
        )
    return (
        f'<path d="{frame.path(run)}" fill="none" stroke="{color(index)}" stroke-width="1.8" '
        f'stroke-dasharray="{dash(index)}" stroke-linejoin="round">{title}</path>'
    )


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Pieces of a line between its gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    step = min((after[0] - at[0] for at, after in itertools.pairwise(points)), default=0.0)
    for at, value in points:
        gap = runs[-1] and at - runs[-1][-1][0] > step * 1.5
        if not math.isfinite(value) or gap:
            runs.append([])
        if math.isfinite(value):
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _stack(
    lines: Sequence[Line],
) -> list[tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]]:
    """Upper and lower edge of every series' area."""
    times = sorted({at for line in lines for at, _ in line.points})
    below = dict.fromkeys(times, 0.0)
    shapes = []
    for line in lines:
        own = {at: value for at, value in line.points if math.isfinite(value)}
        above = {at: below[at] + own.get(at, 0.0) for at in times}
        shapes.append((tuple(above.items()), tuple(below.items())))
        below = above
    return shapes


def _ticks(most: float, top: float | None, unit: str) -> list[float]:
    """Round values from 0 to the top or just above the largest, round in the unit that is shown."""
    if top is not None and most <= top:
        return [top * number / _TICKS for number in range(_TICKS + 1)]
    if most <= 0:
        return [0.0, 1.0]
    if unit == "bytes":
        size = 1024.0 ** max(math.floor(math.log(most, 1024)), 0)
        return [tick * size for tick in _ticks(most / size, None, "none")]
    rough = most / _TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999)
    return [step * number for number in range(math.ceil(most / step * 0.999) + 1)]


def _grid(frame: _Frame, ticks: Sequence[float], unit: str) -> str:
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        )
        parts.append(_text(_LEFT - 5, y + 3.5, shown(tick, unit), "end"))
    return "".join(parts)


def _times(frame: _Frame) -> str:
    form = "%H:%M:%S" if frame.end - frame.start < 1200 else "%H:%M"
    parts = []
    for number in range(5):
        at = frame.start + (frame.end - frame.start) * number / 4
        told = datetime.fromtimestamp(at, timezone.utc).strftime(form)
        anchor = "start" if number == 0 else "end" if number == 4 else "middle"
        parts.append(_text(frame.x(at), HEIGHT - 6, told, anchor))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
        f"{html.escape(text)}</text>"
    )


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
