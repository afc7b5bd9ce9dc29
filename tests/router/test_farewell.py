"""A router that ends with handles that nobody can use any more gives them back to decode."""

import json
import signal
import threading
from typing import Any

import httpx
import pytest
from router_rig import Chat, Router, StartRouter, both, wait_for

from fake_engine import FakeEngine


def turns(engine: FakeEngine) -> set[str]:
    """Ids of the turns that a decode leg was asked to keep."""
    return {params["remote_request_id"] for params in engine.handles}


def pinned(engine: FakeEngine) -> set[str]:
    """Turns whose blocks a decode leg still keeps."""
    return {turn for turn, blocks in engine.blocks.items() if not (blocks.released or blocks.reads)}


def ended(router: Router) -> str:
    """The line of the log about it, after the router's graceful end; empty if there is none."""
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(60) == 0
    lines = [line for line in router.log.splitlines() if "kept turns" in line]
    assert len(lines) <= 1
    return lines[0].partition("INFO ")[2] if lines else ""


def test_held_handles_are_released(start_router: StartRouter) -> None:
    router = start_router(decodes=2)
    for number in range(6):
        chat = Chat(router, f"c{number}")
        chat.say("Hello")
        chat.say("Again")
    first, second = map(pinned, router.decode)
    assert (len(first | second), bool(first), bool(second)) == (6, True, True)
    assert ended(router) == "kept turns on decode: 6 released, 0 could not be"
    assert [pinned(engine) for engine in router.decode] == [set(), set()]


def test_a_router_that_holds_nothing_says_nothing(start_router: StartRouter) -> None:
    router = start_router()
    assert ended(router) == ""
    assert router.decode[0].lease_posts == 0


@both
def test_the_handle_of_a_stream_that_ends_in_the_drain_is_released(
    start_router: StartRouter,
) -> None:
    router = start_router()
    router.decode[0].hold_after = 3
    body = Chat(router, "c").body("Hello")
    statuses: list[int] = []

    def ask() -> None:
        answer = httpx.post(router.url + "/v1/chat/completions", json=body, timeout=60)
        statuses.append(answer.status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: router.decode[0].held, "the stream is under way")
    router.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "draining" in router.log, "the drain begins")
    router.decode[0].released.set()
    thread.join()
    assert router.process.wait(60) == 0
    assert statuses == [200]
    assert turns(router.decode[0])
    assert pinned(router.decode[0]) == set()
    assert "kept turns on decode: 1 released, 0 could not be" in router.log


def test_the_handle_of_a_turn_that_is_cut_off_is_released(start_router: StartRouter) -> None:
    router = start_router(drain_timeout=0.3)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.prefill[0].faults.append("hang")
    answers: list[Any] = []

    def ask() -> None:
        answers.append(router.post(chat.body("Again")))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: len(router.prefill[0].requests) == 2, "prefill is asked")
    router.process.send_signal(signal.SIGTERM)
    thread.join()
    assert router.process.wait(60) == 0
    assert answers[0].status == 503
    assert pinned(router.decode[0]) == set()


def with_four_turns(start_router: StartRouter) -> Router:
    router = start_router(decodes=2)
    for number in range(4):
        Chat(router, f"c{number}").say("Hello")
    return router


def test_what_a_leg_does_not_take_is_counted(start_router: StartRouter) -> None:
    router = with_four_turns(start_router)
    refusing, other = router.decode
    kept = len(pinned(refusing))
    refusing.lease_faults = 1
    assert ended(router) == f"kept turns on decode: {4 - kept} released, {kept} could not be"
    assert (len(pinned(refusing)), pinned(other)) == (kept, set())


def test_a_leg_that_does_not_answer_does_not_hold_up_the_end(start_router: StartRouter) -> None:
    router = with_four_turns(start_router)
    silent, other = router.decode
    kept = len(pinned(silent))
    assert 0 < kept < 4
    silent.lease_silence = True
    assert ended(router) == f"kept turns on decode: {4 - kept} released, {kept} could not be"
    assert pinned(other) == set()


@pytest.mark.parametrize("gone", [False, True], ids=["stock", "gone"])
def test_legs_that_release_nothing_are_no_obstacle(start_router: StartRouter, gone: bool) -> None:
    router = start_router()
    Chat(router, "c").say("Hello")
    router.decode[0].leases = False
    if gone:
        router.decode[0].stop()
    ended(router)
    assert router.decode[0].released_turns == []


def test_no_more_than_a_leg_takes_is_sent_at_once(start_router: StartRouter) -> None:
    router = start_router()
    many = 1001
    body = {"model": "fake", "max_tokens": 1}
    with httpx.Client(timeout=60) as client:
        for number in range(many):
            body["messages"] = [{"role": "user", "content": "x"}]  # type: ignore[assignment]
            headers = {"X-Session-ID": f"c{number}"}
            answer = client.post(
                router.url + "/v1/chat/completions", content=json.dumps(body), headers=headers
            )
            assert answer.status_code == 200
    assert ended(router) == f"kept turns on decode: {many} released, 0 could not be"
    assert router.decode[0].lease_posts == 2
    assert pinned(router.decode[0]) == set()
