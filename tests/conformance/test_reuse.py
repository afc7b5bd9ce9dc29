"""A conversation's next turn reads back from decode what decode holds of it."""

import pytest

from tests.conformance.rig import Rig


@pytest.mark.parametrize("stream", [False, True])
def test_the_second_turn_is_read_back(rig: Rig, stream: bool) -> None:
    chat = rig.chat(stream=stream)
    chat.say()
    before = rig.readbacks
    answer = chat.say()
    assert answer.status == 200
    assert rig.readbacks == before + 1


def test_every_turn_of_a_long_conversation_is_read_back(rig: Rig) -> None:
    chat = rig.chat()
    for _ in range(6):
        chat.say()
    assert rig.readbacks == 5


def test_handles_of_every_data_parallel_rank_are_read_back(rig: Rig) -> None:
    # An engine takes its ranks in turn, so that two turns running have handles of both.
    for _ in range(4):
        chat = rig.chat()
        for _ in range(3):
            chat.say()
    ranks = {
        str(body["kv_transfer_params"].get("remote_engine_id"))[-4:]
        for engine in rig.prefill
        for body in engine.requests
        if body["kv_transfer_params"].get("remote_block_ids")
    }
    assert ranks == {"_dp0", "_dp1"}
    assert rig.readbacks == 8


def test_conversations_side_by_side_keep_their_own(rig: Rig) -> None:
    chats = [rig.chat() for _ in range(4)]
    for _ in range(3):
        for chat in chats:
            chat.say()
    assert rig.readbacks == 8
