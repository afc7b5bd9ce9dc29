"""Restarts, broken pairs, and what decode keeps for nobody."""

import pytest
from router_rig import Chat, Router, StartRouter, wait_for


def test_a_restart_behind_the_same_port_is_noticed(start_router: StartRouter) -> None:
    router = start_router()
    chat, other = Chat(router, "c"), Chat(router, "d")
    for each in (chat, other):
        each.say("Hello")
    decode = router.decode[0]
    decode.restart()
    # A new handle of the leg names another engine: the old ones are worth nothing.
    chat.say("Again")
    wait_for(
        lambda: router.metric("pd_router_handles_dropped_total", reason="leg_restarted") >= 1,
        "the other conversation's handle is dropped",
    )
    assert router.metric("pd_router_leg_restarts_total", leg="decode-0") == 1
    sent = router.metric("pd_router_handles_sent_total")
    assert other.say("Again").outcome == "miss"
    assert router.metric("pd_router_handles_sent_total") == sent


def test_a_restart_is_noticed_without_a_turn(start_router: StartRouter) -> None:
    router = start_router()
    Chat(router, "c").say("Hello")
    wait_for(lambda: router.decode[0].looked_at, "the leg's start is known")
    router.decode[0].restart()
    wait_for(lambda: router.metric("pd_router_handles_held") == 0, "its handle is dropped")
    assert router.metric("pd_router_leg_restarts_total", leg="decode-0") == 1


