"""A vLLM that lacks what the connector builds on is refused with what is missing."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.seams import (
    UnknownVllmError,
    UnsupportedVllmError,
    handle_keys,
    missing_attributes,
    missing_in,
    refuse_unknown,
)


class Scheduler:
    """The seams as vLLM 0.26 to 0.32 have them."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        return "_remote_blocks_processed"

    def update_connector_output(self, connector_output: Any) -> Any: ...

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return True, dict(do_remote_prefill=True, remote_moon=1, tp_size=1, plain=1)

    def on_new_request(self, request: Any) -> None: ...

    def _get_remote_prefill_token_count(self, num_prompt_tokens: int) -> int: ...

    @staticmethod
    def _nixl_handshake_listener(
        encoded_data: Any, ready_event: Any, stop_event: Any, host: str, port: int
    ) -> None: ...


class Worker:
    def _read_blocks_for_req(self, req_id: str, meta: Any) -> Any: ...

    def _is_turn2_read_expired(self, meta: Any) -> Any: ...

    def _handle_failed_transfer(self, req_id: str, handle: Any) -> Any: ...

    def _pop_done_transfers(self, transfers: Any) -> Any: ...

    def start_load_kv(self, metadata: Any) -> Any: ...

    def get_finished(self) -> Any: ...


class Connector:
    def build_connector_worker_meta(self) -> Any: ...


def test_nothing_is_missing_where_all_is_there() -> None:
    assert missing_in(Scheduler, Worker, Connector) == []


@pytest.mark.parametrize("name", ["get_num_new_matched_tokens", "request_finished"])
def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(Scheduler, name)
    assert missing_in(Scheduler, Worker, Connector) == [f"Scheduler.{name}"]


def test_a_missing_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_is_turn2_read_expired", lambda self, request: False)
    assert missing_in(Scheduler, Worker, Connector) == ["Worker._is_turn2_read_expired(meta)"]


def test_another_way_to_stop_the_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def update_state_after_alloc(
        self: Any, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    monkeypatch.setattr(Scheduler, "update_state_after_alloc", update_state_after_alloc)
    (missing,) = missing_in(Scheduler, Worker, Connector)
    assert "_remote_blocks_processed" in missing


def test_missing_attributes_are_named() -> None:
    scheduler = SimpleNamespace(
        is_bidirectional_kv_xfer_enabled=True,
        use_host_buffer=False,
        decoder_kv_blocks_ttl=480,
        _reqs_in_batch=set(),
        block_size=128,
    )
    assert missing_attributes(scheduler) == ["SimpleNamespace.kv_recompute_threshold"]


def test_the_refusal_says_what_to_do() -> None:
    text = str(UnsupportedVllmError(["Scheduler.request_finished"]))
    assert "missing Scheduler.request_finished" in text
    assert "kv_transfer.connector: stock" in text


def test_the_fields_of_a_vllms_handles_are_found() -> None:
    assert {"do_remote_prefill", "remote_moon", "tp_size"} <= handle_keys(Scheduler)
    assert handle_keys(object) == frozenset()


@pytest.mark.parametrize("version", ["0.26.0", "0.28.1", "0.29.0+cu130", "0.29.1.dev3", "0.32.0"])
def test_a_known_vllm_is_taken(version: str) -> None:
    refuse_unknown({}, version)


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0", "dev"])
def test_an_unknown_vllm_is_refused_unless_it_is_allowed(version: str) -> None:
    with pytest.raises(UnknownVllmError) as error:
        refuse_unknown({}, version)
    assert f"0.26 to 0.32, and this is {version}: PD_UNKNOWN_VLLM=allow" in str(error.value)
    refuse_unknown({"PD_UNKNOWN_VLLM": "allow"}, version)
