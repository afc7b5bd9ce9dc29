"""Which way a prompt goes, why, and what each way leaves behind."""

import threading
from typing import Any

import pytest
from router_rig import Answer, Chat, Router, StartRouter, wait_for

from pd_connector.contract import Route
from pd_router.routes import Chooser, Line
from pd_router.settings import parse


def route_of(answer: Answer) -> str:
    return str(answer.headers["x-pd-route"])


def chosen(router: Router, route: str, reason: str) -> float:
    return router.metric("pd_router_routes_total", route=route, reason=reason)


RATES = {"prefill": 1000, "append": 1, "readback": 0.01, "handover": 0.01}
"""Milliseconds per token of engines that are slower than the fake ones."""


def auto_router(start_router: StartRouter, **settings: Any) -> Router:
    return start_router(**{"route": "auto", "rates": RATES, "max_decode_stall_ms": 1e6} | settings)


def test_short_turns_of_a_conversation_are_appended(
    start_router: StartRouter, stream: bool
) -> None:
    router = auto_router(start_router)
    chat = Chat(router, "c", stream)
    assert route_of(chat.say("Hello " * 30)) == "recompute"
    for turn in range(3):
        before = router.decode[0].handles[-1]["remote_request_id"]
        answer = chat.say(f"And {turn}?")
        assert (answer.status, route_of(answer)) == (200, "append")
        if not stream:
            assert answer.outcome == "local_hit"
        sent = router.decode[0].requests[-1]
        # Decode frees the turn before, told by the request and once more by the router.
        assert sent["kv_transfer_params"]["pd_previous"] == before
        router.wait_released({before})
        assert sent.get("stream_options", {}).get("include_usage", False) is stream
        assert b'"usage"' not in answer.raw or not stream
    assert len(router.prefill[0].requests) == 1
    wait_for(lambda: chosen(router, "append", "cheapest") == 3, "the turns are counted")
    assert router.metric("pd_router_turns_total", route="append", outcome="local_hit") == 3
    # What an append leaves can be read back.
    pinned = router.post(chat.body("And now?"), x_pd_route="readback")
    assert (route_of(pinned), pinned.outcome) == ("readback", "hit")
    assert pinned.tokens_read == router.decode[0].handles[-2]["remote_num_tokens"]


def test_the_clients_own_usage_is_passed_on(start_router: StartRouter) -> None:
    router = start_router(route="append")
    chat = Chat(router, "c")
    chat.say("Hello")
    answer = chat.say("Again", stream_options={"include_usage": True})
    assert answer.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_long_turns_are_read_back(start_router: StartRouter) -> None:
    router = auto_router(start_router, append_max_tokens=50)
    chat = Chat(router, "c")
    chat.say("Hello " * 400)
    answer = chat.say("And more " * 30)
    assert (route_of(answer), answer.outcome) == ("readback", "hit")
    assert chosen(router, "readback", "append_too_long") == 1


def test_running_streams_are_not_stalled(start_router: StartRouter) -> None:
    router = auto_router(start_router, max_decode_stall_ms=0)
    chat, other = Chat(router, "c"), Chat(router, "d")
    chat.say("Hello " * 400)
    assert route_of(chat.say("An idle leg appends")) == "append"
    router.decode[0].hold_after = 2
    thread = threading.Thread(target=other.say, args=("A long answer",))
    thread.start()
    wait_for(lambda: router.decode[0].held, "the other stream runs")
    router.decode[0].hold_after = None
    assert route_of(chat.say("A busy one does not")) == "readback"
    router.decode[0].released.set()
    thread.join()
    assert chosen(router, "readback", "append_would_stall") == 1


@pytest.mark.parametrize("route", ["recompute", "readback", "append"])
def test_a_route_can_be_pinned(start_router: StartRouter, route: str) -> None:
    router = start_router(route=route)
    chat = Chat(router, "c", stream=False)
    chat.say("Hello")
    answer = chat.say("Again")
    outcomes = {"recompute": "disabled", "readback": "hit", "append": "local_hit"}
    assert (route_of(answer), answer.outcome) == (route, outcomes[route])
    held = router.metric("pd_router_handles_held")
    assert held == (0 if route == "recompute" else 1)


