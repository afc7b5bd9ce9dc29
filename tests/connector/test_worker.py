"""The worker on vLLM's own code, with a stand-in for NIXL: no engine, no memory, no wire."""

import queue
import threading
import time
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pd_connector.leases import Commands
from pd_connector.pins import COMMANDS, READ_SECONDS
from pd_connector.stats import PdStats
from pd_connector.transfers import Transfer, WorkerReport, peer_name
from pd_connector.worker import PdPullWorker


class FakeNixl:
    """Transfers that are in the state they are put in."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.released: list[int] = []

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(
            xferDuration=2_000.0 * handle, postDuration=500.0, totalBytes=100 * handle, descCount=4
        )

    def release_xfer_handle(self, handle: int) -> None:
        self.released.append(handle)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


PAIRS = hasattr(PdPullWorker.__mro__[2], "get_transfer_results")
"""vLLM from 0.30 on tells done and failed transfers apart."""


def popped(worker: PdPullWorker) -> set[str]:
    """The requests whose transfers are over."""
    done = worker._pop_done_transfers(worker._recving_transfers)
    return done[0] if PAIRS else done


@pytest.fixture
def worker() -> PdPullWorker:
    """Only what the tested methods use; vLLM's constructor needs a device and an agent."""
    worker = object.__new__(PdPullWorker)
    worker.nixl_wrapper = FakeNixl()
    worker.xfer_stats = PdStats()
    worker.transfer_topo = SimpleNamespace()
    worker.dst_num_blocks = {"decode-0": 8}
    worker.tp_rank = worker.pcp_rank = 0
    worker._expired_reads, worker._released = set(), set()
    worker._ended = deque()
    worker._posted, worker._read_ends = {}, {}
    worker._read_declined, worker._reading = False, ""
    worker._names_failed_blocks = True
    worker._is_hma_required = False
    worker._recving_metadata, worker._recving_transfers = {}, {}
    worker._failed_recv_reqs, worker._invalid_block_ids = queue.Queue(), queue.Queue()
    worker._ready_requests = queue.Queue()
    worker._reqs_to_send, worker._reqs_to_process = {}, set()
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker.expected_consumer_notifications_by_req = {}
    worker.shutdown = lambda: None
    if PAIRS:
        worker._recv_failures, worker._replicated_pcp_done_sending = set(), set()
        worker._invalid_remote_engines, worker._failed_remote_engines = set(), set()
        worker._handshake_lock, worker._remote_agents = threading.RLock(), {"decode-0": {}}
        worker._handshake_futures, worker._engine_by_address = {}, {("host", 1): "decode-0"}
    return worker


def step(worker: PdPullWorker, **attributes: Any) -> None:
    metadata = SimpleNamespace(
        reqs_to_recv={},
        reqs_to_send={},
        reqs_in_batch=set(),
        reqs_not_processed=set(),
        heartbeat_by_engine={},
        scheduler_clock=0.0,
        **attributes,
    )
    worker.start_load_kv(metadata)


def keep(worker: PdPullWorker, *turns: str) -> float:
    now = time.perf_counter()
    for number, turn in enumerate(turns):
        worker._reqs_to_send[turn] = now + 100 + number
        worker._reqs_to_process.add(turn)
    return now


def read(worker: PdPullWorker, request: str, *handles: int) -> None:
    worker._recving_metadata[request] = SimpleNamespace(local_block_ids=([1, 2],), remote=None)
    worker._recving_transfers[request] = list(handles)
    worker._posted[request] = 17


def test_a_released_turn_is_reported_once(worker: PdPullWorker) -> None:
    keep(worker, "a", "b")
    step(worker, **{COMMANDS: Commands(frozenset({"a", "gone"}), {})})
    assert set(worker._reqs_to_send) == worker._reqs_to_process == {"b"}
    assert worker._released == {"a"}
    worker.use_host_buffer = False
    worker._sync_device_after_mamba_recv = lambda done, failed: None
    assert worker.get_finished() == ({"a"}, set())
    assert worker.get_finished() == (set(), set())


def test_a_release_on_a_vllm_without_expected_readers(worker: PdPullWorker) -> None:
    """Releases before 0.29 do not keep how many readers a turn has."""
    del worker.expected_consumer_notifications_by_req
    keep(worker, "a")
    step(worker, **{COMMANDS: Commands(frozenset({"a"}), {})})
    assert worker._released == {"a"}


