"""Whatever fails on the reuse path, the turn is answered."""

import pytest

from tests.conformance.rig import Rig


@pytest.mark.usefixtures("needs_readback")
def test_a_failed_readback_is_recomputed(rig: Rig) -> None:
    chat = rig.chat()
    chat.say()
    for engine in rig.prefill:
        engine.reads_fail = True
    answer = chat.say()
    plain = rig.chat(messages=chat.messages[:-2]).say()
    assert (answer.status, answer.text) == (200, plain.text)


def test_a_dead_prefill_leg_is_passed_over(rig: Rig) -> None:
    port = rig.prefill[0].port
    rig.prefill[0].stop()
    try:
        for _ in range(4):
            assert rig.chat().say().status == 200
    finally:
        rig.prefill[0].start(port)


def test_a_dead_decode_leg_is_passed_over(rig: Rig) -> None:
    chat = rig.chat()
    chat.say()
    port = rig.decode[0].port
    rig.decode[0].stop()
    try:
        for _ in range(4):
            assert chat.say().status == 200
    finally:
        rig.decode[0].start(port)
