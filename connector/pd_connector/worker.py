"""Worker side of the connector: READs that end well, are accounted for, and end leases."""

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger
from vllm.platforms import current_platform

from pd_connector.counters import Pending
from pd_connector.kvcache import only_full_attention
from pd_connector.leases import Commands
from pd_connector.pins import COMMANDS, READ_SECONDS
from pd_connector.stats import PdStats
from pd_connector.transfers import Transfer, WorkerReport

logger = init_logger("vllm.pd_connector.worker")


class PdPullWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's pull worker, with the gaps in its failure handling closed."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        cores = _own_cores()
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if cores:
            os.sched_setaffinity(0, cores)
        self.pending = Pending()
        self.xfer_stats = PdStats()
        self._expired_reads: set[str] = set()
        self._read_declined = False
        self._reading = ""
        self._ended: deque[Transfer] = deque()
        """Also filled by the thread of a handshake that fails."""
        self._posted: dict[str, int] = {}
        self._read_ends: dict[str, float] = {}
        self._released: set[str] = set()
        # vLLM names the blocks of a failed read only where it takes every layer for
        # full attention; some versions look at the group alone, and then a failed
        # read of a model with several full-attention page sizes passes for a good one.
        self._names_failed_blocks = getattr(
            self, "_is_hma_required", False
        ) and only_full_attention(kv_cache_config)

    def take_report(self) -> WorkerReport | None:
        """What happened to READs since the last call, if anything."""
        if not self._expired_reads and not self._ended:
            return None
        expired, self._expired_reads = self._expired_reads, set()
        return WorkerReport(expired, [self._ended.popleft() for _ in range(len(self._ended))])

    def start_load_kv(self, metadata: Any) -> None:
        now = time.perf_counter()
        for request_id, seconds in (getattr(metadata, READ_SECONDS, None) or {}).items():
            self._read_ends[request_id] = now + seconds
        super().start_load_kv(metadata)
        commands: Commands | None = getattr(metadata, COMMANDS, None)
        if commands is not None:
            self._obey(commands)
        if commands is not None or metadata.reqs_to_send:
            # vLLM looks for expired requests up to the first that is not.
            deadlines = sorted(self._reqs_to_send.items(), key=lambda item: item[1])
            self._reqs_to_send: dict[str, float] = dict(deadlines)

    def get_finished(self) -> tuple[set[str], set[str]]:
        sent, received = super().get_finished()
        return sent | self._settle(received), received

    def get_transfer_results(self) -> Any:
        """What vLLM from 0.30 on asks instead of get_finished."""
        results = super().get_transfer_results()
        results.finished_sending |= self._settle(results.finished_recving)
        return results

    def _settle(self, received: set[str]) -> set[str]:
        """Forget READs that are over; the turns that were released since the last call."""
        released, self._released = self._released, set()
        for request_id in received:
            self._posted.pop(request_id, None)
            self._read_ends.pop(request_id, None)
        return released

    def _fail(self, request_id: str) -> None:
        """Have a read end as one that failed."""
        failures: set[str] | None = getattr(self, "_recv_failures", None)
        if failures is None:
            self._handle_failed_transfer(request_id, None)
        else:
            # vLLM from 0.30 on.
            self._handle_failed_transfer(request_id, None, failures)

    def _obey(self, commands: Commands) -> None:
        now = time.perf_counter()
        for request_id, seconds in commands.extend.items():
            if request_id in self._reqs_to_send:
                deadline = max(self._reqs_to_send[request_id], now + seconds)
                self._reqs_to_send[request_id] = deadline
        for request_id in commands.release:
            # Not there: its reader's notification came first, and freed it.
            if self._reqs_to_send.pop(request_id, None) is not None:
                self._reqs_to_process.discard(request_id)
                for counts in self._notification_counts():
                    counts.pop(request_id, None)
                self._released.add(request_id)

    def _notification_counts(self) -> Iterator[dict[str, int]]:
        """Where vLLM counts the readers of a turn; releases before 0.29 have the first alone."""
        yield self.consumer_notification_counts_by_req
        if hasattr(self, "expected_consumer_notifications_by_req"):
            yield self.expected_consumer_notifications_by_req

    def _is_turn2_read_expired(self, meta: Any) -> bool:
        self._read_declined = bool(super()._is_turn2_read_expired(meta))
        return self._read_declined

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        self._read_declined, self._reading = False, req_id
        if any(meta.local_block_ids):
            self._posted[req_id] = time.time_ns()
        if self._names_no_such_block(meta):
            # vLLM would read another layer's block in its place.
            logger.warning("pd_connector: request %s: its handle names no block", req_id)
            self._fail(req_id)
            return
        super()._read_blocks_for_req(req_id, meta)
        if self._read_declined:
            self._expired_reads.add(req_id)
            self._read_declined = False
        if _only_notifies(meta):
            # No completion will come that drops the entry.
            self._recving_metadata.pop(req_id, None)

    def _names_no_such_block(self, meta: Any) -> bool:
        """Whether a handle names a block that its engine, now known, does not have."""
        if not any(meta.local_block_ids):
            return False
        blocks = self.dst_num_blocks.get(meta.remote.engine_id)
        ids = [block for group in meta.remote.block_ids for block in group]
        return blocks is not None and bool(ids) and max(ids) >= blocks

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> Any:
        """As vLLM's, one request at a time, to tell whose transfers have ended.

        Returns the requests that are done; from vLLM 0.30 on also those that failed.
        """
        done: set[str] = set()
        failed: set[str] = set()
        result = super()._pop_done_transfers({})
        data = self.xfer_stats.data
        for request_id in list(transfers):
            before = len(data["bytes_transferred"])
            one = {request_id: transfers.pop(request_id)}
            result = super()._pop_done_transfers(one)
            ended, broken = result if isinstance(result, tuple) else (result, set())
            done |= ended
            failed |= broken
            transfers.update(one)
            for index in range(before, len(data["bytes_transferred"])):
                self._ended.append(
                    Transfer(
                        request_id,
                        self._posted.get(request_id) or time.time_ns(),
                        data["transfer_duration"][index],
                        data["post_duration"][index],
                        int(data["bytes_transferred"][index]),
                        int(data["num_descriptors"][index]),
                    )
                )
            if request_id in done and self._too_late(request_id):
                self._expired_reads.add(request_id)
                self._fail(request_id)
        return (done, failed) if isinstance(result, tuple) else done

    def _too_late(self, request_id: str) -> bool:
        """Whether the claim lapsed during the READ, so that other tokens may have been read."""
        return time.perf_counter() >= self._read_ends.get(request_id, float("inf"))

    def _handle_failed_transfer(self, req_id: str, handle: Any, *args: Any, **kwargs: Any) -> Any:
        meta = self._recving_metadata.get(req_id)
        if meta is not None and _only_notifies(meta):
            # The request waits for nothing: its peer could not be told that its
            # blocks are free, which the peer's own deadline repairs.
            self._recving_metadata.pop(req_id, None)
            self.xfer_stats.record_failed_notification()
            return True
        if not (self._read_declined and self._reading == req_id):
            started = self._posted.get(req_id) or time.time_ns()
            self._ended.append(Transfer(req_id, started, 0.0, 0.0, 0, 0, failed=True))
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
