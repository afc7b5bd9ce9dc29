"""Counts of other processes end in the metrics of the process that applies them."""

import prometheus_client
import pytest

from pd_connector import counters
from pd_connector.counters import Pending, apply, begin, observe
from pd_connector.telemetry import Metric

COUNTER = Metric("pd_test_refused_total", "counter", "Test.", ("reason",))
GAUGE = Metric("pd_test_pins", "gauge", "Test.")
HISTOGRAM = Metric("pd_test_seconds", "histogram", "Test.", ("peer",), (1.0, 2.0))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {metric.name: metric for metric in (COUNTER, GAUGE, HISTOGRAM)}
    monkeypatch.setattr(counters, "_BY_NAME", metrics)


def value(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, labels)


def test_rows_of_another_process_are_applied() -> None:
    pending = Pending()
    pending.add(COUNTER, "forged")
    pending.add(COUNTER, "forged", amount=2)
    pending.add(GAUGE, amount=7)
    pending.add(GAUGE, amount=5)
    pending.add(HISTOGRAM, "decode-0", amount=1.5)
    rows = pending.take()
    assert not pending
    assert pending.take() == []
    # Lists, as they arrive over vLLM's msgpack.
    apply([[name, list(labels), amount] for name, labels, amount in rows])  # type: ignore[misc]
    assert value("pd_test_refused_total", reason="forged") == 3
    assert value("pd_test_pins") == 5
    assert value("pd_test_seconds_bucket", peer="decode-0", le="2.0") == 1


def test_rows_that_are_not_known_are_ignored() -> None:
    apply([("pd_test_nobody_total", ("x",), 1), ("pd_test_pins", ("x", "y"), 9)])
    assert value("pd_test_nobody_total", x="x") is None
    assert value("pd_test_pins") != 9


def test_a_count_of_the_api_server_needs_no_way() -> None:
    observe(COUNTER, "unsigned")
    assert value("pd_test_refused_total", reason="unsigned") == 1


def test_what_nobody_takes_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MOST_PENDING", 2)
    pending = Pending()
    for _ in range(5):
        pending.add(GAUGE)
    assert len(pending.take()) == 2
    assert pending.lost == 3


def test_counters_are_at_0_before_their_first_event() -> None:
    kinds = Metric("pd_test_kinds_total", "counter", "Test.", ("kind",), values=(("a", "b"),))
    plain = Metric("pd_test_plain_total", "counter", "Test.")
    peers = Metric("pd_test_peers_total", "counter", "Test.", ("peer",))
    begin(kinds, plain, peers)
    assert value("pd_test_kinds_total", kind="a") == value("pd_test_kinds_total", kind="b") == 0
    assert value("pd_test_plain_total") == 0
    observe(kinds, "b")
    begin(kinds)
    assert value("pd_test_kinds_total", kind="b") == 1
