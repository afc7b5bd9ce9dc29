"""The main job on the real engine: reuse that is proven, right answers, clean lifecycle.

The files of this folder run in order and share one deployment, since a start takes a minute.
"""

import json

import pytest

from pd_connector.contract import Outcome

from .conftest import ANSWER_TOKENS, Conversation, Deployment


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def test_up_again_changes_nothing(deployment: Deployment) -> None:
    before = {name: leg["pid"] for name, leg in deployment.status().items()}
    again = deployment.pdctl("up", "SPEC")
    assert "prefill-0: runs, unchanged" in again.stderr
    assert {name: leg["pid"] for name, leg in deployment.status().items()} == before
    assert set(before) == {"prefill-0", "decode-0", "router-0"}


def test_verify_proves_the_readback(deployment: Deployment) -> None:
    result = json.loads(deployment.pdctl("verify", "SPEC", "--json").stdout)
    assert result["ok"], result
    assert [step["name"] for step in result["steps"]][-1].startswith("turn 2's answer equals")


def test_a_conversation_reads_back_what_decode_holds(deployment: Deployment) -> None:
    conversation = Conversation(deployment)
    held = 0
    for number in range(1, 5):
        before = deployment.counters()
        turn = conversation.say()
        counted = deployment.counted_since(before, turn.prompt_tokens or 1)
        assert turn.text == conversation.plain()
        assert turn.finish_reason == "length"
        if number == 1:
            assert turn.outcome == Outcome.MISS.value
            assert counted.external_tokens == 0
        else:
            assert turn.outcome == Outcome.HIT.value
            assert counted.external_tokens == turn.tokens_read
            assert counted.external_tokens >= 0.9 * held
            assert counted.nixl_bytes > 0
        # Decode holds all but the answer's last token, which it never ran.
        held = (turn.prompt_tokens or 0) + ANSWER_TOKENS - 1


def test_an_edited_history_is_recomputed(deployment: Deployment) -> None:
    conversation = Conversation(deployment)
    conversation.say()
    conversation.messages[0]["content"] = "Z" + conversation.messages[0]["content"][1:]
    turn = conversation.say()
    assert turn.outcome == Outcome.HISTORY_CHANGED.value
    assert turn.text == conversation.plain()
    assert conversation.say().outcome == Outcome.HIT.value
