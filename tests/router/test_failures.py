"""What a client gets, and what becomes of its handle, when engines fail."""

import json
import socket
import threading

import httpx
import pytest
from router_rig import Answer, Chat, Router, StartRouter, both, wait_for

from fake_engine import ECHO_400


def test_a_prefill_that_fails_with_a_handle_is_repeated_without(
    router: Router, conversation: str
) -> None:
    chat = Chat(router, conversation)
    retries = router.metric("pd_router_prefill_retries_total")
    for number, fault in enumerate([500, 503, "drop", 400]):
        chat.say("Hello")
        router.prefill[0].faults.append(fault)
        answer = chat.say("Again")
        assert (answer.status, answer.outcome) == (200, "failed"), fault
        assert router.metric("pd_router_prefill_retries_total") == retries + number + 1
        first, second = router.prefill[0].requests[-2:]
        assert first["kv_transfer_params"]["remote_block_ids"]
        assert second["kv_transfer_params"]["remote_block_ids"] is None
    assert chat.say("More").outcome == "hit"


def test_what_a_client_gets_wrong_costs_no_handle_and_no_pair(start_router: StartRouter) -> None:
    router = start_router()
    chats = [Chat(router, f"c{number}") for number in range(4)]
    for chat in chats:
        chat.say("Hello")
    for status, chat in zip((400, 422, 400, 422), chats, strict=True):
        # With the handle and without it.
        router.prefill[0].faults.extend([status, status])
        assert chat.say("Again", temperature="hot").status == status
    assert router.metric("pd_router_pair_up", prefill_leg="prefill-0", decode_leg="decode-0") == 1
    assert [chat.say("Again").outcome for chat in chats] == ["hit"] * 4
    assert router.decode[0].released_turns == []


