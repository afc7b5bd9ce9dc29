"""What an engine's /metrics has before anything has happened, on vLLM's own metrics classes."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics

from pd_connector import counters, leases, params, telemetry
from pd_connector.contract import Outcome
from pd_connector.stats import PdPromMetrics
from pd_connector.telemetry import Metric


def start(monkeypatch: pytest.MonkeyPatch, *, prefill: bool, decode: bool) -> set[str]:
    """Names of the counters that a leg of this role begins with."""
    monkeypatch.setattr(NixlPromMetrics, "__init__", lambda self, *args, **kwargs: None)
    seen: set[str] = set()

    def observe(metric: Metric, *labels: str, amount: float = 1) -> None:
        assert amount == 0
        seen.add(metric.name)

    monkeypatch.setattr(counters, "observe", observe)
    role = SimpleNamespace(is_kv_producer=prefill, is_kv_consumer=decode)
    config: Any = SimpleNamespace(kv_transfer_config=role)
    PdPromMetrics(config, {}, [], {})
    return seen


def test_a_leg_has_the_counters_of_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = start(monkeypatch, prefill=True, decode=False)
    decode = start(monkeypatch, prefill=False, decode=True)
    assert start(monkeypatch, prefill=True, decode=True) == prefill | decode
    assert prefill - decode == {
        telemetry.ENGINE_DECISIONS.name,
        telemetry.ENGINE_TOKENS.name,
        telemetry.ENGINE_DECLINED.name,
    }
    assert decode - prefill == {telemetry.ENGINE_PINS_ENDED.name}
    assert telemetry.ENGINE_REFUSED.name in prefill & decode


def test_every_label_value_that_the_code_has_is_known_before() -> None:
    assert telemetry.ENGINE_DECISIONS.values == (tuple(each.value for each in Outcome),)
    assert telemetry.ENGINE_PINS_ENDED.values == (get_args(leases.End),)
    assert telemetry.ENGINE_REJECTED.values == (get_args(params.Reason),)


def test_they_are_on_the_metrics_page() -> None:
    counters.begin(telemetry.ENGINE_DECISIONS)
    name = telemetry.ENGINE_DECISIONS.name
    assert {o.value for o in Outcome} == {
        sample.labels["outcome"]
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
    }