def test_a_leg_that_calls_itself_unhealthy_gets_no_turns(start_router: StartRouter) -> None:
    router = start_router(decodes=2)
    Chat(router, "c").say("Hello")
    ill = next(engine for engine in router.decode if engine.requests)
    name = f"decode-{router.decode.index(ill)}"
    ill.healthy = False
    wait_for(lambda: router.metric("pd_router_leg_up", leg=name) == 0, "it is down")
    assert router.metric("pd_router_handles_held") == 0
    answers = [Chat(router, f"d{number}").say("Hello") for number in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert len(ill.requests) == 1
    ill.healthy = True
    wait_for(lambda: router.metric("pd_router_leg_up", leg=name) == 1, "it is back")


def test_a_pair_whose_transfers_fail_gets_no_handles(start_router: StartRouter) -> None:
    router = start_router(pair_pause=300)
    chats = [Chat(router, f"c{number}") for number in range(4)]
    for chat in chats:
        chat.say("Hello")
    for chat in chats[:3]:
        router.prefill[0].faults.append(500)
        assert chat.say("Again").outcome == "failed"
    pair = {"prefill_leg": "prefill-0", "decode_leg": "decode-0"}
    assert router.metric("pd_router_pair_up", **pair) == 0
    assert router.get("/health").status_code == 200
    sent = router.metric("pd_router_handles_sent_total")
    assert chats[3].say("Again").outcome == "miss"
    assert router.metric("pd_router_handles_sent_total") == sent
    assert router.metric("pd_router_handles_refused_total", reason="pair_down") == 1
    assert router.metric("pd_router_handles_held") == 4 + 1


def test_a_pair_is_told_as_down_until_a_transfer_works(start_router: StartRouter) -> None:
    """It is tried again after its pause; an alert must not be reset by each try."""
    router = start_router(pair_pause=0.001)
    pair = {"prefill_leg": "prefill-0", "decode_leg": "decode-0"}
    chat = Chat(router, "c")
    chat.say("Hello")
    for _ in range(3):
        router.prefill[0].faults.append(500)
        assert chat.say("Again").outcome == "failed"
    assert router.metric("pd_router_pair_up", **pair) == 0
    assert chat.say("Again").outcome == "hit"
    assert router.metric("pd_router_pair_up", **pair) == 1


def test_another_pair_reads_instead(start_router: StartRouter) -> None:
    router = start_router(prefills=2, pair_pause=300)
    chats = [Chat(router, f"c{number}") for number in range(8)]
    for chat in chats:
        chat.say("Hello")
    bad = router.prefill[1]
    bad.reads_fail = True
    outcomes = [chat.say("Again").outcome for chat in chats]
    assert outcomes.count("failed") == 3
    assert outcomes.count("hit") == 5
    pair = {"prefill_leg": "prefill-1", "decode_leg": "decode-0"}
    assert router.metric("pd_router_pair_up", **pair) == 0


def test_a_pair_is_tried_again(start_router: StartRouter) -> None:
    router = start_router(pair_pause=0.05)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.prefill[0].reads_fail = True
    for _ in range(5):
        chat.say("Again")
    router.prefill[0].reads_fail = False
    wait_for(lambda: chat.say("Again").outcome == "hit", "the pair works again")
    pair = {"prefill_leg": "prefill-0", "decode_leg": "decode-0"}
    assert router.metric("pd_router_pair_up", **pair) == 1


def test_a_prefill_leg_that_is_not_bidirectional_gets_no_handle(
    start_router: StartRouter,
) -> None:
    router = start_router(leg_bidirectional=False)
    chat = Chat(router, "c")
    chat.say("Hello")
    assert chat.say("Again").outcome == "miss"
    assert router.metric("pd_router_handles_refused_total", reason="not_bidirectional") == 1
    assert router.metric("pd_router_handles_sent_total") == 0


@pytest.mark.parametrize("fault", [500, "hang"])
def test_a_handle_that_was_not_read_is_released(
    router: Router, conversation: str, fault: object
) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    handle = router.decode[0].handles[-1]
    router.prefill[0].faults.append(fault)
    assert chat.say("Again").outcome == "failed"
    router.wait_released({handle["remote_request_id"]})


def test_a_handle_that_was_read_is_not_released(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    for text in ("Hello", "Again", "More"):
        chat.say(text)
    read = {handle["remote_request_id"] for handle in router.decode[0].handles[:2]}
    router.prefill[0].faults.append(500)
    chat.say("Last")
    router.wait_released({router.decode[0].handles[2]["remote_request_id"]})
    assert read.isdisjoint(router.decode[0].released_turns)


def test_engines_without_leases_are_left_alone(start_router: StartRouter) -> None:
    router = start_router(max_branches=1)
    router.decode[0].leases = False
    for number in range(5):
        assert Chat(router, "c").say(f"Branch {number}").status == 200
        if number:
            wait_for(lambda: router.decode[0].lease_posts, "the router has asked once")
    assert router.decode[0].lease_posts == 1


def test_a_failing_decode_leg_is_not_hammered(start_router: StartRouter) -> None:
    router = start_router()
    router.decode[0].faults.extend([500] * 100)
    statuses = [Chat(router, f"c{number}").say("Hello").status for number in range(30)]
    assert set(statuses) == {502}
    # One repeat each while the budget lasts, then a tenth.
    assert len(router.decode[0].requests) <= 30 + 10 + 4


def test_a_deadline_that_came_late_counts(start_router: StartRouter) -> None:
    router = start_router(handle_ttl=440)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.decode[0].ttl = 30
    chat.say("Again")
    # Its engine keeps the new turn for 30 s of the 480 s that the settings say.
    assert chat.say("More").outcome == "expired"


@pytest.mark.parametrize("gap", [True, False], ids=["seen down", "unseen"])
def test_a_restart_is_told_once_and_costs_no_later_handle(
    start_router: StartRouter, gap: bool
) -> None:
    router = start_router()
    chat, engine = Chat(router, "c"), router.decode[0]
    chat.say("Hello")
    wait_for(lambda: engine.looked_at, "its start is known")
    if gap:
        engine.stop()
        wait_for(lambda: router.get("/health").status_code == 503, "it is down")
        engine.start()
        wait_for(lambda: router.get("/health").status_code == 200, "it is back")
    else:
        engine.restart()
    chat.say("Again")
    looked = engine.looked_at
    wait_for(lambda: engine.looked_at > looked, "its start is looked at again")
    # What that look finds is done with when the next answer of the router has come.
    router.get("/health")
    assert chat.say("More").outcome == "hit"
    assert router.metric("pd_router_leg_restarts_total", leg="decode-0") == 1
