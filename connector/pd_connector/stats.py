"""Carries rows of :mod:`pd_connector.counters` from engine core and workers to ``/metrics``.

vLLM sends a connector's stats from its workers and its scheduler to the API server with every
step; one more key of theirs holds the rows.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

from pd_connector.counters import Row, apply, begin
from pd_connector.telemetry import (
    ENGINE_DECISIONS,
    ENGINE_DECLINED,
    ENGINE_PINS_ENDED,
    ENGINE_REFUSED,
    ENGINE_SPANS_DROPPED,
    ENGINE_TOKENS,
)

ROWS = "pd_rows"


class PdStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's NIXL stats with rows beside them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data.setdefault(ROWS, [])

    def reset(self) -> None:
        super().reset()
        self.data[ROWS] = []

    def is_empty(self) -> bool:
        return not self.data.get(ROWS) and bool(super().is_empty())

    def with_rows(self, rows: list[Row]) -> "PdStats":
        self.data[ROWS].extend(rows)
        return self


class PdPromMetrics(NixlPromMetrics):  # type: ignore[misc]
    """vLLM's NIXL metrics; rows go to their own instruments."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        role = vllm_config.kv_transfer_config
        begin(ENGINE_REFUSED, ENGINE_SPANS_DROPPED)
        if role.is_kv_producer:
            begin(ENGINE_DECISIONS, ENGINE_TOKENS, ENGINE_DECLINED)
        if role.is_kv_consumer:
            begin(ENGINE_PINS_ENDED)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        apply(transfer_stats_data.get(ROWS, ()))
