"""What came past the API server's check ends neither the engine nor in a read."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.admit import Gate
from pd_connector.contract import DO_REMOTE_DECODE, DO_REMOTE_PREFILL, PD_SIGNATURE
from pd_connector.counters import Pending
from pd_connector.seams import BLOCKS_PROCESSED
from pd_connector.telemetry import ENGINE_REFUSED

SECRET = b"s" * 64
HANDLE: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "decode-0",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 200,
}


def gate(secret: bytes | None = SECRET) -> tuple[Gate, Pending]:
    pending = Pending()
    return Gate(secret, frozenset(), 480, pending), pending


def request(params: Any) -> Any:
    return SimpleNamespace(request_id="r", kv_transfer_params=params)


def signed(**changes: Any) -> dict[str, Any]:
    handle = dict(HANDLE)
    gate()[0].sign(handle)
    return handle | changes


@pytest.mark.parametrize("params", [None, {}, {DO_REMOTE_DECODE: True}, signed()])
def test_what_is_well_formed_and_signed_is_taken_unchanged(params: Any) -> None:
    arriving = request(params)
    keeper, pending = gate()
    assert keeper.admit(arriving) == ""
    assert arriving.kv_transfer_params is params
    assert not pending


@pytest.mark.parametrize("params", ["boom", [1], {"foo": 1}, {DO_REMOTE_PREFILL: True}])
def test_what_would_end_the_engine_is_dropped_and_counted(params: Any) -> None:
    arriving = request(params)
    keeper, pending = gate()
    assert keeper.admit(arriving) == "malformed"
    assert arriving.kv_transfer_params is None
    assert pending.take() == [(ENGINE_REFUSED.name, ("malformed",), 1)]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (HANDLE, "unsigned"),
        (signed(remote_block_ids=[[7, 8]]), "altered"),
        (signed(remote_port=5601), "altered"),
        ({**HANDLE, PD_SIGNATURE: "1.00000000.AAAA"}, "foreign"),
    ],
)
def test_a_handle_that_is_not_ours_is_forgotten_whole(params: Any, reason: str) -> None:
    arriving = request(dict(params))
    keeper, pending = gate()
    assert keeper.admit(arriving) == reason
    # Nothing is left that could be read, or whose owner could be told anything.
    assert arriving.kv_transfer_params == {
        DO_REMOTE_PREFILL: False,
        DO_REMOTE_DECODE: True,
        BLOCKS_PROCESSED: True,
    }
    assert pending.take() == [(ENGINE_REFUSED.name, (reason,), 1)]


def test_without_a_secret_handles_are_neither_signed_nor_checked() -> None:
    keeper, pending = gate(None)
    handle = dict(HANDLE)
    keeper.sign(handle)
    assert handle == HANDLE
    assert keeper.admit(request(handle)) == ""
    assert not keeper.signs
    assert not pending


def test_a_handle_is_used_once() -> None:
    keeper, _ = gate(None)
    assert not keeper.was_used(HANDLE)
    keeper.use(HANDLE)
    assert keeper.was_used(dict(HANDLE))
