"""The article's two graphs as a PNG, through matplotlib."""

from pathlib import Path
from typing import Any

from pdctl.bench.report.result import Result
from pdctl.errors import PdctlError

_COLORS = ("#67707a", "#0a7d8c", "#b4581a", "#6b4fa3")
_MARKS = ("s", "o", "^", "D")


def write_png(result: Result, path: Path) -> None:
    """TTFT over prompt length, and prefill time split into compute and transfer.

    Raises:
        PdctlError: matplotlib is not installed, there is nothing to draw, or the file cannot be
            written.
    """
    try:
        import matplotlib  # noqa: PLC0415

        matplotlib.use("Agg")
        from matplotlib import pyplot  # noqa: PLC0415
    except ImportError:
        raise PdctlError("-o png needs matplotlib: pip install 'pdctl[bench]'", 2) from None
    if not result.by_length:
        raise PdctlError("there is nothing to draw: no turn after a conversation's first", 2)
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _ttft(left, result)
    _prefill(right, result)
    name = result.run.settings.get("spec") or "benchmark"
    figure.suptitle(f"{name} ({result.verdict})", fontsize=12)
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise PdctlError(f"{path}: {error.strerror}", 2) from None
    finally:
        pyplot.close(figure)


def _ttft(axes: Any, result: Result) -> None:
    for place, arm in enumerate(result.arms):
        cells = [
            (group.tokens, group.cells[arm])
            for group in result.by_length
            if arm in group.cells and group.cells[arm].ttft
        ]
        medians = [cell.ttft.median for _, cell in cells if cell.ttft]
        intervals = [cell.ttft_interval for _, cell in cells]
        errors = None
        if all(intervals):
            errors = [
                [max(0, m - i.low) for m, i in zip(medians, intervals, strict=True) if i],
                [max(0, i.high - m) for m, i in zip(medians, intervals, strict=True) if i],
            ]
        axes.errorbar(
            [tokens for tokens, _ in cells],
            medians,
            yerr=errors,
            label=arm,
            color=_COLORS[place % len(_COLORS)],
            marker=_MARKS[place % len(_MARKS)],
            capsize=3,
        )
    axes.set(title="Time to first token", xlabel="prompt tokens", ylabel="TTFT, ms (median)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _prefill(axes: Any, result: Result) -> None:
    groups = result.by_length
    width = 0.8 / max(len(result.arms), 1)
    for place, arm in enumerate(result.arms):
        color = _COLORS[place % len(_COLORS)]
        for number, group in enumerate(groups):
            cell = group.cells.get(arm)
            if cell is None or cell.compute_ms is None:
                continue
            at = number + (place - (len(result.arms) - 1) / 2) * width
            compute = cell.compute_ms.median
            axes.bar(at, compute, width * 0.94, color=color,
                     label=f"{arm}: compute" if number == 0 else None)  # fmt: skip
            if cell.read_ms:
                axes.bar(at, cell.read_ms.median, width * 0.94, bottom=compute, color=color,
                         hatch="////", edgecolor="white", linewidth=0,
                         label=f"{arm}: KV transfer" if number == 0 else None)  # fmt: skip
    axes.set_xticks(range(len(groups)), [group.label for group in groups])
    axes.set(title="Prefill time", xlabel="prompt tokens", ylabel="prefill, ms (median)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
