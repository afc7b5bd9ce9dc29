"""Several continuations of one history: each handle is used once, by one turn."""

import threading
from typing import Any

from router_rig import Answer, Chat, Router, StartRouter

from fake_engine import FakeEngine


def copy_of(chat: Chat) -> Chat:
    return Chat(chat.router, chat.id, chat.stream, messages=list(chat.messages))


def test_branches_of_a_conversation_have_their_own_handles(
    router: Router, conversation: str
) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    other = copy_of(chat)
    assert chat.say("One").outcome == "hit"
    assert other.say("Two").outcome in ("miss", "history_changed")
    for branch in (chat, other, chat, other):
        assert branch.say("And on").outcome == "hit"


def test_a_retry_never_gets_a_used_handle(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    retry = copy_of(chat)
    assert chat.say("Again").outcome == "hit"
    assert retry.say("Again").outcome != "hit" or retry_was_partial(router)
    assert retry.say("More").outcome == "hit"


def retry_was_partial(router: Router) -> bool:
    """It read what the turn that it repeats has left, up to where it ends."""
    sent = [body["kv_transfer_params"] for body in router.prefill[0].requests[-2:]]
    return bool(sent[0]["remote_request_id"] != sent[1]["remote_request_id"])


def test_more_branches_than_are_kept_are_given_back(start_router: StartRouter) -> None:
    router = start_router(max_branches=2)
    chats = [Chat(router, "c") for _ in range(3)]
    for number, chat in enumerate(chats):
        chat.say(f"Branch {number}")
    assert router.metric("pd_router_handles_dropped_total", reason="replaced") == 1
    assert router.metric("pd_router_handles_held", leg="decode-0") == 2
    first = router.decode[0].handles[0]["remote_request_id"]
    router.wait_released({first})
    assert [chat.say("On").outcome for chat in reversed(chats[1:])] == ["hit", "hit"]


def test_concurrent_turns_of_many_branches_use_every_handle_once(
    start_router: StartRouter,
) -> None:
    router = start_router(max_branches=8, decodes=2, prefills=2)
    chat = Chat(router, "c")
    chat.say("Hello")
    answers: list[Answer] = []

    def branch(number: int) -> None:
        mine = copy_of(chat)
        answers.extend(mine.say(f"{number} {turn}") for turn in range(6))

    threads = [threading.Thread(target=branch, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 36
    sent = handles_sent(router.prefill)
    assert len(sent) == len(set(sent)) >= 25


def handles_sent(engines: list[FakeEngine]) -> list[Any]:
    bodies = [body["kv_transfer_params"] for engine in engines for body in engine.requests]
    return [params["remote_request_id"] for params in bodies if params.get("remote_block_ids")]


def test_a_tenants_header_tells_tenants_apart(start_router: StartRouter) -> None:
    router = start_router(tenant_header="X-Tenant")
    chat = Chat(router, "c", stream=False)

    def say(text: str, **headers: str) -> Answer:
        answer = router.post(body := chat.body(text), **headers)
        chat.messages = [*body["messages"], answer.message]
        return answer

    assert say("Hello", x_tenant="one", authorization="Bearer a").outcome == "miss"
    assert say("Again", x_tenant="one", authorization="Bearer b").outcome == "hit"
    assert say("More", x_tenant="two", authorization="Bearer b").outcome == "miss"
    assert say("And", authorization="Bearer b").outcome == "miss"


def test_bytes_are_bounded_too(start_router: StartRouter) -> None:
    router = start_router(max_handle_bytes=6000)
    for number in range(10):
        Chat(router, f"c{number}").say("Hello")
    assert router.metric("pd_router_handles_bytes") <= 6000
    assert router.metric("pd_router_handles_dropped_total", reason="evicted") >= 4