def test_a_readback_that_hangs_is_given_up(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    router.prefill[0].faults.append("hang")
    answer = chat.say("Again")
    assert (answer.status, answer.outcome) == (200, "failed")
    assert float(answer.headers["x-pd-prefill-ms"]) >= 1000
    wait_for(lambda: router.prefill[0].aborted == 1, "the hanging prefill is aborted")


def test_a_prefill_that_fails_twice_is_a_clean_502(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    chat.say("Hello")
    router.prefill[0].faults.extend([500, 500])
    answer = chat.say("Again")
    assert answer.status == 502
    assert answer.json["error"]["code"] == 502
    assert "prefill-0" in answer.json["error"]["message"]
    assert len(router.prefill[0].requests) == 3
    assert chat.say("More").outcome == "miss"


def test_a_prefill_without_a_handle_that_hangs_is_a_504(start_router: StartRouter) -> None:
    router = start_router(prefill_timeout=0.5)
    router.prefill[0].faults.append("hang")
    answer = Chat(router, "c").say("Hello")
    assert (answer.status, answer.json["error"]["type"]) == (504, "timeout")
    assert "prefill-0" in answer.json["error"]["message"]


def test_a_decode_error_is_repeated_from_prefill_on(
    router: Router, conversation: str, stream: bool
) -> None:
    chat = Chat(router, conversation, stream)
    chat.say("Hello")
    router.decode[0].faults.append(500)
    assert chat.say("Again").status == 200
    first, second = router.prefill[0].requests[-2:]
    assert first["kv_transfer_params"]["remote_block_ids"]
    assert second["kv_transfer_params"]["remote_block_ids"] is None
    assert chat.say("More").outcome == "hit"


def test_decode_errors_are_a_clean_502(router: Router, conversation: str, stream: bool) -> None:
    chat = Chat(router, conversation, stream)
    router.decode[0].faults.extend([500, 500])
    answer = chat.say("Hello")
    assert (answer.status, answer.json["error"]["type"]) == (502, "engine_error")
    assert chat.say("Hello").outcome == "miss"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [404, 422, 429])
def test_an_engines_refusal_is_passed_on(
    router: Router, conversation: str, role: str, status: int
) -> None:
    engine = getattr(router, role)[0]
    engine.faults.append(status)
    answer = router.post(Chat(router, conversation).body("Hello"))
    assert answer.status == status
    assert answer.json["error"]["code"] == status


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/score"])
@pytest.mark.parametrize("status", [201, 204, 206, 301, 307])
def test_what_is_neither_an_answer_nor_a_refusal_is_a_502(
    router: Router, conversation: str, path: str, status: int
) -> None:
    """A client would take the error for an answer, or look for it elsewhere."""
    for engine in router.engines:
        engine.faults.append(status)
    answer = router.post(Chat(router, conversation).body("Hello"), path)
    assert answer.status == 502
    assert answer.json["error"]["type"] == ("api_error" if "messages" in path else "engine_error")
    for engine in router.engines:
        engine.faults.clear()
    if path == "/v1/chat/completions":
        router.decode[0].faults.append(status)
        assert router.post(Chat(router, conversation).body("Hello"), path).status == 502


def test_a_refusal_that_repeats_the_request_is_cleaned(router: Router, conversation: str) -> None:
    router.decode[0].faults.append(ECHO_400)
    answer = Chat(router, conversation).say("Hello")
    assert (answer.status, answer.json["error"]["message"]) == (400, "Value error, no.")


def test_a_decode_leg_that_dies_is_a_503_until_it_is_back(start_router: StartRouter) -> None:
    router = start_router()
    chat = Chat(router, "c")
    for bystander in (Chat(router, "d"), chat):
        bystander.say("Hello")
    assert router.metric("pd_router_handles_held") == 2
    router.decode[0].stop()
    for _ in range(3):
        answer = chat.say("Again")
        assert answer.status == 503
        assert answer.headers["retry-after"]
        error = answer.json["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", 503)
        assert "decode-0 (connection refused)" in error["message"]
    # At most the first of them got as far as prefill: readback failed, prefilled afresh.
    assert len(router.prefill[0].requests) <= 4
    health = router.get("/health")
    assert health.status_code == 503
    router.check_secrets(health.content)
    legs = {leg["name"]: leg for leg in health.json()["legs"]}
    assert legs["decode-0"]["reason"] == "connection refused"
    assert legs["prefill-0"]["healthy"] is True
    assert router.metric("pd_router_handles_held") == 0
    router.decode[0].start()
    wait_for(lambda: chat.say("Again").status == 200, "the leg is back")
    assert chat.say("More").outcome == "hit"


def test_a_handle_outlives_a_prefill_leg_that_refuses(start_router: StartRouter) -> None:
    router = start_router()
    chat = Chat(router, "c")
    chat.say("Hello")
    router.prefill[0].stop()
    answer = chat.say("Again")
    assert answer.status == 503
    assert "prefill-0 (connection refused)" in answer.json["error"]["message"]
    assert router.metric("pd_router_handles_sent_total") == 0
    assert router.metric("pd_router_handles_held") == 1
    router.prefill[0].start()
    wait_for(lambda: router.get("/health").status_code == 200, "the leg is back")
    assert chat.say("Again").outcome == "hit"


def test_another_prefill_leg_takes_over_with_the_handle(start_router: StartRouter) -> None:
    router = start_router(prefills=2)
    chat = Chat(router, "c")
    chat.say("Hello")
    for engine in router.prefill:
        if not engine.requests:
            engine.stop()
    assert [chat.say("Again").outcome, chat.say("More").outcome] == ["hit", "hit"]


def test_another_decode_leg_takes_over(start_router: StartRouter) -> None:
    router = start_router(decodes=2)
    chat = Chat(router, "c")
    chat.say("Hello")
    lost = next(engine for engine in router.decode if engine.requests)
    lost.stop()
    # Either prefill cannot read the lost leg's blocks, or the probe has found it lost.
    assert chat.say("Again").outcome in ("failed", "miss")
    assert chat.say("More").outcome == "hit"


def test_a_restarted_decode_leg_costs_a_recompute(start_router: StartRouter) -> None:
    router = start_router()
    chat = Chat(router, "c")
    chat.say("Hello")
    router.decode[0].stop()
    router.decode[0].start()
    wait_for(lambda: chat.say("Again").status == 200, "the leg is up")
    assert chat.say("More").outcome == "hit"


def test_a_dead_leg_is_noticed_without_a_turn(start_router: StartRouter) -> None:
    router = start_router()
    Chat(router, "c").say("Hello")
    router.decode[0].stop()
    wait_for(lambda: router.metric("pd_router_handles_held") == 0, "its handles are dropped")
    answer = Chat(router, "c").say("Hello")
    assert answer.status == 503
    assert len(router.prefill[0].requests) == 1


@both
@pytest.mark.parametrize("fault", ["die", "end", "stall"])
def test_a_stream_that_breaks_ends_in_an_error_event(start_router: StartRouter, fault: str) -> None:
    router = start_router(stream_idle_timeout=0.5)
    chat = Chat(router, "c")
    router.decode[0].faults.append(fault)
    answer = router.post(chat.body("Hello"))
    assert answer.status == 200
    assert b"[DONE]" not in answer.raw
    last = answer.raw.rstrip().rsplit(b"\n", 1)[-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], "decode-0" in error["message"]) == (502, True)
    assert router.metric("pd_router_handles_held") == 0


