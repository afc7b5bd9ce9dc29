"""Worker side of the connector: tells an expired read from a failed one."""

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from pd_connector.counters import Pending
from pd_connector.kvcache import only_full_attention
from pd_connector.stats import PdStats


class ExpiredReads(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Requests whose read a worker declined because decode's blocks had expired."""

    def __init__(self, request_ids: set[str]) -> None:
        self.request_ids = request_ids

    def aggregate(self, other: "ExpiredReads") -> "ExpiredReads":
        return ExpiredReads(self.request_ids | other.request_ids)


class PdPullWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's pull worker, with two gaps in its failure handling closed."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        cores = _own_cores()
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if cores:
            os.sched_setaffinity(0, cores)
        self.pending = Pending()
        self.xfer_stats = PdStats()
        self._expired_reads: set[str] = set()
        self._read_declined = False
        # vLLM names the blocks of a failed read only where it takes every layer for
        # full attention; some versions look at the group alone, and then a failed
        # read of a model with several full-attention page sizes passes for a good one.
        self._names_failed_blocks = getattr(
            self, "_is_hma_required", False
        ) and only_full_attention(kv_cache_config)

    def take_expired_reads(self) -> ExpiredReads | None:
        """The reads declined since the last call, if any."""
        if not self._expired_reads:
            return None
        expired, self._expired_reads = ExpiredReads(self._expired_reads), set()
        return expired

    def _is_turn2_read_expired(self, meta: Any) -> bool:
        self._read_declined = bool(super()._is_turn2_read_expired(meta))
        return self._read_declined

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        self._read_declined = False
        super()._read_blocks_for_req(req_id, meta)
        if self._read_declined:
            self._expired_reads.add(req_id)
        if _only_notifies(meta):
            # No completion will come that drops the entry.
            self._recving_metadata.pop(req_id, None)

    def _handle_failed_transfer(self, req_id: str, handle: Any, *args: Any, **kwargs: Any) -> Any:
        meta = self._recving_metadata.get(req_id)
        if meta is not None and _only_notifies(meta):
            # The request waits for nothing: its peer could not be told that its
            # blocks are free, which the peer's own deadline repairs.
            self._recving_metadata.pop(req_id, None)
            self.xfer_stats.record_failed_notification()
            return True
        if meta is not None and self._names_failed_blocks:
            self._invalid_block_ids.put(set(meta.local_block_ids[0]))
        return super()._handle_failed_transfer(req_id, handle, *args, **kwargs)


def _own_cores() -> set[int] | None:
    """The cores to go back to once vLLM has set up its transfers, if any.

    vLLM's CPU worker moves its main thread to the machine's last core, away from the
    computing threads. With a single one the main thread is that thread, and the legs
    of a small machine would all compute on the same core.
    """
    if not current_platform.is_cpu() or torch.get_num_threads() > 1:
        return None
    return os.sched_getaffinity(0)


def _only_notifies(meta: Any) -> bool:
    """Whether nothing is read: the peer is only told that its blocks are free."""
    return not any(meta.local_block_ids) and not getattr(meta, "awaiting_kvs", False)
