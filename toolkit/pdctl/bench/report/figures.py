"""The page's charts, each with its heading, legend and note."""

from collections.abc import Callable, Iterable
from html import escape

from pdctl.bench.report import charts
from pdctl.bench.report.charts import Bars, Line, Piece, Point
from pdctl.bench.report.result import Group, Result

_WIDE, _NARROW = 560, 350
"""Widths of the charts on a wide and on a narrow screen, in CSS pixels."""


def color_of(result: Result, arm: str) -> int:
    return result.arms.index(arm) % charts.SERIES


def ttft_section(result: Result) -> str:
    series = _series(result, result.by_length, _point)
    if not any(line.points for line in series):
        return ""
    return (
        "<section><h2>Time to first token over prompt length</h2>"
        + _arms(result)
        + _both(
            lambda width: charts.lines(
                series, width, 300, "TTFT over prompt length", "TTFT, ms", "prompt tokens"
            )
        )
        + "<p class='note'>Medians; whiskers: 95 % interval by bootstrap. Turns after a "
        "conversation's first.</p></section>"
    )


def prefill_section(result: Result) -> str:
    groups, names = [], set()
    for group in result.by_length:
        bars = []
        for arm in result.arms:
            cell = group.cells.get(arm)
            if cell is None or cell.compute_ms is None:
                continue
            color = color_of(result, arm)
            bar = [Piece(f"{arm}, compute", cell.compute_ms.median, color)]
            names.add((arm, "compute"))
            if cell.read_ms is not None:
                bar.append(Piece(f"{arm}, KV transfer", cell.read_ms.median, color, "hatched"))
                names.add((arm, "transfer"))
            bars.append(bar)
        if bars:
            groups.append(Bars(group.label, bars))
    if not groups:
        return ""
    entries = []
    for arm in result.arms:
        if (arm, "compute") in names:
            entries.append((f"{arm}: compute", color_of(result, arm), False))
        if (arm, "transfer") in names:
            entries.append((f"{arm}: KV transfer", color_of(result, arm), True))
    return (
        "<section><h2>Prefill time: compute and transfer</h2>"
        + _legend(entries)
        + _both(
            lambda width: charts.stacked_bars(
                groups, width, 300, "Prefill time by prompt length", "prefill, ms", "prompt tokens"
            )
        )
        + "<p class='note'>Medians. Transfer is the D-&gt;P read as the engine timed it; compute "
        "is the rest of what the router waited for prefill.</p></section>"
    )


def turns_section(result: Result) -> str:
    if len(result.by_turn) < 2:
        return ""
    series = _series(result, result.by_turn, _turn_point)
    return (
        "<section><h2>Time to first token by turn</h2>"
        + _arms(result)
        + _both(
            lambda width: charts.lines(
                series, width, 260, "TTFT by turn", "TTFT, ms", "turn of the conversation"
            )
        )
        + "</section>"
    )


def outcomes_section(result: Result) -> str:
    rows = [(arm, counted.most_common()) for arm, counted in result.outcomes.items() if counted]
    if not rows:
        return ""
    return (
        "<section><h2>What became of the prompts</h2>"
        + _both(lambda width: charts.shares(rows, width, "Outcome shares"))
        + "<p class='note'>All measured turns, first turns included: those have nothing to "
        "reuse.</p></section>"
    )


def _both(draw: Callable[[int], str]) -> str:
    return (
        f"<div class='chart wide'>{draw(_WIDE)}</div>"
        f"<div class='chart narrow'>{draw(_NARROW)}</div>"
    )


def _legend(entries: Iterable[tuple[str, int, bool]]) -> str:
    keys = "".join(
        f"<span><i class='key s{color}{' hatched' if hatched else ''}'></i>{escape(name)}</span>"
        for name, color, hatched in entries
    )
    return f"<div class='legend'>{keys}</div>"


def _arms(result: Result) -> str:
    return _legend((arm, color_of(result, arm), False) for arm in result.arms)


def _series(
    result: Result, groups: Iterable[Group], point: Callable[[Group, str], Point]
) -> list[Line]:
    """A line of TTFT for every arm."""
    known = list(groups)
    return [
        Line(
            arm,
            color_of(result, arm),
            [point(group, arm) for group in known if _has(group, arm)],
        )
        for arm in result.arms
    ]


def _has(group: Group, arm: str) -> bool:
    return arm in group.cells and group.cells[arm].ttft is not None


def _point(group: Group, arm: str) -> Point:
    cell = group.cells[arm]
    assert cell.ttft is not None
    interval = cell.ttft_interval
    return Point(
        float(group.tokens or 0),
        cell.ttft.median,
        interval.low if interval else None,
        interval.high if interval else None,
        group.label,
    )


def _turn_point(group: Group, arm: str) -> Point:
    ttft = group.cells[arm].ttft
    assert ttft is not None
    return Point(float(group.tokens or 0), ttft.median, label=str(group.tokens))