def test_a_client_may_not_ask_for_what_costs_others(start_router: StartRouter) -> None:
    router = auto_router(start_router, append_max_tokens=0)
    chat = Chat(router, "c")
    chat.say("Hello")
    answer = router.post(chat.body("Again"), x_pd_route="append")
    assert route_of(answer) == "readback"
    for name in router.decode[0].request_headers[-1]:
        assert not name.lower().startswith("x-pd")


def test_decode_goes_on_alone_while_no_prefill_leg_is_up(start_router: StartRouter) -> None:
    router = auto_router(start_router)
    chat = Chat(router, "c")
    chat.say("Hello")
    router.prefill[0].stop()
    wait_for(lambda: router.metric("pd_router_leg_up", leg="prefill-0") == 0, "it is down")
    answer = chat.say("Again")
    assert (answer.status, route_of(answer)) == (200, "append")
    assert chosen(router, "append", "no_prefill_leg") == 1
    assert Chat(router, "d").say("Hello").status == 503
    router.prefill[0].start()


def test_stock_legs_append_without_a_handle(start_router: StartRouter) -> None:
    router = auto_router(start_router, connector="stock")
    for engine in router.engines:
        engine.stock = True
    chat = Chat(router, "c", stream=False)
    chat.say("Hello " * 30)
    for _ in range(3):
        answer = chat.say("And?")
        assert (route_of(answer), answer.outcome) == ("append", "local_hit")
        # A stock decode leg would never free what it keeps of a request without prefill.
        assert "kv_transfer_params" not in router.decode[0].requests[-1]
    # The prefix cache cannot be read back.
    pinned = router.post(chat.body("And now?"), x_pd_route="readback")
    assert (route_of(pinned), pinned.outcome) == ("recompute", "miss")


def test_an_append_that_fails_is_prefilled(start_router: StartRouter, stream: bool) -> None:
    router = auto_router(start_router)
    chat = Chat(router, "c", stream)
    chat.say("Hello")
    router.decode[0].faults.append(500)
    answer = chat.say("Again")
    assert (answer.status, route_of(answer)) == (200, "recompute")
    assert chosen(router, "recompute", "repeated") == 1
    assert route_of(chat.say("More")) in ("append", "readback")


def test_a_decode_leg_without_a_prefix_cache_is_never_appended_to(
    start_router: StartRouter,
) -> None:
    router = auto_router(start_router, prefix_caching=False)
    chat = Chat(router, "c")
    chat.say("Hello")
    assert route_of(chat.say("Again")) == "readback"
    assert chosen(router, "readback", "append_no_prefix_cache") == 1


def chooser(**settings: Any) -> Chooser:
    raw = b'{"name":"r","host":"h","port":1,"prefill":{"p":{"url":"http://p:1"}},'
    raw += b'"decode":{"d":{"url":"http://d:1"}}}'
    made = Chooser(parse(raw, "test"))
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def test_rates_are_learned_from_what_turns_take() -> None:
    line = Line(20, 0.14, None)
    for tokens in (500, 3000, 1000, 2000, 4000, 600):
        line.add(tokens, 100 + 1.5 * tokens)
    assert line.rate == pytest.approx(1.5, rel=0.02)
    assert line.base == pytest.approx(100, rel=0.2)
    assert line.ms(10_000) == pytest.approx(15_100, rel=0.02)


def test_one_turn_is_enough_to_leave_a_guess_that_is_far_off() -> None:
    line = Line(20, 0.14, None)
    line.add(1000, 1500)
    assert line.ms(2000) == pytest.approx(3000, rel=0.3)
    for _ in range(20):
        line.add(1000, 10)
    assert line.ms(1000) < 25


def test_a_rate_of_the_settings_stays() -> None:
    line = Line(20, 0.14, 0.5)
    line.add(1000, 900)
    assert (line.rate, line.ms(1000)) == (0.5, pytest.approx(900))


def test_a_route_is_one_of_the_contracts() -> None:
    assert {route.value for route in Route} == {"recompute", "readback", "append"}
    assert chooser().costs.tokens_in(400) == 101
