"""The router's Prometheus metrics; their names are the contract's."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pd_connector import contract
from pd_connector.contract import Outcome

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class Metrics:
    """One registry per process."""

    def __init__(self, handles_held: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._turns = self._counter(
            contract.ROUTER_TURNS, "Turns whose prompt was prefilled, by reuse outcome.", "outcome"
        )
        self.handles_stored = self._counter(
            contract.ROUTER_HANDLES_STORED, "Handles kept for a next turn."
        )
        self.handles_sent = self._counter(
            contract.ROUTER_HANDLES_SENT, "Handles sent to a prefill leg."
        )
        self.prefill_retries = self._counter(
            contract.ROUTER_PREFILL_RETRIES, "Prefills repeated without their handle."
        )
        self.stripped_params = self._counter(
            contract.ROUTER_STRIPPED_PARAMS, "Transfer parameters stripped from client requests."
        )
        self.prefill_seconds = Histogram(
            contract.ROUTER_PREFILL_SECONDS,
            "Seconds from the prefill request to its answer, retries included.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.ttft_seconds = Histogram(
            contract.ROUTER_TTFT_SECONDS,
            "Seconds from a streamed request to its first event.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        held = Gauge(
            contract.ROUTER_HANDLES_HELD, "Handles that could be used now.", registry=self._registry
        )
        held.set_function(handles_held)
        for outcome in Outcome:
            self._turns.labels(outcome.value)

    def count_turn(self, outcome: Outcome) -> None:
        self._turns.labels(outcome.value).inc()

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)
