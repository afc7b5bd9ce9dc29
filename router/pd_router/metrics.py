"""The router's Prometheus metrics, made from the records of :mod:`pd_connector.telemetry`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pd_connector import telemetry
from pd_connector.telemetry import Metric

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Label values and value."""


Kind = TypeVar("Kind", Counter, Histogram)


class Labelled(Generic[Kind]):
    """A metric with labels, of which those of one set of values are found again at once."""

    def __init__(self, metric: Kind) -> None:
        self._metric: Kind = metric
        self._known: dict[tuple[str, ...], Kind] = {}

    def labels(self, *values: str) -> Kind:
        known = self._known.get(values)
        if known is None:
            known = self._known[values] = self._metric.labels(*values)
        return known


class Metrics:
    """One registry per process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.turns = Labelled(self._counter(telemetry.ROUTER_TURNS))
        self.routes = Labelled(self._counter(telemetry.ROUTER_ROUTES))
        self.tokens = Labelled(self._counter(telemetry.ROUTER_TOKENS))
        self.ttft = Labelled(self._histogram(telemetry.ROUTER_TTFT))
        self.prefill = Labelled(self._histogram(telemetry.ROUTER_PREFILL))
        self.readback = Labelled(self._histogram(telemetry.ROUTER_READBACK))
        self.handles_stored = self._counter(telemetry.ROUTER_HANDLES_STORED)
        self.handles_sent = Labelled(self._counter(telemetry.ROUTER_HANDLES_SENT))
        self.handles_refused = Labelled(self._counter(telemetry.ROUTER_HANDLES_REFUSED))
        self.handles_dropped = Labelled(self._counter(telemetry.ROUTER_HANDLES_DROPPED))
        self.handle_age = self._histogram(telemetry.ROUTER_HANDLE_AGE)
        self.prefill_retries = Labelled(self._counter(telemetry.ROUTER_PREFILL_RETRIES))
        self.stripped = self._counter(telemetry.ROUTER_STRIPPED)
        self.requests = Labelled(self._counter(telemetry.ROUTER_REQUESTS))
        self.endings = Labelled(self._counter(telemetry.ROUTER_ENDINGS))
        self.leg_restarts = Labelled(self._counter(telemetry.ROUTER_LEG_RESTARTS))
        self.spans_dropped = self._counter(telemetry.ROUTER_SPANS_DROPPED)

    def gauge(self, metric: Metric, read: Callable[[], Samples]) -> None:
        """A gauge whose samples are read when the metrics are."""
        self._registry.register(_Gauge(metric, read))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type: OpenMetrics, which has the exemplars, to whoever
        accepts it, else Prometheus' text format."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _counter(self, metric: Metric) -> Counter:
        counter = Counter(metric.name, metric.text, metric.labels, registry=self._registry)
        for values in filter(None, metric.label_sets()):
            counter.labels(*values)
        return counter

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.name,
            metric.text,
            metric.labels,
            buckets=metric.buckets,
            registry=self._registry,
        )


class _Gauge(Collector):
    def __init__(self, metric: Metric, read: Callable[[], Samples]) -> None:
        self._metric = metric
        self._read = read

    def collect(self) -> Iterator[Any]:
        metric = self._metric
        family = GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
        for values, value in self._read():
            family.add_metric(values, value)
        yield family

    def describe(self) -> Iterator[Any]:
        yield GaugeMetricFamily(self._metric.name, self._metric.text, labels=self._metric.labels)
