"""A run's result as one self-contained HTML page."""

from collections.abc import Callable, Iterable
from html import escape

from pdctl.bench.report import charts
from pdctl.bench.report.article import MACHINES
from pdctl.bench.report.charts import Bars, Line, Piece, Point
from pdctl.bench.report.data import Group, Result, versions
from pdctl.bench.report.style import STYLE
from pdctl.bench.report.text import ms, number, speed, times, whole
from pdctl.bench.stats import Summary

_WIDE, _NARROW = 560, 350
"""Widths of the charts on a wide and on a narrow screen, in CSS pixels."""


def as_html(result: Result) -> str:
    settings = result.run.settings
    title = f"Bidirectional KV transfer: {settings.get('spec') or 'benchmark'}"
    return "".join(
        [
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            _subtitle(result),
            _verdict(result),
            _headline(result),
            *(f"<p class='notice'>{escape(notice)}</p>" for notice in result.notices),
            f"<div class='pair'>{_ttft(result)}{_prefill(result)}</div>",
            _lengths(result),
            f"<div class='pair'>{_turns(result)}{_outcomes(result)}</div>",
            _decode(result),
            _article(result),
            _evidence(result),
            _transfers(result),
            _about(result),
            "</main></body></html>\n",
        ]
    )


def _subtitle(result: Result) -> str:
    settings = result.run.settings
    about = settings.get("about") or {}
    concurrency = settings["workload"]["load"]["concurrency"]
    told = [
        about.get("model") and f"model {about['model']}",
        about.get("device"),
        settings["workload"]["kind"],
        f"{settings.get('repeats')} repeats",
        concurrency and f"concurrency {concurrency}",
        settings.get("created"),
    ]
    return f"<p class='sub'>{escape(' · '.join(str(each) for each in told if each))}</p>"


def _verdict(result: Result) -> str:
    said = {
        "VALID": "the evidence carries the comparison.",
        "INVALID": "no ratio is shown, because:",
        "NO COMPARISON": "this run has one arm.",
    }[result.verdict]
    items = "".join(f"<li>{escape(problem)}</li>" for problem in result.problems)
    listed = f"<ul>{items}</ul>" if items else ""
    kind = {"VALID": "good", "INVALID": "bad"}.get(result.verdict, "plain")
    return f"<div class='verdict {kind}'><strong>{result.verdict}</strong> {said}{listed}</div>"


def _headline(result: Result) -> str:
    """The longest prompt's figures."""
    if not result.by_length:
        return ""
    last = result.by_length[-1]
    cards = []
    for arm in result.arms:
        cell = last.cells.get(arm)
        if cell is None:
            continue
        gain = last.ttft_ratio.get(arm)
        below = f"{gain.value:.1f} times lower than {result.base}" if gain else "&nbsp;"
        cards.append(
            f"<div class='card'><span class='key s{_color(result, arm)}'></span>{escape(arm)}"
            f"<b>{ms(cell.ttft)} ms</b><small>{below}</small></div>"
        )
    return (
        f"<h2>Time to first token at {escape(last.label)} prompt tokens</h2>"
        f"<div class='cards'>{''.join(cards)}</div>"
    )


def _color(result: Result, arm: str) -> int:
    return result.arms.index(arm) % charts.SERIES


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


def _ttft(result: Result) -> str:
    series = [
        Line(
            arm,
            _color(result, arm),
            [_point(group, arm) for group in result.by_length if _has(group, arm)],
        )
        for arm in result.arms
    ]
    if not any(line.points for line in series):
        return ""
    return (
        "<section><h2>Time to first token over prompt length</h2>"
        + _legend((arm, _color(result, arm), False) for arm in result.arms)
        + _both(
            lambda width: charts.lines(
                series, width, 300, "TTFT over prompt length", "TTFT, ms", "prompt tokens"
            )
        )
        + "<p class='note'>Medians; whiskers: 95 % interval by bootstrap. Turns after a "
        "conversation's first.</p></section>"
    )


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


def _prefill(result: Result) -> str:
    groups, names = [], set()
    for group in result.by_length:
        bars = []
        for arm in result.arms:
            cell = group.cells.get(arm)
            if cell is None or cell.compute_ms is None:
                continue
            color = _color(result, arm)
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
            entries.append((f"{arm}: compute", _color(result, arm), False))
        if (arm, "transfer") in names:
            entries.append((f"{arm}: KV transfer", _color(result, arm), True))
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


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heading = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<div class='scroll'><table><thead><tr>{heading}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _lengths(result: Result) -> str:
    head = (
        "prompt", "arm", "TTFT ms", "mean", "P90", "ratio (95 %)", "prefill ms", "ratio (95 %)",
        "read ms", "GB/s", "descriptors", "tokens read", "outside ms",
    )  # fmt: skip
    rows = [
        (
            group.label,
            arm,
            ms(cell.ttft),
            number(cell.ttft.mean if cell.ttft else None),
            number(cell.ttft.p90 if cell.ttft else None),
            times(group.ttft_ratio.get(arm)),
            ms(cell.prefill),
            times(group.prefill_ratio.get(arm)),
            ms(cell.read_ms),
            speed(cell),
            whole(cell.descriptors),
            whole(cell.tokens_read),
            _outside(cell.outside_ms, cell.ttft),
        )
        for group in result.by_length
        for arm, cell in group.cells.items()
    ]
    return (
        "<section><h2>By prompt length</h2>"
        + _table(head, rows)
        + f"<p class='note'>Medians, and mean and P90 of TTFT. Ratio: {escape(result.base)} over "
        "the arm. Outside: TTFT less the engines' own times, that is router, HTTP and "
        "client, with its share.</p></section>"
    )


