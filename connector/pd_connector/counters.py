"""Counts that end on an engine's ``/metrics``, wherever in the engine they arise.

The API server serves ``/metrics``, and a metric made there appears on it: :func:`observe`.
Scheduler and workers run in other processes: they collect rows in a :class:`Pending`, which
travels with vLLM's connector stats (:mod:`pd_connector.stats`) and ends in :func:`apply`.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from pd_connector.telemetry import METRICS, Metric

Row = tuple[str, Sequence[str], float]
"""Name of a metric, values of its labels in the record's order, amount: added to a counter, set
on a gauge, observed by a histogram."""

MOST_PENDING = 10_000
"""Rows a process collects until they are taken; further ones only count as lost."""

_BY_NAME = {metric.name: metric for metric in METRICS}

_instruments: dict[str, Any] = {}
_lock = threading.Lock()


class Pending:
    """Rows of a process that serves no HTTP, until they are taken. Safe among threads."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._lock = threading.Lock()
        self.lost = 0

    def add(self, metric: Metric, *labels: str, amount: float = 1) -> None:
        with self._lock:
            if len(self._rows) < MOST_PENDING:
                self._rows.append((metric.name, labels, amount))
            else:
                self.lost += 1

    def take(self) -> list[Row]:
        """The rows since the last call."""
        with self._lock:
            rows, self._rows = self._rows, []
        return rows

    def __bool__(self) -> bool:
        return bool(self._rows)


def observe(metric: Metric, *labels: str, amount: float = 1) -> None:
    """Add to a counter, set a gauge or let a histogram observe, in the API server's process."""
    instrument = _instrument(metric)
    child = instrument.labels(*labels) if metric.labels else instrument
    if metric.kind == "counter":
        child.inc(amount)
    elif metric.kind == "gauge":
        child.set(amount)
    else:
        child.observe(amount)


def begin(*counters: Metric) -> None:
    """Have counters at 0 before their first event, in the API server's process, so that rates
    and alerts have data; one whose labels' values are not known before is left out."""
    for counter in counters:
        for labels in counter.label_sets():
            observe(counter, *labels, amount=0)


def apply(rows: Iterable[Row]) -> None:
    """Observe rows that came from another process; unknown names are ignored."""
    for name, labels, amount in rows:
        if (metric := _BY_NAME.get(name)) is not None and len(labels) == len(metric.labels):
            observe(metric, *labels, amount=amount)


def _instrument(metric: Metric) -> Any:
    with _lock:
        if metric.name not in _instruments:
            _instruments[metric.name] = _make(metric)
        return _instruments[metric.name]


def _make(metric: Metric) -> Any:
    # vLLM decides while it starts whether the library counts for several processes.
    from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415

    if metric.kind == "counter":
        return Counter(metric.name.removesuffix("_total"), metric.text, metric.labels)
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.text, metric.labels, multiprocess_mode="mostrecent")
    return Histogram(
        metric.name, metric.text, metric.labels, buckets=metric.buckets or Histogram.DEFAULT_BUCKETS
    )
