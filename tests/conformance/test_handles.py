"""A handle is used once, in time, as it came, for the tokens that it stands for."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.rig import Rig

pytestmark = pytest.mark.usefixtures("needs_readback")


def test_a_repeated_turn(rig: Rig) -> None:
    chat = rig.chat()
    chat.say()
    twin = chat.copy()
    first, second = chat.say(), twin.say()
    assert (first.status, second.status) == (200, 200)
    assert first.text == second.text


def test_two_branches(rig: Rig) -> None:
    chat = rig.chat()
    chat.say()
    branch = chat.copy()
    assert chat.say("To the left.").status == 200
    assert branch.say("To the right.").status == 200


def test_parallel_requests_of_one_conversation(rig: Rig) -> None:
    chat = rig.chat()
    chat.say()
    twins = [chat.copy() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda twin: twin.say(), twins))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("edit", ["first", "last", "answer"])
def test_an_edited_history(rig: Rig, edit: str) -> None:
    chat = rig.chat()
    chat.say()
    chat.say()
    place = {"first": 0, "last": -2, "answer": -1}[edit]
    message = chat.messages[place]
    chat.messages[place] = message | {"content": "Changed: " + message["content"]}
    answer = chat.say()
    plain = rig.chat(messages=chat.messages[:-2]).say()
    assert (answer.status, answer.text) == (200, plain.text)


def test_a_compacted_history(rig: Rig) -> None:
    chat = rig.chat()
    for _ in range(3):
        chat.say()
    chat.messages = [chat.messages[0], *chat.messages[-2:]]
    assert chat.say().status == 200


def test_a_truncated_history(rig: Rig) -> None:
    chat = rig.chat()
    for _ in range(3):
        chat.say()
    del chat.messages[-2:]
    assert chat.say().status == 200


def test_an_expired_handle(rig: Rig) -> None:
    for engine in rig.decode:
        engine.ttl = 0
    chat = rig.chat()
    chat.say()
    before = rig.readbacks
    assert chat.say().status == 200
    assert rig.readbacks == before


def test_a_restarted_decode_leg(rig: Rig) -> None:
    chat = rig.chat()
    chat.say()
    for engine in rig.decode:
        engine.restart()
    assert chat.say().status == 200
    assert chat.say().status == 200


def test_an_answer_that_tokenizes_differently(rig: Rig) -> None:
    """The generated tokens are not those of the answer's text."""
    from tests.fake_engine import Script  # noqa: PLC0415

    chat = rig.chat()
    for engine in rig.decode:
        engine.scripts.append(Script(content="four words of answer", generated="4 words, answered"))
    chat.say()
    assert chat.say().status == 200


def test_reasoning_that_the_template_drops(rig: Rig) -> None:
    from tests.fake_engine import Script  # noqa: PLC0415

    chat = rig.chat()
    for engine in rig.decode:
        engine.scripts.append(Script(content="the answer", reasoning="a long thought " * 8))
    chat.say()
    assert chat.say().status == 200
