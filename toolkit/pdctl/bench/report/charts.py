"""Charts as inline SVG, coloured by the page's CSS variables so that they are right in light and
dark. Every chart is drawn for a width in CSS pixels and not scaled, so its text keeps its size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

SERIES = 4
"""Colours of arms that the page defines: --arm0 and so on."""

_CHARACTER = 6.4
"""Width of a digit at the charts' font size, in pixels, rounded up."""


@dataclass(frozen=True)
class Point:
    """``low`` and ``high`` are the interval, where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Line:
    name: str
    color: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Piece:
    """One part of a bar. ``shade`` "solid" or "hatched"."""

    name: str
    value: float
    color: int
    shade: str = "solid"


@dataclass(frozen=True)
class Bars:
    """Bars side by side at one place of the axis, each stacked from pieces."""

    label: str
    bars: Sequence[Sequence[Piece]]


def tick_step(most: float, wanted: int = 5) -> float:
    """A round step of 1, 2 or 5 times a power of ten."""
    rough = max(most, 1e-9) / wanted
    power = 10 ** math.floor(math.log10(rough))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999))


def _ticks(most: float, wanted: int = 5) -> list[float]:
    step = tick_step(most, wanted)
    return [step * number for number in range(math.ceil(most / step * 0.999) + 1)]


def _value(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


@dataclass(frozen=True)
class _Frame:
    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    most: float

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * value / self.most

    def open(self, title: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
            f'width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}"><title>{escape(title)}</title>'
        )


def _frame(width: int, height: int, most: float) -> tuple[_Frame, list[float]]:
    ticks = _ticks(most)
    left = 16 + _CHARACTER * max(len(_value(tick)) for tick in ticks)
    return _Frame(width, height, left, width - 14, 30, height - 40, ticks[-1]), ticks


def _axes(frame: _Frame, ticks: Sequence[float], y_title: str, x_title: str) -> str:
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(
            f'<line class="grid" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text class="tick" x="{frame.left - 7:.1f}" y="{y + 4:.1f}" '
            f'text-anchor="end">{_value(tick)}</text>'
        )
    parts.append(f'<text class="axis" x="4" y="12">{escape(y_title)}</text>')
    middle = (frame.left + frame.right) / 2
    parts.append(
        f'<text class="axis" x="{middle:.1f}" y="{frame.height - 5}" '
        f'text-anchor="middle">{escape(x_title)}</text>'
    )
    return "".join(parts)


def _x_labels(frame: _Frame, labels: Sequence[tuple[float, str]]) -> str:
    """As many labels as fit beside each other, the last one always."""
    parts: list[str] = []
    free_until = frame.width + 1.0
    for place, label in reversed(labels):
        half = _CHARACTER * len(label) / 2
        x = min(max(place, half + 1), frame.width - half - 1)
        if x + half + 6 > free_until:
            continue
        free_until = x - half
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 16:.1f}" '
            f'text-anchor="middle">{escape(label)}</text>'
        )
    return "".join(parts)


def lines(
    series: Sequence[Line], width: int, height: int, title: str, y_title: str, x_title: str
) -> str:
    """Lines over a linear axis, with intervals as whiskers."""
    every = [point for line in series for point in line.points]
    most = max((max(point.y, point.high or 0) for point in every), default=1.0)
    frame, ticks = _frame(width, height, most)
    low = min((point.x for point in every), default=0.0)
    high = max((point.x for point in every), default=1.0)
    span = max(high - low, 1e-9)
    inset = 12

    def at(x: float) -> float:
        return frame.left + inset + (frame.right - frame.left - 2 * inset) * (x - low) / span

    labels = {point.x: point.label or _value(point.x) for point in every}
    parts = [frame.open(title), _axes(frame, ticks, y_title, x_title)]
    parts.append(_x_labels(frame, [(at(x), label) for x, label in sorted(labels.items())]))
    for line in series:
        parts.append(_line(line, frame, at))
    return "".join([*parts, "</svg>"])


def _line(line: Line, frame: _Frame, at: Callable[[float], float]) -> str:
    color = line.color % SERIES
    path = " ".join(f"{at(point.x):.1f},{frame.y(point.y):.1f}" for point in line.points)
    parts = [f'<polyline class="line s{color}" points="{path}"/>']
    for point in line.points:
        x, y = at(point.x), frame.y(point.y)
        if point.low is not None and point.high is not None:
            parts.append(
                f'<line class="whisker s{color}" x1="{x:.1f}" x2="{x:.1f}" '
                f'y1="{frame.y(point.low):.1f}" y2="{frame.y(point.high):.1f}"/>'
            )
        parts.append(_marker(color, x, y, f"{line.name}, {point.label}: {point.y:,.1f}"))
    return "".join(parts)


def _marker(color: int, x: float, y: float, tip: str) -> str:
    """Another shape for every series: colour is not all that tells them apart."""
    shapes = (
        f'<rect class="mark s{color}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
        f'<circle class="mark s{color}" cx="{x:.1f}" cy="{y:.1f}" r="4.6"',
        f'<path class="mark s{color}" d="M{x:.1f} {y - 5.5:.1f}l5.5 9.5h-11z"',
        f'<path class="mark s{color}" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"',
    )
    tag = shapes[color]
    name = tag[1 : tag.index(" ")]
    return f"{tag}><title>{escape(tip)}</title></{name}>"


def stacked_bars(
    groups: Sequence[Bars], width: int, height: int, title: str, y_title: str, x_title: str
) -> str:
    """Groups of stacked bars; a hatched piece is drawn above the solid one below it."""
    totals = [sum(piece.value for piece in bar) for group in groups for bar in group.bars]
    frame, ticks = _frame(width, height, max(totals, default=1.0))
    parts = [frame.open(title), _hatching(), _axes(frame, ticks, y_title, x_title)]
    slot = (frame.right - frame.left) / max(len(groups), 1)
    labels = []
    longest = max((len(group.label) for group in groups), default=0)
    stride = math.ceil((_CHARACTER * longest + 6) / slot)
    for place, group in enumerate(groups):
        middle = frame.left + slot * (place + 0.5)
        if (len(groups) - 1 - place) % stride == 0:
            labels.append((middle, group.label))
        thick = min(30.0, slot * 0.8 / max(len(group.bars), 1))
        begin = middle - thick * len(group.bars) / 2
        for number, bar in enumerate(group.bars):
            parts.append(_bar(bar, frame, begin + thick * number + 1, thick - 2, group.label))
    parts.append(_x_labels(frame, labels))
    return "".join([*parts, "</svg>"])


def _bar(bar: Sequence[Piece], frame: _Frame, x: float, width: float, label: str) -> str:
    parts, below = [], 0.0
    for piece in bar:
        top, bottom = frame.y(below + piece.value), frame.y(below)
        below += piece.value
        box = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(bottom - top, 0):.1f}"'
        tip = f"<title>{escape(f'{label}, {piece.name}: {piece.value:,.1f} ms')}</title>"
        color = piece.color % SERIES
        parts.append(f'<rect class="fill s{color}" {box}>{tip}</rect>')
        if piece.shade == "hatched":
            parts.append(f'<rect class="hatch" {box}>{tip}</rect>')
    return "".join(parts)


def _hatching() -> str:
    return (
        '<defs><pattern id="hatching" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="hatchline" width="3" height="6"/>'
        "</pattern></defs>"
    )


def shares(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], width: int, title: str) -> str:
    """One bar for each row, divided by share, with the shares written below it."""
    height = 50 * len(rows) + 6
    frame = _Frame(width, height, 0, width, 0, height, 1)
    parts = [frame.open(title)]
    for number, (name, pieces) in enumerate(rows):
        top = 50 * number
        total = sum(count for _, count in pieces) or 1
        said = ", ".join(f"{what} {count / total:.0%}" for what, count in pieces)
        parts.append(
            f'<text class="axis" x="0" y="{top + 13}">{escape(_cut(f"{name}: {said}", width))}'
            "</text>"
        )
        x = 0.0
        for what, count in pieces:
            wide = width * count / total
            parts.append(
                f'<rect class="outcome o-{escape(what)}" x="{x:.1f}" y="{top + 20}" '
                f'width="{max(wide - 1, 0.5):.1f}" height="18">'
                f"<title>{escape(f'{name}: {what} {count:.0f}')}</title></rect>"
            )
            x += wide
    return "".join([*parts, "</svg>"])


def _cut(text: str, width: int) -> str:
    most = int(width / _CHARACTER)
    return text if len(text) <= most else text[: most - 1] + "…"
