"""The page's tables, each with its heading and note."""

from collections.abc import Iterable
from html import escape

from pdctl.bench.report.article import MACHINES
from pdctl.bench.report.data import versions
from pdctl.bench.report.result import Result
from pdctl.bench.report.text import ms, number, reading, times, whole
from pdctl.bench.stats import Summary


def lengths_section(result: Result) -> str:
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
            *reading(group, arm),
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


def decode_section(result: Result) -> str:
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


def article_section(result: Result) -> str:
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


def evidence_section(result: Result) -> str:
    marks = {True: ("ok", "good"), False: ("fails", "bad"), None: ("no data", "bad")}
    items = "".join(
        f"<li><span class='tag {marks[check.ok][1]}'>{marks[check.ok][0]}</span>"
        f"<div><b>{escape(check.name)}</b><br>{escape(check.detail)}</div></li>"
        for check in result.checks
    )
    return f"<section><h2>Evidence</h2><ul class='checks'>{items}</ul></section>"


def transfers_section(result: Result) -> str:
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


def about_section(result: Result) -> str:
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


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heading = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<div class='scroll'><table><thead><tr>{heading}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