def _outside(outside: Summary | None, ttft: Summary | None) -> str:
    if outside is None or ttft is None:
        return "-"
    return f"{number(outside.median)} ({outside.median / ttft.median:.0%})"


def _turns(result: Result) -> str:
    if len(result.by_turn) < 2:
        return ""
    series = [
        Line(
            arm,
            _color(result, arm),
            [_turn_point(group, arm) for group in result.by_turn if _has(group, arm)],
        )
        for arm in result.arms
    ]
    return (
        "<section><h2>Time to first token by turn</h2>"
        + _legend((arm, _color(result, arm), False) for arm in result.arms)
        + _both(
            lambda width: charts.lines(
                series, width, 260, "TTFT by turn", "TTFT, ms", "turn of the conversation"
            )
        )
        + "</section>"
    )


def _outcomes(result: Result) -> str:
    rows = [(arm, counted.most_common()) for arm, counted in result.outcomes.items() if counted]
    if not rows:
        return ""
    return (
        "<section><h2>What became of the prompts</h2>"
        + _both(lambda width: charts.shares(rows, width, "Outcome shares"))
        + "<p class='note'>All measured turns, first turns included: those have nothing to "
        "reuse.</p></section>"
    )


def _decode(result: Result) -> str:
    rows = [
        (
            arm,
            ms(cost.tpot),
            number(cost.tpot.p90 if cost.tpot else None),
            "-" if cost.most_kv_usage is None else f"{cost.most_kv_usage:.0%}",
            whole(cost.preemptions),
        )
        for arm, cost in result.decode.items()
    ]
    head = ("arm", "TPOT ms", "P90", "most KV memory in use on decode", "preemptions")
    return (
        "<section><h2>What it costs on decode</h2>"
        + _table(head, rows)
        + "<p class='note'>KV memory right after a turn is what finished turns still hold for a "
        "readback.</p></section>"
    )


def _article(result: Result) -> str:
    if not result.article:
        return ""
    rows = []
    for beside in result.article:
        reported = beside.reported
        rows.append(
            (
                f"{reported.model}, {'TTFT' if reported.quantity == 'ttft' else 'prefill'}",
                f"{reported.tokens:,}",
                f"{reported.off_ms:,.0f} / {reported.on_ms:,.0f}",
                f"{reported.ratio:.2f}",
                "-" if beside.measured_tokens is None else f"{beside.measured_tokens:,}",
                f"{number(beside.off_ms)} / {number(beside.on_ms)}",
                times(beside.ratio),
            )
        )
    head = ("figure", "tokens", "article off / on, ms", "ratio", "tokens here",
            f"{result.base} / {result.reader} here, ms", "ratio here (95 %)")  # fmt: skip
    return (
        "<section><h2>Beside the article</h2>"
        + _table(head, rows)
        + f"<p class='note'>The article: {escape(MACHINES)}. Its figures are means, these are "
        "medians, at the measured length nearest to the article's.</p></section>"
    )


def _evidence(result: Result) -> str:
    marks = {True: ("ok", "good"), False: ("fails", "bad"), None: ("no data", "bad")}
    items = "".join(
        f"<li><span class='tag {marks[check.ok][1]}'>{marks[check.ok][0]}</span>"
        f"<div><b>{escape(check.name)}</b><br>{escape(check.detail)}</div></li>"
        for check in result.checks
    )
    return f"<section><h2>Evidence</h2><ul class='checks'>{items}</ul></section>"


def _transfers(result: Result) -> str:
    if not result.run.transfers:
        return ""
    rows = [
        (
            str(each.get("arm")),
            str(each.get("leg")),
            str(each.get("direction")),
            *(
                number(each.get(key))
                for key in ("transfers", "mean_ms", "p90_ms", "post_mean_ms", "mean_mb",
                            "mb_per_s", "descriptors")
            ),
        )
        for each in result.run.transfers
    ]  # fmt: skip
    head = ("arm", "log of", "direction", "transfers", "mean ms", "P90 ms", "post ms", "MB each",
            "MB/s", "descriptors")  # fmt: skip
    return (
        "<section><details><summary>KV Transfer metrics in the engines' logs "
        f"({len(rows)})</summary>{_table(head, rows)}</details></section>"
    )


def _about(result: Result) -> str:
    run = result.run
    machine = run.environment.get("machine") or {}
    told = versions(run)
    rows = [
        ("command", str(run.settings.get("command") or "-")),
        ("seed", str(run.settings.get("seed"))),
        ("machine", ", ".join(f"{name} {value}" for name, value in machine.items()) or "-"),
        ("GPUs", "; ".join(run.environment.get("gpus") or []) or "none"),
        ("engines", ", ".join(f"{leg} {v}" for leg, v in told["engines"].items() if v) or "-"),
        ("packages", ", ".join(f"{name} {v}" for name, v in told["packages"].items()) or "-"),
        *((name, str(value)) for name, value in (run.settings.get("about") or {}).items()),
    ]
    return (
        "<section><details><summary>Run and machine</summary>"
        + _table(("what", "value"), rows)
        + "</details></section>"
    )