@both
def test_the_engines_own_error_event_is_passed_on(router: Router, conversation: str) -> None:
    chat = Chat(router, conversation)
    router.decode[0].faults.append("error")
    answer = router.post(chat.body("Hello"))
    assert answer.chunks[-1] == {"error": {"message": "Internal server error", "code": 500}}
    assert router.post(chat.body("Hello")).outcome == "miss"


def test_an_answer_that_breaks_off_is_a_503(router: Router, conversation: str) -> None:
    router.decode[0].faults.append("drop")
    answer = Chat(router, conversation, stream=False).say("Hello")
    assert answer.status == 503
    assert "decode-0" in answer.json["error"]["message"]
    wait_for(lambda: router.get("/health").status_code == 200, "the leg is back")


def test_engines_without_handles_are_no_obstacle(
    router: Router, conversation: str, stream: bool
) -> None:
    for engine in router.engines:
        engine.omit_handles = True
    chat = Chat(router, conversation, stream)
    assert [chat.say("Hello").outcome, chat.say("Again").outcome] == ["miss", "miss"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_that_leaves_aborts_the_engine(
    router: Router, conversation: str, role: str, stream: bool
) -> None:
    engine = getattr(router, role)[0]
    engine.faults.append("hang")
    body = json.dumps(Chat(router, conversation, stream).body("Hello")).encode()
    with send(router, body):
        wait_for(lambda: len(engine.requests) == 1, "the engine works")
    wait_for(lambda: engine.aborted == 1, "the engine request is aborted")


@pytest.mark.parametrize("route", ["readback", "append"])
def test_a_client_that_leaves_takes_its_handle_along(start_router: StartRouter, route: str) -> None:
    router = start_router(route=route)
    chat = Chat(router, "c")
    chat.say("Hello")
    handle = router.decode[0].handles[-1]["remote_request_id"]
    engine = (router.prefill if route == "readback" else router.decode)[0]
    engine.faults.append("hang")
    requests = len(engine.requests)
    with send(router, json.dumps(chat.body("Again")).encode()):
        wait_for(lambda: len(engine.requests) > requests, "the engine has the handle")
    wait_for(lambda: engine.aborted == 1, "the engine request is aborted")
    # Whether it was read by then nobody knows, so nobody gets it again.
    router.wait_released({handle})
    assert router.metric("pd_router_handles_held") == 0
    assert chat.say("Again").status == 200


@both
def test_a_client_that_leaves_a_stream_aborts_decode(router: Router, conversation: str) -> None:
    router.decode[0].hold_after = 2
    body = json.dumps(Chat(router, conversation).body("Hello")).encode()
    with send(router, body) as client:
        seen = b""
        while b"data: " not in seen:
            seen += client.recv(4096)
    wait_for(lambda: router.decode[0].aborted == 1, "the engine request is aborted")
    router.decode[0].released.set()
    assert Chat(router, conversation).say("Again").outcome == "miss"


def send(router: Router, body: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[-1])))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


@both
def test_sigterm_lets_running_streams_end(start_router: StartRouter) -> None:
    router = start_router()
    router.decode[0].hold_after = 2
    chat = Chat(router, "c")
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(router.post(chat.body("Hello"))))
    thread.start()
    wait_for(lambda: router.decode[0].requests, "the stream runs")
    router.process.terminate()

    def refuses() -> bool:
        try:
            httpx.get(router.url + "/metrics")
        except httpx.TransportError:
            return True
        return False

    wait_for(refuses, "the router accepts no more")
    assert router.process.poll() is None
    router.decode[0].released.set()
    thread.join()
    assert answers[0].message["content"].startswith("answer-")
    assert router.process.wait(20) == 0
