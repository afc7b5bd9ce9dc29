"""A run's result as Markdown."""

from collections.abc import Iterable

from pdctl.bench.report.article import MACHINES
from pdctl.bench.report.result import Result
from pdctl.bench.report.text import ms, number, speed, times, verdict_line, whole


def as_markdown(result: Result) -> str:
    settings = result.run.settings
    parts = [
        f"# {settings.get('spec') or 'Benchmark'}: {settings['workload']['kind']}",
        verdict_line(result),
        *(f"> {notice}" for notice in result.notices),
        "## Turns after the first, by prompt length",
        lengths_table(result),
        f"Medians. Ratio: {result.base} over the arm, with its 95 % interval by bootstrap.",
    ]
    if result.article:
        parts += ["## Beside the article", article_table(result), f"The article: {MACHINES}."]
    parts += ["## Evidence", _evidence(result)]
    return "\n\n".join(parts) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heading = list(head)
    lines = [f"| {' | '.join(heading)} |", "|" + "---|" * len(heading)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def lengths_table(result: Result) -> str:
    head = ("prompt tokens", "arm", "TTFT ms", "P90", "ratio", "prefill ms", "read ms",
            "read GB/s", "descriptors", "tokens read")  # fmt: skip
    return table(
        head,
        (
            (
                group.label,
                arm,
                ms(cell.ttft),
                number(cell.ttft.p90 if cell.ttft else None),
                times(group.ttft_ratio.get(arm)),
                ms(cell.prefill),
                ms(cell.read_ms),
                speed(cell),
                whole(cell.descriptors),
                whole(cell.tokens_read),
            )
            for group in result.by_length
            for arm, cell in group.cells.items()
        ),
    )


def article_table(result: Result) -> str:
    head = ("figure", "tokens", "article off / on, ms", "ratio", "here at",
            f"{result.base} / {result.reader}, ms", "ratio")  # fmt: skip
    return table(
        head,
        (
            (
                f"{beside.reported.model} {beside.reported.quantity}",
                f"{beside.reported.tokens:,}",
                f"{beside.reported.off_ms:,.0f} / {beside.reported.on_ms:,.0f}",
                f"{beside.reported.ratio:.2f}",
                "-" if beside.measured_tokens is None else f"{beside.measured_tokens:,}",
                f"{number(beside.off_ms)} / {number(beside.on_ms)}",
                times(beside.ratio),
            )
            for beside in result.article
        ),
    )


def _evidence(result: Result) -> str:
    marks = {True: "ok", False: "**fails**", None: "**no data**"}
    return table(
        ("", "check", "what was seen"),
        ((marks[check.ok], check.name, check.detail) for check in result.checks),
    )
