"""A run's result as one self-contained HTML page."""

from html import escape

from pdctl.bench.report.figures import (
    color_of,
    outcomes_section,
    prefill_section,
    ttft_section,
    turns_section,
)
from pdctl.bench.report.result import Result
from pdctl.bench.report.style import STYLE
from pdctl.bench.report.tables import (
    about_section,
    article_section,
    decode_section,
    evidence_section,
    lengths_section,
    transfers_section,
)
from pdctl.bench.report.text import ms


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
            f"<div class='pair'>{ttft_section(result)}{prefill_section(result)}</div>",
            lengths_section(result),
            f"<div class='pair'>{turns_section(result)}{outcomes_section(result)}</div>",
            decode_section(result),
            article_section(result),
            evidence_section(result),
            transfers_section(result),
            about_section(result),
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
            f"<div class='card'><span class='key s{color_of(result, arm)}'></span>{escape(arm)}"
            f"<b>{ms(cell.ttft)} ms</b><small>{below}</small></div>"
        )
    return (
        f"<h2>Time to first token at {escape(last.label)} prompt tokens</h2>"
        f"<div class='cards'>{''.join(cards)}</div>"
    )
