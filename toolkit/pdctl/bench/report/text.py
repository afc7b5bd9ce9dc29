"""A run's result on a terminal."""

import io

from rich.console import Console
from rich.table import Table

from pdctl.bench.report.result import Cell, Group, Result
from pdctl.bench.stats import Estimate, Summary


def ms(value: Summary | None) -> str:
    """A median in milliseconds."""
    return "-" if value is None else number(value.median)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def times(estimate: Estimate | None) -> str:
    """A ratio with its interval."""
    if estimate is None:
        return "-"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def speed(cell: Cell) -> str:
    return "-" if cell.read_gb_s is None else f"{cell.read_gb_s:.2f}"


def reading(group: Group, arm: str) -> tuple[str, ...]:
    """An arm's cells from the TTFT ratio to the tokens read."""
    cell = group.cells[arm]
    return (
        times(group.ttft_ratio.get(arm)),
        ms(cell.prefill),
        times(group.prefill_ratio.get(arm)),
        ms(cell.read_ms),
        speed(cell),
        whole(cell.descriptors),
        whole(cell.tokens_read),
    )


def as_text(result: Result) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=150, highlight=False)
    console.print(_lengths(result))
    samples = [c.ttft.n for g in result.by_length for c in g.cells.values() if c.ttft]
    console.print(
        f"medians of {max(samples, default=0)}; ratio: {result.base} over the arm, with its 95 % "
        "interval by bootstrap"
    )
    for notice in result.notices:
        console.print(f"NOTE: {notice}")
    console.print()
    console.print(_checks(result))
    console.print(verdict_line(result))
    return stream.getvalue().rstrip()


def verdict_line(result: Result) -> str:
    if result.verdict == "INVALID":
        return f"INVALID: {result.problems[0]}" + (
            f" (and {len(result.problems) - 1} more)" if len(result.problems) > 1 else ""
        )
    if result.verdict == "VALID":
        return f"VALID: {len(result.checks)} checks hold"
    said = f": {result.problems[0]}" if result.problems else ""
    return f"{result.verdict}: one arm{said}"


def _lengths(result: Result) -> Table:
    table = Table(
        title=f"{result.run.settings.get('spec') or 'URL'}: turns after the first",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for heading in (
        "prompt",
        "arm",
        "TTFT ms",
        "P90",
        "ratio",
        "prefill ms",
        "ratio",
        "read ms",
        "read GB/s",
        "descr.",
        "tokens read",
        "TPOT ms",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in result.by_length:
        for place, arm in enumerate(name for name in result.arms if name in group.cells):
            cell = group.cells[arm]
            table.add_row(
                group.label if place == 0 else "",
                arm,
                ms(cell.ttft),
                number(cell.ttft.p90 if cell.ttft else None),
                *reading(group, arm),
                ms(cell.tpot),
            )
    return table


def _checks(result: Result) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in result.checks:
        mark = {True: "ok", False: "FAIL", None: "NO DATA"}[check.ok]
        table.add_row(mark, check.name, check.detail)
    return table
