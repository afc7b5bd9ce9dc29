"""The connector that a kv-transfer-config names with :data:`CONNECTOR_CLASS` and
:data:`CONNECTOR_MODULE` of :mod:`pd_connector.contract`."""

from typing import Any

from pd_connector.seams import UnsupportedVllmError, missing_in, refuse_unknown

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    from pd_connector.scheduler import PdPullScheduler
    from pd_connector.stats import ROWS, PdPromMetrics, PdStats
    from pd_connector.transfers import WorkerReport
    from pd_connector.worker import PdPullWorker
except ImportError as error:
    raise UnsupportedVllmError([str(error)]) from error


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """vLLM's NIXL pull connector with a readback that is proven and never hangs.

    It has vLLM's name because vLLM compares the configured name with its own.
    Raises UnsupportedVllmError or UnknownVllmError at start-up on a vLLM it does not fit.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        refuse_unknown()
        missing = missing_in(NixlPullConnectorScheduler, NixlPullConnectorWorker, NixlPullConnector)
        if missing:
            raise UnsupportedVllmError(missing)
        # Not NixlPullConnector's own: it would build the two sides that are replaced here.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = PdPullScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = PdPullWorker(vllm_config, self.engine_id, kv_cache_config)

    def get_kv_connector_stats(self) -> Any:
        if (worker := self.connector_worker) is not None:
            worker.xfer_stats.with_rows(worker.pending.take())
            return super().get_kv_connector_stats()
        stats = PdStats().with_rows(self.connector_scheduler.pending.take())
        for _ in range(self.connector_scheduler.leases.take_declined()):
            stats.record_kv_expired_req()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        # For vLLM's log line, which has nothing to say about rows.
        return NixlKVConnectorStats(
            data={key: value for key, value in (data or {}).items() if key != ROWS}
        )

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> PdPromMetrics:
        return PdPromMetrics(*args, **kwargs)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self.connector_worker.take_report() if self.connector_worker else None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.connector_scheduler.leases.pins.bind(gpu_block_pool)
