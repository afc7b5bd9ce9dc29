"""Handles of conversations that pause are renewed on decode, up to an age."""

from typing import Any

from router_rig import Chat, Router, StartRouter, wait_for


def paused(start_router: StartRouter, **settings: Any) -> tuple[Router, Chat, str]:
    """A conversation after its first turn, and decode's id of that turn."""
    times = {"ttl": 1, "handle_ttl": 0.5, "decode_ttl": 1, "handle_max_age": 60}
    router = start_router(**times | settings)
    router.prefill[0].margin = 0.1
    chat = Chat(router, "c")
    chat.say("Hello")
    return router, chat, router.decode[0].handles[-1]["remote_request_id"]


def times_renewed(router: Router, turn: str) -> int:
    return router.decode[0].renewals.count(turn)


def test_a_conversation_that_pauses_beyond_the_ttl_is_read_back(start_router: StartRouter) -> None:
    router, chat, turn = paused(start_router)
    wait_for(lambda: times_renewed(router, turn) >= 6, "three lives of 0.5 s")
    assert chat.say("Again").outcome == "hit"


def test_without_an_age_nothing_is_renewed(start_router: StartRouter) -> None:
    router, chat, _ = paused(start_router, handle_max_age=None)
    wait_for(lambda: router.metric("pd_router_handles_held") == 0, "the handle expires")
    assert chat.say("Again").outcome == "expired"
    assert router.decode[0].renewals == []


def test_renewing_ends_at_the_age(start_router: StartRouter) -> None:
    router, chat, turn = paused(start_router, handle_max_age=1.2)
    wait_for(lambda: router.metric("pd_router_handles_held") == 0, "the handle expires")
    assert times_renewed(router, turn) >= 2
    before = router.decode[0].lease_posts
    other = Chat(router, "d")
    other.say("Another")
    wait_for(lambda: router.decode[0].lease_posts > before, "the other conversation is renewed")
    renewed = times_renewed(router, turn)
    wait_for(lambda: router.decode[0].lease_posts > before + 1, "it is renewed again")
    assert times_renewed(router, turn) == renewed
    assert chat.say("Again").outcome == "expired"


def test_a_turn_that_was_read_or_released_is_not_renewed_again(start_router: StartRouter) -> None:
    router, chat, first = paused(start_router)
    assert chat.say("Again").outcome == "hit"
    (second,) = [h["remote_request_id"] for h in router.decode[0].handles[1:]]
    wait_for(lambda: times_renewed(router, second) >= 3, "the second turn is renewed")
    ended = times_renewed(router, first)
    ids = router.get("/admin/conversations").json()["conversations"]
    router.http.delete(f"{router.url}/admin/conversations/{ids[0]['id']}").raise_for_status()
    router.wait_released({second})
    released, posts = times_renewed(router, second), router.decode[0].lease_posts
    Chat(router, "d").say("Another")
    wait_for(lambda: router.decode[0].lease_posts >= posts + 4, "another is renewed")
    assert times_renewed(router, first) == ended <= 1
    assert times_renewed(router, second) <= released + 1


def test_decode_that_does_not_answer_is_asked_again(start_router: StartRouter) -> None:
    router, chat, turn = paused(start_router, ttl=30, handle_ttl=4, decode_ttl=30)
    router.decode[0].lease_faults = 2
    wait_for(lambda: times_renewed(router, turn) >= 1, "it is renewed at last")
    assert router.decode[0].lease_faults == 0
    assert chat.say("Again").outcome == "hit"


def test_engines_without_leases_keep_to_the_ttl(start_router: StartRouter) -> None:
    router, _, _ = paused(start_router)
    router.decode[0].leases = False
    posts = router.decode[0].lease_posts
    wait_for(lambda: router.decode[0].lease_posts > posts, "it refuses")
    refused = router.decode[0].lease_posts
    # The first handle is held, as it was promised, but its blocks are gone.
    wait_for(lambda: left(router)["left_s"] > 1, "its answer is there")
    Chat(router, "d").say("Another")
    assert left(router)["left_s"] <= 0.5
    assert router.decode[0].lease_posts == refused


def left(router: Router) -> dict[str, Any]:
    """The newest held handle."""
    newest: dict[str, Any] = router.get("/admin/conversations").json()["conversations"][0]
    return newest
