"""Prefill computes, decode reads prefill's blocks, the client gets decode's answer."""

import pytest

from tests.conformance.rig import Rig


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_moves_its_blocks_from_prefill_to_decode(rig: Rig, stream: bool) -> None:
    before = rig.handovers
    answer = rig.chat(stream=stream).say()
    assert answer.status == 200
    assert answer.text.startswith("answer-")
    assert rig.handovers == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_completions(rig: Rig, stream: bool) -> None:
    body = {"model": "fake", "prompt": "Once upon a time " * 20, "stream": stream}
    before = rig.handovers
    answer = rig.post(body, "/v1/completions")
    assert answer.status == 200
    assert answer.text.startswith("answer-")
    assert rig.handovers == before + 1


def test_prefill_makes_one_token_and_no_stream(rig: Rig) -> None:
    rig.chat(stream=True).say(max_completion_tokens=50)
    (asked,) = [body for engine in rig.prefill for body in engine.requests]
    assert asked["max_tokens"] == 1
    assert not asked.get("stream")
    assert asked.get("max_completion_tokens", 1) == 1
    assert asked["kv_transfer_params"]["do_remote_decode"] is True


def test_several_choices_do_not_share_a_handle(rig: Rig) -> None:
    assert rig.chat(stream=False).say(n=2).status == 200


def test_the_same_question_gets_the_same_answer_from_any_pair(rig: Rig) -> None:
    chat = rig.chat()
    answers = {chat.copy().say().text for _ in range(6)}
    assert len(answers) == 1
