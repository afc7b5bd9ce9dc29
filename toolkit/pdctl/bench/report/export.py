"""A run's result as JSON and as CSV."""

import csv
import dataclasses
import io
from typing import Any

from pdctl.bench.records import Row
from pdctl.bench.report.result import Group, Result


def as_data(result: Result) -> dict[str, Any]:
    """What ``pdctl report -o json`` prints; ``docs/benchmark.md`` describes it."""
    settings = result.run.settings
    return {
        "verdict": result.verdict,
        "problems": result.problems,
        "checks": [vars(check) for check in result.checks],
        "notices": result.notices,
        "base": result.base,
        "arms": result.run.arms,
        "by_length": [_group(group) for group in result.by_length],
        "by_turn": [_group(group) for group in result.by_turn],
        "outcomes": {arm: dict(counted) for arm, counted in result.outcomes.items()},
        "decode": {arm: dataclasses.asdict(cost) for arm, cost in result.decode.items()},
        "article": [
            dataclasses.asdict(beside) | {"reported_ratio": beside.reported.ratio}
            for beside in result.article
        ],
        "settings": {name: value for name, value in settings.items() if name != "arms"},
        "environment": result.run.environment,
    }


def _group(group: Group) -> dict[str, Any]:
    return dataclasses.asdict(group)


def as_csv(result: Result) -> str:
    """One line per turn, warm-up left out."""
    stream = io.StringIO()
    names = [each.name for each in dataclasses.fields(Row)]
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    for row in result.run.measured():
        writer.writerow(vars(row))
    return stream.getvalue()
