"""Statistics that break, and queries of them that find nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdctl.doctor.checks.reading import seen
from pdctl.doctor.evidence.facts import Evidence
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, Pattern

COUNTER_ERROR = Pattern(
    "statistics-error",
    (
        "Counters can only be incremented",
        "Duplicated timeseries in CollectorRegistry",
        "Incorrect label names",
    ),
)
_NAME = re.compile(r"\b(?:vllm:|pd_(?:router|engine)_|vllm_)\w{1,100}")
_SUFFIXES = ("_total", "_bucket", "_sum", "_count")


def _counter_error(evidence: Evidence) -> Iterator[Answer]:
    found = seen(evidence, COUNTER_ERROR)
    if found:
        yield Finding(
            found.leg,
            "likely",
            found.excerpts,
            "An error in the engine's own statistics ends the task that hands out answers: a count "
            "that went below zero (tokens that came from the peer are subtracted from those of the "
            "local cache), or metrics registered twice. The engine computes on; clients get "
            "nothing or an error.",
            "Restart the leg, and upgrade vLLM. Until then --disable-log-stats keeps answers "
            "coming, without metrics.",
        )


def _exported(evidence: Evidence) -> set[str]:
    return {
        name
        for leg in evidence.legs
        if leg.metrics
        for scrape in leg.metrics.scrapes
        for name, _ in scrape
    }


def _unknown_name(evidence: Evidence) -> Iterator[Answer]:
    """A name that is asked for, is not there, and is there with another ending or prefix."""
    exported = _exported(evidence)
    for leg in evidence.legs:
        asked = [
            (command.source, command.line)
            for command in leg.commands
            if re.search(r"promtool|/api/v1/query|logcli", command.line)
        ]
        if leg.config and leg.role == DEPLOYMENT:
            lines = leg.config.text.splitlines()
            asked += [(f"{leg.name}/config.txt", line) for line in lines if "expr" in line]
        for source, line in asked:
            for name in _NAME.findall(line):
                known = name in exported or any(name + end in exported for end in _SUFFIXES[1:])
                base = name.removesuffix("_total").replace("vllm_", "vllm:", 1)
                right = next((n for n in (base, f"{base}_total") if n in exported), None)
                if not known and right:
                    yield Finding(
                        leg.name,
                        "certain",
                        (Excerpt(source, line.strip()), Excerpt("metrics", right)),
                        f"A query asks for {name}, which no leg exports; the legs export {right}. "
                        "It answers nothing, and a panel or an alert on it stays silent.",
                        f"Write {right}. `promtool query series --match NAME URL` shows what "
                        "there is; `pdctl render` makes dashboards and alerts that fit.",
                    )
                    return


CHECKS = (
    Check(
        "PD7510",
        "An error in the statistics stops answers",
        Category.OBSERVABILITY,
        "error",
        "statistics-error",
        _counter_error,
        needs=("log",),
        patterns=(COUNTER_ERROR,),
        explains=("PD8505",),
    ),
    Check(
        "PD7511",
        "A query asks for a metric that is not there",
        Category.OBSERVABILITY,
        "warning",
        "query-of-absent-metric",
        _unknown_name,
        needs=("metrics", "commands|config"),
    ),
)
