"""What is done with a prompt on the prefill leg."""

from typing import Any

import pytest

from pd_connector.contract import Outcome
from pd_connector.readback import (
    Decision,
    blocks_of_tokens,
    decide,
    settled_tokens,
    tokens_held,
)

HANDLE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "decode-0",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 300,
}


def decision(handle: dict[str, Any], **changes: Any) -> Decision:
    situation: dict[str, Any] = {
        "enabled": True,
        "threshold": 64,
        "local_tokens": 0,
        "proven_tokens": lambda: tokens_held(handle),
        **changes,
    }
    return decide(handle, **situation)


def never_asked() -> int:
    raise AssertionError("the tokens are compared for nothing")


def test_a_turn_that_continues_is_read_back() -> None:
    assert decision(HANDLE) == (Outcome.HIT, 300, 300, "")


def test_only_what_the_legs_own_cache_lacks_is_read() -> None:
    assert decision(HANDLE, local_tokens=128) == (Outcome.HIT, 172, 300, "")


@pytest.mark.parametrize(
    ("proven", "local", "outcome", "tokens"),
    [
        (256, 0, Outcome.HIT, 256),
        (256, 128, Outcome.HIT, 128),
        (64, 0, Outcome.HIT, 64),
        (0, 0, Outcome.HISTORY_CHANGED, 0),
        (63, 0, Outcome.HISTORY_CHANGED, 0),
        (128, 128, Outcome.HISTORY_CHANGED, 0),
    ],
)
def test_a_turn_that_was_edited_is_read_up_to_the_edit(
    proven: int, local: int, outcome: Outcome, tokens: int
) -> None:
    made = decision(HANDLE, local_tokens=local, proven_tokens=lambda: proven)
    assert made == (
        outcome,
        tokens,
        proven if tokens else 0,
        f"the prompt is the handle's for {proven} of 300 tokens",
    )


@pytest.mark.parametrize(
    "handle",
    [
        {"do_remote_decode": True},
        {**HANDLE, "remote_block_ids": None},
        {**HANDLE, "remote_block_ids": []},
        {**HANDLE, "remote_block_ids": [[]]},
        {**HANDLE, "remote_block_ids": "123"},
        {**HANDLE, "remote_engine_id": None},
        {**HANDLE, "remote_request_id": None},
        {**HANDLE, "remote_host": None},
        {key: value for key, value in HANDLE.items() if key != "remote_port"},
        {**HANDLE, "remote_num_tokens": None},
        {**HANDLE, "remote_num_tokens": 0},
        {**HANDLE, "remote_num_tokens": -5},
        {**HANDLE, "remote_num_tokens": "boom"},
    ],
)
def test_no_usable_handle_is_a_miss(handle: dict[str, Any]) -> None:
    assert tokens_held(handle) == 0
    assert decision(handle, proven_tokens=never_asked) == Decision(Outcome.MISS)


def test_a_leg_that_does_not_read_back_says_so() -> None:
    for handle in (HANDLE, {"do_remote_decode": True}):
        made = decision(handle, enabled=False, proven_tokens=never_asked)
        assert made == Decision(Outcome.DISABLED)


@pytest.mark.parametrize(
    ("held", "local", "outcome"),
    [
        (63, 0, Outcome.BELOW_THRESHOLD),
        (64, 0, Outcome.HIT),
        (191, 128, Outcome.LOCAL_HIT),
        (192, 128, Outcome.HIT),
        (128, 128, Outcome.LOCAL_HIT),
        (100, 128, Outcome.LOCAL_HIT),
    ],
)
def test_few_tokens_are_not_worth_a_transfer(held: int, local: int, outcome: Outcome) -> None:
    handle = {**HANDLE, "remote_num_tokens": held}
    assert decision(handle, local_tokens=local).outcome is outcome


@pytest.mark.parametrize(("local", "outcome"), [(299, Outcome.HIT), (300, Outcome.LOCAL_HIT)])
def test_without_a_threshold_any_token_is_read(local: int, outcome: Outcome) -> None:
    assert decision(HANDLE, threshold=0, local_tokens=local).outcome is outcome


def test_decode_is_told_when_its_blocks_are_not_wanted() -> None:
    assert decision(HANDLE, proven_tokens=lambda: 0).releases_handle
    assert decision(HANDLE, local_tokens=290).releases_handle
    assert not decision(HANDLE).releases_handle
    assert not decision(HANDLE, enabled=False).releases_handle
    assert not decision({"do_remote_decode": True}).releases_handle


@pytest.mark.parametrize(
    ("case", "computed", "in_flight", "known", "settled"),
    [
        ("stopped at the length limit", 123, 0, 124, 123),
        ("stop token, the next step already runs", 124, 1, 124, 123),
        ("the same, engine that does not count steps in flight", 124, 0, 124, 123),
        ("drafts accepted past a stop token", 127, 0, 124, 123),
        ("drafts of the next step in flight", 130, 4, 124, 123),
        ("a step in flight re-reads the prompt", 100, 60, 124, 40),
        ("preempted with its last token on the way", 0, 0, 124, 0),
        ("preempted, more in flight than counted", 0, 1, 124, 0),
    ],
)
def test_only_settled_tokens_are_handed_out(
    case: str, computed: int, in_flight: int, known: int, settled: int
) -> None:
    assert settled_tokens(computed=computed, in_flight=in_flight, known=known) == settled, case


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (128, 1), (129, 2), (256, 2)])
def test_no_block_past_the_settled_tokens_is_handed_out(tokens: int, blocks: int) -> None:
    assert blocks_of_tokens(([5, 6, 7],), [128], tokens) == ([5, 6, 7][:blocks],)


def test_each_cache_group_has_its_own_block_size() -> None:
    groups = ([1, 2, 3, 4], [5, 6], [9])
    assert blocks_of_tokens(groups, [16, 32, None], 33) == ([1, 2, 3], [5, 6], [9])