def test_a_longer_lease_keeps_the_order_that_expiry_needs(worker: PdPullWorker) -> None:
    now = keep(worker, "a", "b", "c")
    step(worker, **{COMMANDS: Commands(frozenset(), {"a": 500.0, "b": 1.0, "gone": 9.0})})
    assert list(worker._reqs_to_send) == ["b", "c", "a"]
    assert worker._reqs_to_send["a"] >= now + 500
    assert worker._reqs_to_send["b"] >= now + 101


def test_ended_reads_are_told_apart_by_request(worker: PdPullWorker) -> None:
    read(worker, "r1", 1, 2)
    read(worker, "r2", 3)
    worker.nixl_wrapper.states = {1: "DONE", 2: "PROC", 3: "DONE"}
    assert popped(worker) == {"r2"}
    report = worker.take_report()
    assert report is not None
    assert report.transfers == [
        Transfer("r1", 17, 0.002, 0.0005, 100, 4),
        Transfer("r2", 17, 0.006, 0.0005, 300, 4),
    ]
    assert worker._recving_transfers == {"r1": [2]}
    worker.nixl_wrapper.states[2] = "DONE"
    assert popped(worker) == {"r1"}
    assert worker.take_report() is not None
    assert worker.take_report() is None


def test_a_read_that_fails_is_told(worker: PdPullWorker) -> None:
    read(worker, "r1", 1)
    worker.nixl_wrapper.states = {1: "ERR"}
    worker.world_size = 1
    worker._log_failure = lambda **_: None
    worker._pop_done_transfers(worker._recving_transfers)
    report = worker.take_report()
    assert report is not None and not report.expired
    assert [t.failed for t in report.transfers] == [True]
    assert worker._invalid_block_ids.get_nowait() == {1, 2}


def test_a_read_past_its_claim_does_not_count(worker: PdPullWorker) -> None:
    """Other tokens may lie in the blocks by then."""
    step(worker, **{READ_SECONDS: {"late": 0.0, "soon": 60.0}})
    read(worker, "late", 1)
    read(worker, "soon", 2)
    worker.nixl_wrapper.states = {1: "DONE", 2: "DONE"}
    assert popped(worker) == {"late", "soon"}
    report = worker.take_report()
    assert report is not None and report.expired == {"late"}
    if PAIRS:
        assert worker._recv_failures == {"late"}
    else:
        assert worker._failed_recv_reqs.get_nowait() == "late"
    assert worker._failed_recv_reqs.empty()
    assert worker._invalid_block_ids.get_nowait() == {1, 2}


def test_a_declined_read_is_no_failed_transfer(
    worker: PdPullWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = PdPullWorker.__mro__[1]
    monkeypatch.setattr(base, "_is_turn2_read_expired", lambda self, meta: True)
    worker._engine_last_active = {}
    worker._bidirectional_kv_xfer_enabled = True
    remote = SimpleNamespace(engine_id="decode-0", block_ids=([3],), blocks_expiry_time=0.0)
    meta = SimpleNamespace(local_block_ids=([1],), local_physical_block_ids=([1],), remote=remote)
    worker._recving_metadata["r"] = meta
    worker._read_blocks_for_req("r", meta)
    report = worker.take_report()
    assert report is not None and report.expired == {"r"} and report.transfers == []


def test_reports_of_all_ranks_add_up() -> None:
    ended = Transfer("r", 1, 0.1, 0.1, 10, 1)
    both = WorkerReport({"a"}, [ended]).aggregate(WorkerReport({"b"}, [ended]))
    assert both.expired == {"a", "b"} and both.transfers == [ended, ended]


@pytest.mark.parametrize(
    ("engine_id", "name"),
    [
        ("laptop-decode-0-0123456789ab", "laptop-decode-0"),
        ("laptop-decode-0-0123456789ab_dp1", "laptop-decode-0_dp1"),
        ("0123456789ab-decode-0", "decode-0"),
        ("decode-0", "decode-0"),
        ("0123456789ab", "0123456789ab"),
        (None, "unknown"),
    ],
)
def test_peers_are_named_without_what_is_new_at_every_start(engine_id: Any, name: str) -> None:
    assert peer_name(engine_id) == name


def test_blocks_that_the_peer_does_not_have_are_not_read(
    worker: PdPullWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would count on into the next layer's blocks."""
    failed: list[str] = []
    monkeypatch.setattr(worker, "_handle_failed_transfer", lambda req, *_: failed.append(req))
    remote = SimpleNamespace(engine_id="decode-0", block_ids=([1, 8],), blocks_expiry_time=None)
    meta = SimpleNamespace(local_block_ids=([1, 2],), remote=remote)
    worker._read_blocks_for_req("r", meta)
    assert failed == ["r"]
