"""The stock connector: vLLM fails a prefill whose readback fails, and the router repeats it."""

import time

import pytest

from pd_connector.contract import READ_MARGIN_SECONDS, Outcome
from pdctl.conversation import user_text
from tests.waiting import until

from .conftest import Conversation, Deployment
from .legs import decode_alone, plain, turn

DECODE_TTL = 20.0


@pytest.fixture(scope="module", autouse=True)
def up(deployment: Deployment) -> None:
    deployment.spec["kv_transfer"] |= {"connector": "stock", "decode_ttl": f"{DECODE_TTL:g}s"}
    deployment.spec["router"]["handle_ttl"] = f"{DECODE_TTL - 0.5:g}s"
    deployment.write()
    deployment.pdctl("up", "SPEC", "--bidir", "on")


def test_reuse_and_a_failed_readback(deployment: Deployment) -> None:
    conversation = Conversation(deployment)
    conversation.say()
    turn = conversation.say()
    finished = time.monotonic()
    assert turn.outcome == Outcome.HIT.value
    assert turn.text == conversation.plain()

    # Old enough for prefill to decline it, young enough for the router to send it.
    late = finished + DECODE_TTL - READ_MARGIN_SECONDS + 1
    until("the handle is nearly expired", lambda: time.monotonic() > late)
    turn = conversation.say()
    assert "Declining expired remote read" in deployment.log("prefill-0")
    assert turn.outcome == Outcome.EXPIRED.value
    assert turn.text == conversation.plain()
    assert conversation.say().outcome == Outcome.HIT.value


@pytest.mark.e2e_connector
def test_an_edited_history_is_answered_wrong_and_stays_so(deployment: Deployment) -> None:
    """What the pdctl connector is for: test_2_connector has the same turns right."""
    history = user_text("stock edited", 500)
    answer, _, handle = turn(deployment, history)
    prompt = "Z" + history[1:] + answer + " and then?"
    text, _, _ = turn(deployment, prompt, handle)
    expected = plain(deployment, prompt)
    assert text != expected
    # Decode's prefix cache gives it to whoever asks with that prefix.
    assert decode_alone(deployment, prompt) != expected
